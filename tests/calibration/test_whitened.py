"""The whitened affinity against a float64 rendering of its formulas, and its edge cases."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from fdc_jax import calibration
from fdc_jax.calibration import fdc, whitened
from fdc_jax.calibration.components import WHITENED, WHITENED_CLASSES, fuse_all
from fdc_jax.errors import InputError
from tests.calibration import streams
from tests.calibration.reference import normalise

SHRINKAGE = 0.05


class Reference:
    """Whitened cosines of one view, with the symmetric inverse square root, task after task."""

    def __init__(self, tasks, shrinkage=SHRINKAGE, floor=0.01):
        means, scatter, images, self.own = [], 0.0, 0, []
        for features, rows in tasks:
            features, here = features.astype(np.float64), []
            for row in np.unique(rows):
                inside = features[rows == row]
                here.append(inside.mean(axis=0))
                scatter = scatter + (inside - here[-1]).T @ (inside - here[-1])
                images += len(inside)
            means.append(np.array(here))
            self._measure(means, scatter / images, shrinkage)
            largest = self.cosines(features)[-1].max(axis=1)
            self.own.append((largest.mean(), max(largest.std(), floor)))

    def _measure(self, means, covariance, shrinkage):
        width = len(covariance)
        values, vectors = np.linalg.eigh(
            covariance + shrinkage * np.trace(covariance) / width * np.eye(width)
        )
        self.root = (vectors / np.sqrt(values)) @ vectors.T
        self.origin = np.concatenate(means).mean(axis=0)
        self.prototypes = [normalise((each - self.origin) @ self.root) for each in means]

    def cosines(self, features):
        whitened = normalise((features.astype(np.float64) - self.origin) @ self.root)
        return [whitened @ each.T for each in self.prototypes]

    def affinity(self, features, reference, scope):
        own = np.array(self.own)
        if reference == "pooled":
            own = np.broadcast_to(own.mean(axis=0), own.shape)
        found = []
        for (mean, std), cosines in zip(own, self.cosines(features), strict=True):
            largest = cosines if scope == "class" else cosines.max(axis=1, keepdims=True)
            found.append((largest - mean) / std)
        return found


def expected_scores(stream, kind, inputs, affinity, tsf=True, rlc=True, views=(True, True)):
    """Scores and rows, from the float64 FDC for everything but the affinity."""
    fdc = streams.fitted_reference(stream, kind)
    base, rows = fdc.score(*inputs, tsf, rlc, False, views)
    closeness = [np.zeros((len(base), 1)) for _ in stream]
    for view, features in enumerate(inputs):
        if not views[view]:
            continue
        own = Reference([((t.adapted, t.pretrained)[view], t.rows) for t in stream])
        for t, found in enumerate(own.affinity(features, affinity.reference, affinity.scope)):
            closeness[t] = closeness[t] + (np.tanh(found) if affinity.evidence == "tanh" else found)
    sigma = fdc.sigma[tsf]
    if affinity.scope == "task":
        scores = [base[:, t] + sigma[t] * closeness[t][:, 0] for t in range(len(stream))]
        return np.stack(scores, axis=1), rows
    scores, rows = np.empty_like(base), np.empty_like(rows)
    for t in range(len(stream)):
        logits = fdc.logits(t, inputs[0].astype(np.float64), tsf)
        common = base[:, t] - logits.max(axis=1)
        each = (logits + common[:, None]) / sigma[t] + closeness[t]
        scores[:, t], rows[:, t] = each.max(axis=1), each.argmax(axis=1)
    return scores, rows


def assert_scores(found, expected, tolerance=2e-4):
    scores, rows = expected
    assert streams.relative_error(found.task_scores, scores) < tolerance
    assert (found.local_class == rows).mean() > 0.99


def by_affinity(terms, affinity):
    """The same terms, to be fused by another affinity than the one that was set."""
    words = {f"affinity_{name}": word for name, word in affinity._asdict().items()}
    chosen = dataclasses.replace(terms.settings, **words)
    return dataclasses.replace(terms, settings=chosen)


AFFINITIES = [
    whitened.Affinity("whitened", *rest)
    for rest in itertools.product(("tanh", "linear"), ("own", "pooled"), ("task", "class"))
]


@pytest.mark.parametrize(
    ("kind", "offset"),
    [
        *((kind, 0.0) for kind in ("linear", "normalised_linear", "cosine", "nearest_mean")),
        *(("function", 0.0), ("linear", 30.0), ("cosine", 30.0)),
    ],
)
def test_scores_equal_the_reference(kind, offset):
    stream = streams.stream(3, 4, offset=offset)
    inputs = streams.probe_inputs(stream)
    terms = streams.fitted(stream, kind, device=offset > 0, **WHITENED).terms(*inputs)
    for affinity in AFFINITIES:
        found = by_affinity(terms, affinity).scores()
        assert_scores(found, expected_scores(stream, kind, inputs, affinity))


@pytest.mark.parametrize("affinity", AFFINITIES[2:6])
def test_components_and_views_apart(affinity):
    stream = streams.stream(4, 3)
    inputs = streams.probe_inputs(stream)
    terms = streams.fitted(stream, **WHITENED).terms(*inputs)
    for tsf, rlc, first, second in itertools.product((True, False), repeat=4):
        found = by_affinity(terms, affinity).scores(
            tsf=tsf, rlc=rlc, adapted_view=first, pretrained_view=second
        )
        if not first and not second:
            assert not (found.task_scores - terms.fuse(tsf, False, False).task_scores).any()
            continue
        expected = expected_scores(stream, "linear", inputs, affinity, tsf, rlc, (first, second))
        assert_scores(found, expected)


def test_weights_multiply_the_evidence():
    stream = streams.stream(5, 3)
    inputs = streams.probe_inputs(stream)
    once, twice = (
        streams.fitted(stream, rlc_weight=0.0, pac_weight=weight, **WHITENED).terms(*inputs)
        for weight in (1.0, 2.0)
    )
    base = once.fuse(pac=False).task_scores
    found, expected = (each.scores().task_scores - base for each in (twice, once))
    np.testing.assert_allclose(found, 2 * expected, rtol=1e-4, atol=1e-5)


def test_the_papers_numbers_stay_what_they_are():
    stream = streams.stream(6, 4)
    inputs = streams.probe_inputs(stream)
    paper = streams.fitted(stream)
    beyond = streams.fitted(stream, **WHITENED_CLASSES)
    expected = fuse_all(paper.terms(*inputs))
    for name, scores in fuse_all(beyond.terms(*inputs)).items():
        np.testing.assert_array_equal(scores.task_scores, expected[name].task_scores)
    assert beyond.paper_storage_bytes == paper.storage_bytes == paper.paper_storage_bytes
    extra = sum(4 * (d * (d + 1) // 2 + 1) for d in (16, 12))
    assert beyond.storage_bytes == paper.storage_bytes + extra
    assert not paper.terms(*inputs).beyond()


def test_cosines_with_linear_evidence():
    stream = streams.stream(7, 3)
    inputs = streams.probe_inputs(stream)
    terms = streams.fitted(stream, affinity_evidence="linear").terms(*inputs)
    bounded = streams.fitted(stream).terms(*inputs)
    np.testing.assert_allclose(np.tanh(terms.adapted.affinity), bounded.adapted.pac, rtol=1e-6)
    base = terms.fuse(rlc=False, pac=False).task_scores
    q = terms.adapted.affinity + terms.pretrained.affinity
    found = terms.beyond()["linear"]["tsf+pac"].task_scores
    np.testing.assert_allclose(found, base + terms.filtered_scale * q, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapted_within_scatter": None}, "adapted_within_scatter: missing"),
        ({"adapted_cosine_std": np.zeros(3)}, "adapted_cosine_std: expected at least 0.01"),
    ],
)
def test_damaged_files_are_refused(tmp_path, fields, message):
    streams.fitted(streams.stream(1, 3), **WHITENED).save(tmp_path / "good.npz")
    arrays = {**np.load(tmp_path / "good.npz"), **fields}
    np.savez(tmp_path / "bad.npz", **{n: v for n, v in arrays.items() if v is not None})
    with pytest.raises(InputError, match=rf"bad\.npz: {message}"):
        calibration.load(tmp_path / "bad.npz")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({**WHITENED, "affinity_reference": "nearest"}, "affinity_reference: .* own, pooled"),
        ({**WHITENED, "affinity_shrinkage": 0.0}, "affinity_shrinkage: expected 0.0001 to 10000"),
        ({**WHITENED, "neighbours": 2}, "neighbours: expected 1 with affinity_metric whitened"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        calibration.from_settings(arguments)


@pytest.mark.parametrize("kind", ["linear", "nearest_mean", "function"])
@pytest.mark.parametrize("settings", [{}, WHITENED, WHITENED_CLASSES])
def test_scores_of_classes(settings, kind):
    stream = streams.stream(3, 3)
    inputs = streams.probe_inputs(stream)
    fitted = streams.fitted(stream, kind, **settings)
    found, scores = fitted.class_scores(*inputs), fitted.score(*inputs)
    np.testing.assert_array_equal(
        np.concatenate(fitted.classes)[found.argmax(axis=1)], scores.label
    )
    ends = np.cumsum([len(each) for each in fitted.classes])[:-1]
    for t, part in enumerate(np.split(found, ends, axis=1)):
        np.testing.assert_array_equal(part.max(axis=1), scores.task_scores[:, t])
        if "affinity_scope" in settings:
            continue
        # A task's classes differ as their filtered logits do.
        logits = streams.fitted_reference(stream, kind).logits(
            t, inputs[0].astype(np.float64), True
        )
        behind = part - part.max(axis=1, keepdims=True)
        expected = logits - logits.max(axis=1, keepdims=True)
        assert np.abs(behind - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_class_without_an_image_is_ignored():
    stream = streams.stream(3, 3)
    named, bigger = streams.fitted(stream, **WHITENED_CLASSES), streams.new(**WHITENED_CLASSES)
    for task in stream:
        weight = np.concatenate([task.weight, np.ones_like(task.weight[:1])])
        head = streams.heads.LinearHead(weight, np.append(task.bias, np.float32(99)))
        classes = [*np.unique(task.labels), 70 + task.first]
        bigger.fit_task(task.adapted, task.labels, head, task.pretrained, classes)
    bigger.finalize()
    own = [each.affinities[1][0] for each in (named, bigger)]
    assert own[0][1:] == own[1][1:]
    found = bigger.score(*streams.probe_inputs(stream))
    assert np.isfinite(found.task_scores).all() and (found.label < 70).all()


@pytest.mark.parametrize("variant", [WHITENED, WHITENED_CLASSES])
def test_one_class_a_task_one_image_a_class_and_equal_images(variant):
    rng = np.random.default_rng(0)
    cases = {
        "one class a task": [(rng.normal(size=(9, 8)) + 4 * t, np.zeros(9, int)) for t in range(4)],
        "one image a class": [(rng.normal(size=(3, 8)), np.arange(3)) for _ in range(3)],
        "equal images": [(np.full((6, 8), 1.0 + t), np.arange(6) % 2) for t in range(3)],
    }
    for name, tasks in cases.items():
        fitted = streams.new(**variant)
        for t, (features, rows) in enumerate(tasks):
            weight = rng.normal(size=(rows.max() + 1, 8)).astype(np.float32)
            head = streams.heads.LinearHead(weight, np.zeros(len(weight), np.float32))
            fitted.fit_task(features.astype(np.float32), rows + 10 * t, head)
        fitted.finalize()
        probe = np.concatenate([features for features, _ in tasks]).astype(np.float32)
        scores = fitted.score(probe).task_scores
        assert np.isfinite(scores).all(), name
        # A first task of one class has no mean amid classes; nothing is out of scale then, either.
        assert np.abs(scores).max() < 1e3 or name == "equal images", name


def test_the_metric_is_that_of_linear_discriminant_analysis():
    """Whitening by an independent package: inner products are those of the inverse covariance."""
    rng = np.random.default_rng(1)
    rows = np.arange(300) % 5
    features = (rng.normal(size=(300, 10)) @ rng.normal(size=(10, 10)) + rows[:, None]).astype(
        np.float32
    )
    lda = LinearDiscriminantAnalysis(solver="lsqr", store_covariance=True).fit(features, rows)
    shrunk = lda.covariance_ + SHRINKAGE * np.trace(lda.covariance_) / 10 * np.eye(10)
    sums, counts = fdc.Sums(10), np.bincount(rows)
    sums.add(features, rows)
    totals = fdc.class_sums(features.astype(np.float64), rows)
    means = np.stack([totals[row] / counts[row] for row in range(5)])
    np.testing.assert_allclose(means, lda.means_, rtol=1e-5, atol=1e-5)
    scatter = whitened.within_scatter(sums, means, counts)
    metric = whitened.prototypes(scatter, [means], [counts], SHRINKAGE)
    whitener = np.asarray(metric.whitener, np.float64)
    scale = np.trace(lda.covariance_) / 10
    np.testing.assert_allclose(
        whitener.T @ whitener / scale, np.linalg.inv(shrunk), rtol=1e-3, atol=1e-6
    )
    np.testing.assert_allclose(metric.origin, lda.means_.mean(axis=0), rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=15, derandomize=True)
@given(st.integers(0, 10_000), st.floats(0.1, 50.0), st.integers(2, 4))
def test_cosines_do_not_depend_on_scale_shift_or_rotation(seed, scale, tasks):
    rng = np.random.default_rng(seed)
    stream = streams.stream(seed, tasks)
    inputs = streams.probe_inputs(stream)
    rotation = np.linalg.qr(rng.normal(size=(16, 16)))[0]
    shift = rng.normal(size=16)

    def moved(features):
        return (scale * features @ rotation + scale * shift).astype(np.float32)

    found = []
    for change in (lambda features: features, moved):
        changed = [task._replace(adapted=change(task.adapted)) for task in stream]
        fitted = streams.fitted(changed, dual=False, **WHITENED)
        found.append(fitted.terms(change(inputs[0])).whitened[0])
    np.testing.assert_allclose(found[0].cosines, found[1].cosines, atol=2e-3)
    np.testing.assert_allclose(found[0].mean, found[1].mean, atol=2e-3)


def test_a_head_without_spread_does_not_decide_everything():
    """A task of one image has a score scale of nothing, in whose units its logits are immense."""
    rng = np.random.default_rng(3)
    fitted = streams.new(**WHITENED_CLASSES)
    images = [rng.normal(size=(30, 8)) + 3 * t for t in range(3)] + [rng.normal(size=(1, 8)) - 3]
    for t, features in enumerate(images):
        head = streams.heads.LinearHead(
            rng.normal(size=(1, 8)).astype(np.float32), np.ones(1, np.float32)
        )
        fitted.fit_task(features.astype(np.float32), np.full(len(features), t), head)
    fitted.finalize()
    scores = fitted.score(np.concatenate(images[:3]).astype(np.float32)).task_scores
    spread = np.abs(scores[:, :3]).max()
    assert np.abs(scores[:, 3]).max() < 30 * spread
