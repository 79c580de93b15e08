"""RSIAT: its losses and their gradients, its steps, and what it makes of the end of a task."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from fdc_jax import configuration, learners
from fdc_jax import heads as head_types
from fdc_jax.data.batches import Batch
from fdc_jax.errors import InputError, TrainingError
from fdc_jax.learners import rsiat, training
from fdc_jax.model import vit
from tests.learners import rsiat_reference, small_stream
from tests.learners.small_stream import float64, make_batch, make_setup
from tests.model.reference import features, random_params

# One block, which compiles fast; that every block has its adapter is a test of the encoder.
SHALLOW = vit.Variant(width=24, depth=1, heads=3, patch=4)

SCALE, MARGIN, STEERING, SEPARATION, THRESHOLD, ALIGNMENT, REPULSION, REACH = (
    *(4.0, 0.3, 0.7, 1.5, 0.2, 0.9, 2.0, 2.0),
)
PARTS = ("adapter", "projector", "head")


@dataclasses.dataclass(frozen=True)
class ShallowSetup(training.Setup):
    """A set-up around an encoder of one block."""

    @property
    def variant(self) -> vit.Variant:
        """Sizes of the encoder."""
        return SHALLOW


def make_rsiat(**fields):
    """A set-up with constants of which none is one that another could be taken for."""
    ours = dict(
        bottleneck=5,
        dropout=0.25,
        scale=SCALE,
        margin=MARGIN,
        steering_weight=STEERING,
        separation_weight=SEPARATION,
        separation_threshold=THRESHOLD,
        alignment_weight=ALIGNMENT,
        repulsion_weight=REPULSION,
        projector_width=7,
        drift_width=REACH,
        samples_per_class=8,
        calibration_batch_size=8,
        calibration_epochs=3,
        calibration_learning_rate=0.5,
    )
    made = make_setup(**{f"learner__rsiat__{name}": value for name, value in ours.items()} | fields)
    return ShallowSetup(vit.VisionTransformer(SHALLOW), made.classes_per_task, made.config)


@pytest.fixture(scope="module")
def backbone():
    return random_params(11, SHALLOW)


@pytest.fixture(scope="module")
def setup():
    return make_rsiat()


@pytest.fixture(scope="module")
def update(setup):
    return rsiat.update(setup)


@functools.cache
def compiled_loss(identity=False):
    setup = make_rsiat(learner__rsiat__identity_init=identity)
    return jax.jit(
        jax.value_and_grad(
            lambda trained, backbone, frozen, batch, warm_up: rsiat.loss(
                setup, backbone, frozen, trained, batch, warm_up
            )
        )
    )


def random_state(setup, num_tasks, seed=0):
    """State after some tasks that consists of noise; slots to come are zero."""
    state = small_stream.random_like(rsiat.initial_state(setup), seed)
    means = 2.0 * state.gaussians.means
    return state._replace(
        heads=state.heads.at[num_tasks:].set(0.0),
        gaussians=state.gaussians._replace(means=means.at[num_tasks:].set(0.0)),
    )


def random_start(setup, backbone, task):
    """What a task starts from after a past of noise, its own leaves noise as well."""
    state = random_state(setup, task)
    if task == 0:
        state = rsiat.initial_state(setup)
    frozen, trained = rsiat.start(setup, backbone, state, task, jax.random.key(0))
    return state, frozen, small_stream.random_like(trained, 7)


def features_by(backbone, images, adapter):
    return features(backbone, images, SHALLOW, adapter=adapter)


# The loss ----------------------------------------------------------------------------------------


def reference_loss(setup, backbone, state, trained, batch, task, warm_up, bounded=True):
    """The loss in float64; `trained` holds float64 leaves."""
    real = batch.weights > 0
    images, labels = batch.images[real], batch.labels[real]
    features = features_by(backbone, images, trained["adapter"])
    rows = trained["head"][: setup.classes_per_task[task]]
    value = rsiat_reference.cosface(features, rows, labels, SCALE, MARGIN)
    if task == 0:
        steering = rsiat_reference.steering(features, labels, SEPARATION, THRESHOLD)
        return value + STEERING * warm_up * steering
    projected = rsiat_reference.project(
        trained["projector"], features_by(backbone, images, state.adapter), bounded
    )
    means = np.concatenate(
        [
            np.asarray(state.gaussians.means, np.float64)[t, :classes]
            for t, classes in enumerate(setup.classes_per_task[:task])
        ]
    )
    projected_means = rsiat_reference.project(trained["projector"], means, bounded)
    value += ALIGNMENT * rsiat_reference.alignment(features, projected)
    return value + REPULSION * rsiat_reference.repulsion(projected_means, projected)


@pytest.mark.parametrize(
    ("task", "warm_up", "identity"), [(0, 0.4, False), (1, 0.4, False), (2, 1.0, True)]
)
def test_loss_and_gradients_against_the_formulas(backbone, task, warm_up, identity):
    """The slope along a random direction of each part is that of the formula in float64."""
    setup = make_rsiat()
    state, frozen, trained = random_start(setup, backbone, task)
    batch = make_batch(3, size=5, classes=setup.classes_per_task[task], padding=1)
    value, gradients = compiled_loss(identity)(trained, backbone, frozen, batch, warm_up)

    def expected(leaves):
        return reference_loss(
            setup, backbone, state, leaves, batch, task, warm_up, bounded=not identity
        )

    trained = float64(trained)
    np.testing.assert_allclose(value, expected(trained), rtol=1e-5)
    for seed, part in enumerate(PARTS):
        direction = float64(small_stream.random_like(trained[part], seed))

        def moved(step, part=part, direction=direction):
            leaves = jax.tree.map(lambda leaf, d: leaf + step * d, trained[part], direction)
            return expected(trained | {part: leaves})

        slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
        products = jax.tree.map(lambda g, d: np.sum(g * d), float64(gradients[part]), direction)
        found = sum(jax.tree.leaves(products))
        np.testing.assert_allclose(found, slope, rtol=1e-3, atol=1e-5)
        assert (abs(slope) > 1e-3) == (part != "projector" or task > 0)
    if task == 0:
        for leaf in jax.tree.leaves(gradients["projector"]):
            np.testing.assert_array_equal(leaf, 0)


def test_padding_counts_for_nothing(backbone):
    setup = make_rsiat()
    for task in (0, 1):
        _, frozen, trained = random_start(setup, backbone, task)
        batch = make_batch(3, size=5, classes=2, padding=1)
        other = Batch(batch.images.copy(), batch.labels, batch.weights)
        other.images[-1] = make_batch(4, size=1).images[0]
        for found, expected in zip(
            jax.tree.leaves(compiled_loss()(trained, backbone, frozen, batch, 1.0)),
            jax.tree.leaves(compiled_loss()(trained, backbone, frozen, other, 1.0)),
            strict=True,
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_identity_projector_has_finite_gradients_from_the_first_task_on(backbone):
    setup = make_rsiat(learner__rsiat__identity_init=True)
    for task in range(3):
        state = random_state(setup, task)
        frozen, trained = rsiat.start(setup, backbone, state, task, jax.random.key(0))
        np.testing.assert_array_equal(trained["projector"].out.weight, 0)
        assert np.abs(trained["projector"].into.weight - state.projector.into.weight).max() > 0.1
        _, gradients = compiled_loss(True)(trained, backbone, frozen, make_batch(3), 1.0)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


# Start and steps ---------------------------------------------------------------------------------


def test_what_a_task_starts_from(setup, backbone):
    initial = rsiat.initial_state(setup)
    _, trained = rsiat.start(setup, backbone, initial, 0, jax.random.key(0))
    adapter = trained["adapter"]
    assert adapter["down"].shape == (SHALLOW.depth, SHALLOW.width, 5)
    bound = SHALLOW.width**-0.5
    assert -bound <= adapter["down"].min() < -0.9 * bound
    assert 0.9 * bound < adapter["down"].max() <= bound
    for leaf in ("down_bias", "up", "up_bias"):
        np.testing.assert_array_equal(adapter[leaf], 0)
    images = make_batch().images
    pretrained = vit.pretrained_kernels(backbone)
    np.testing.assert_allclose(
        small_stream.encode(setup, backbone, images, pretrained | {"adapter": adapter}),
        small_stream.encode(setup, backbone, images, rsiat.encoder(setup, backbone, initial, 0)),
        atol=1e-6,
    )
    state = random_state(setup, 2)
    frozen, second = rsiat.start(setup, backbone, state, 1, jax.random.key(1))
    # The first task has no use for a projector, the second draws it.
    assert np.abs(second["projector"].into.weight - state.projector.into.weight).max() > 0.1
    _, third = rsiat.start(setup, backbone, state, 2, jax.random.key(1))
    for carried in (second, third):
        jax.tree.map(np.testing.assert_array_equal, carried["adapter"], state.adapter)
    jax.tree.map(np.testing.assert_array_equal, third["projector"], state.projector)
    jax.tree.map(np.testing.assert_array_equal, frozen["kernels"]["adapter"], state.adapter)
    heads = np.stack([trained["head"], second["head"]])
    assert heads.shape == (2, 3, SHALLOW.width)
    assert 0.015 < heads.std() < 0.025
    assert np.abs(heads[0] - heads[1]).max() > 0.01


def test_dropout_follows_from_task_and_step_and_is_off_in_evaluation(setup, backbone, update):
    _, frozen, trained = random_start(setup, backbone, 1)
    batch = make_batch(3, size=6, classes=3)
    fresh = float64(update.initialise(trained).steps)
    assert fresh == 0

    def loss_of_step(steps, frozen=frozen):
        optimizer = update.initialise(trained)._replace(steps=jnp.asarray(steps, jnp.int32))
        leaves = small_stream.copy(trained)
        _, after, value = update.step(backbone, frozen, leaves, optimizer, batch, (1.0, 1.0))
        assert int(after.steps) == steps + 1
        return float(value)

    first = loss_of_step(0)
    assert first == loss_of_step(0)
    assert abs(first - loss_of_step(1)) > 1e-3
    other = frozen | {"dropout": jax.random.key_data(jax.random.key(9))}
    assert abs(first - loss_of_step(0, other)) > 1e-3
    assert abs(first - float(compiled_loss()(trained, backbone, frozen, batch, 1.0)[0])) > 1e-3


def test_the_loss_asks_for_its_dropout(setup, backbone):
    """In the encoder that is trained, and not in the one before the task."""
    asked = []

    class Model:
        def apply(self, parameters, images, kernels, *dropout):
            asked.append(dropout)
            return setup.model.apply(parameters, images, kernels, *dropout)

    spied = dataclasses.replace(setup, model=Model())
    _, frozen, trained = random_start(setup, backbone, 1)
    key = jax.random.key(0)
    jax.eval_shape(
        lambda leaves: rsiat.loss(spied, backbone, frozen, leaves, make_batch(3), 1.0, key), trained
    )
    assert asked == [(None, key, 0.25), ()]


def test_a_step_passes_the_warm_up_on(monkeypatch, setup):
    def only_warm_up(setup, backbone, frozen, trained, batch, warm_up, dropout_key):
        return warm_up + 0.0 * trained["head"]

    monkeypatch.setattr(rsiat, "loss", only_warm_up)
    update = rsiat.update(setup)
    frozen = {"later": jnp.asarray(False), "dropout": jax.random.key_data(jax.random.key(0))}
    for warm_up in (0.25, 0.75):
        trained = {part: jnp.zeros(()) for part in PARTS}
        optimizer = update.initialise(trained)
        _, _, value = update.step(None, frozen, trained, optimizer, None, (1.0, warm_up))
        assert float(value) == warm_up


def linear_steps(monkeypatch, later, slope, leaf=0.0, **fields):
    """Two steps on a loss of known slope from leaves of one number; no encoder is needed."""

    def linear(setup, backbone, frozen, trained, batch, warm_up, dropout_key):
        return slope * sum(jax.tree.leaves(trained))

    monkeypatch.setattr(rsiat, "loss", linear)
    update = rsiat.update(make_rsiat(**fields))
    frozen = {"later": jnp.asarray(later), "dropout": jax.random.key_data(jax.random.key(0))}
    trained = {part: jnp.full((), leaf) for part in PARTS}
    optimizer, moved = update.initialise(trained), []
    for _ in range(2):
        before = float64(trained)
        trained, optimizer, _ = update.step(None, frozen, trained, optimizer, None, (0.5, 0.0))
        moved.append({part: float(before[part] - trained[part]) for part in PARTS})
    return moved, optimizer


@pytest.mark.parametrize("later", [False, True])
def test_protocol_is_adam_at_three_rates(monkeypatch, later):
    moved, _ = linear_steps(
        monkeypatch,
        later,
        slope=0.01,
        train__increment_learning_rate=0.02,
        train__head_learning_rate=0.05,
        learner__rsiat__projector_learning_rate=0.03,
    )
    for step in moved:
        expected = {"adapter": 0.01, "projector": 0.015, "head": 0.025}
        assert step == pytest.approx(expected, rel=1e-4)


# Rate, decay, and both of the projector.
NATIVE = {
    "cifar100": (1.8461e-2, 1.714e-4, 5.612e-4, 2.934e-3),
    "cub200": (3.7739e-2, 3.426e-6, 9.989e-2, 9.419e-5),
    "imagenet_a": (6.6885e-3, 5.930e-7, 3.121e-4, 2.424e-5),
    "imagenet_r": (6.7350e-3, 1.071e-6, 1.671e-4, 4.098e-3),
    "omnibench": (3.9620e-3, 2.331e-7, 3.989e-5, 3.592e-2),
    "digits": (6.6885e-3, 5.930e-7, 3.121e-4, 2.424e-5),
}


@pytest.mark.parametrize("benchmark", NATIVE)
def test_native_is_sgd_with_momentum(monkeypatch, benchmark):
    native = dict(learner__preset="native", benchmark=benchmark)
    rate, _, projector_rate, _ = NATIVE[benchmark]
    later, _ = linear_steps(monkeypatch, True, 2.0, **native)
    expected = {"adapter": rate, "head": rate, "projector": projector_rate}
    first, _ = linear_steps(monkeypatch, False, 2.0, **native)
    for part in PARTS:
        assert [step[part] for step in later] == pytest.approx(
            [expected[part], 1.9 * expected[part]], rel=2e-3
        )
        assert [step[part] for step in first] == pytest.approx([1e-2, 1.9e-2], rel=2e-3)


@pytest.mark.parametrize("benchmark", NATIVE)
def test_native_decay(monkeypatch, benchmark):
    """The momentum shows the decays, too small to be seen in a step."""
    native = dict(learner__preset="native", benchmark=benchmark)
    _, optimizer = linear_steps(monkeypatch, True, 0.0, 5.0, **native)
    trace = {part: float(leaf) for part, leaf in optimizer.inner.trace.items()}
    _, decay, _, projector_decay = NATIVE[benchmark]
    expected = {"adapter": decay, "head": decay, "projector": projector_decay}
    # The rates of the data set move the leaves a little between the two steps.
    assert trace == pytest.approx({part: 9.5 * each for part, each in expected.items()}, rel=1e-2)
    moved, _ = linear_steps(monkeypatch, True, 0.0, 5.0)
    assert moved == [dict.fromkeys(PARTS, 0.0)] * 2


def test_warm_up_and_schedule():
    update = rsiat.update(make_rsiat(learner__rsiat__warm_up_epochs=4))
    rates = [update.schedule(epoch, 8) for epoch in range(8)]
    assert [rate[1] for rate in rates] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]
    assert {rate[0] for rate in rates} == {1.0}
    native = rsiat.update(make_rsiat(learner__preset="native", learner__rsiat__warm_up_epochs=0))
    assert [native.schedule(epoch, 2) for epoch in range(2)] == [
        (1.0, 1.0),
        (pytest.approx(0.5), 1.0),
    ]


def test_a_task_that_was_interrupted_goes_on_exactly(setup, backbone, update):
    """From what a checkpoint holds, state, trained leaves and optimizer, to the same bits."""
    state = random_state(setup, 1)

    def steps(frozen, trained, optimizer, which):
        for step in which:
            batch = make_batch(step, size=6, classes=3)
            trained, optimizer, _ = update.step(
                backbone, frozen, trained, optimizer, batch, (1.0, 1.0)
            )
        return trained, optimizer

    frozen, trained = rsiat.start(setup, backbone, state, 1, jax.random.key(4))
    halfway = steps(frozen, trained, update.initialise(trained), range(2))
    saved = jax.tree.map(np.array, halfway)
    expected = steps(frozen, *halfway, range(2, 5))
    again, _ = rsiat.start(setup, backbone, state, 1, jax.random.key(4))
    found = steps(again, *jax.tree.map(jnp.asarray, saved), range(2, 5))
    jax.tree.map(np.testing.assert_array_equal, expected, found)


# The end of a task -------------------------------------------------------------------------------


def images_of(task, classes):
    """Augmented and plain images of a task, which differ."""
    seen = [make_batch(10 * task + i, size=6, classes=classes) for i in range(2)]
    plain = [make_batch(10 * task + 5 + i, size=6, classes=classes, padding=i) for i in range(2)]
    return training.TaskImages(lambda: iter(seen), lambda: iter(plain))


@pytest.fixture(scope="module")
def trajectory(setup, backbone, update):
    """State before, frozen and trained leaves, images and state after each of three tasks."""
    state, steps = rsiat.initial_state(setup), []
    for task, classes in enumerate(setup.classes_per_task):
        images = images_of(task, classes)
        state = rsiat.before_task(setup, backbone, state, task, images)
        kept = float64(state)
        frozen, trained = rsiat.start(setup, backbone, state, task, jax.random.key(task))
        snapshot = float64(frozen)
        optimizer = update.initialise(trained)
        for batch in images.augmented():
            trained, optimizer, _ = update.step(
                backbone, frozen, trained, optimizer, batch, (100.0, 1.0)
            )
        after = rsiat.after_task(setup, backbone, state, task, frozen, trained, images)
        # Neither the steps nor the end of the task touch what the task started from.
        jax.tree.map(np.testing.assert_array_equal, kept, float64(state))
        jax.tree.map(np.testing.assert_array_equal, snapshot, float64(frozen))
        steps.append((state, frozen, trained, images, after))
        state = after
    return steps


def test_gaussians_are_of_plain_images_and_earlier_means_drift(setup, backbone, trajectory):
    for task, (before, _, _, images, after) in enumerate(trajectory):
        batches = list(images.plain())
        counted = np.concatenate([batch.weights for batch in batches]) > 0
        pixels = np.concatenate([batch.images for batch in batches])[counted]
        labels = np.concatenate([batch.labels for batch in batches])[counted]
        new = features_by(backbone, pixels, after.adapter)
        for label in range(setup.classes_per_task[task]):
            own = new[labels == label]
            np.testing.assert_allclose(after.gaussians.means[task, label], own.mean(0), atol=1e-4)
            factor = float64(after.gaussians.factors)[task, label]
            expected = np.cov(own, rowvar=False) + 1e-3 * np.eye(SHALLOW.width)
            np.testing.assert_allclose(factor @ factor.T, expected, atol=1e-4)
        old = features_by(backbone, pixels, before.adapter)
        for past, classes in enumerate(setup.classes_per_task[:task]):
            means = float64(before.gaussians.means)[past, :classes]
            moved = rsiat_reference.moved_means(means, old, new, REACH)
            assert np.abs(moved - means).max() > 1e-3
            np.testing.assert_allclose(after.gaussians.means[past, :classes], moved, atol=1e-5)
            np.testing.assert_array_equal(after.gaussians.means[past, classes:], 0)
        np.testing.assert_array_equal(
            before.gaussians.factors[:task], after.gaussians.factors[:task]
        )
        np.testing.assert_array_equal(after.gaussians.means[task + 1 :], 0)


def test_adapter_and_projector_are_kept_as_trained(setup, backbone, trajectory):
    for before, frozen, trained, images, after in trajectory:
        jax.tree.map(np.testing.assert_array_equal, after.adapter, trained["adapter"])
        jax.tree.map(np.testing.assert_array_equal, after.projector, trained["projector"])
        assert np.abs(after.adapter["up"] - before.adapter["up"]).max() > 1e-3
        pixels = next(iter(images.plain())).images
        kernels = rsiat.encoder(setup, backbone, after, 1)
        features = small_stream.encode(setup, backbone, pixels, kernels)
        expected = features_by(backbone, pixels, trained["adapter"])
        np.testing.assert_allclose(features, expected, atol=1e-4)
        earlier = features_by(backbone, pixels, before.adapter)
        found = small_stream.encode(setup, backbone, pixels, frozen["kernels"])
        np.testing.assert_allclose(found, earlier, atol=1e-4)


def test_heads_are_calibrated_from_the_second_task_on(setup, trajectory):
    for task, (before, _, trained, _, after) in enumerate(trajectory):
        if task == 0:
            np.testing.assert_array_equal(after.heads[0], trained["head"])
        else:
            for past, classes in enumerate(setup.classes_per_task[:task]):
                moved = np.abs(after.heads[past] - before.heads[past])
                assert moved[:classes].max(axis=1).min() > 1e-3
                np.testing.assert_array_equal(moved[classes:], 0)
            classes = setup.classes_per_task[task]
            moved = np.abs(after.heads[task] - trained["head"])
            assert moved[:classes].max(axis=1).min() > 1e-3
        np.testing.assert_array_equal(after.heads[task + 1 :], 0)
    # Score scales come from the head of a task's own end, predictions from the last.
    early = rsiat.heads(setup, trajectory[1][4], 2)
    late = rsiat.heads(setup, trajectory[2][4], 3)
    assert [type(head) for head in late] == [head_types.CosineHead] * 3
    assert [head.weight.shape[0] for head in late] == [2, 3, 2]
    assert np.abs(early[1].weight - late[1].weight).max() > 1e-3
    cosines = late[1].logits(3.0 * late[1].weight)
    np.testing.assert_allclose(np.diag(cosines), 1.0, rtol=1e-5)
    assert np.abs(cosines).max() < 1 + 1e-5


@pytest.mark.parametrize(
    ("preset", "rate", "decay"), [("protocol", 0.5, 0.0), ("native", 3.7739e-2, 3.426e-6)]
)
def test_what_is_calibrated(monkeypatch, backbone, trajectory, preset, rate, decay):
    """All heads so far on all Gaussians, whose means have moved before."""
    calls = []

    def calibrate(*arguments):
        calls.append(arguments)
        return arguments[1]

    monkeypatch.setattr(rsiat, "calibrate", calibrate)
    setup = make_rsiat(learner__preset=preset, benchmark="cub200")
    before, frozen, trained, images, after = trajectory[1]
    found = rsiat.after_task(setup, backbone, before, 1, frozen, trained, images)
    [(settings, heads, gaussians, seen, *rates, key)] = calls
    assert settings.scale == SCALE
    assert rates == [rate, decay]
    np.testing.assert_array_equal(heads[0], before.heads[0])
    np.testing.assert_array_equal(heads[1], trained["head"])
    np.testing.assert_array_equal(found.heads, heads)
    assert np.abs(gaussians.means[0] - before.gaussians.means[0]).max() > 1e-3
    for array, expected in zip(gaussians, after.gaussians, strict=True):
        np.testing.assert_array_equal(array, expected)
    np.testing.assert_array_equal(seen, [[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(jax.random.key_data(key), frozen["calibration"])


def test_the_end_of_a_task_can_be_repeated(setup, backbone, trajectory):
    """A run that was killed while it ended a task comes to the same heads."""
    before, frozen, trained, images, after = trajectory[1]
    again, _ = rsiat.start(setup, backbone, before, 1, jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, frozen, again)
    repeated = rsiat.after_task(setup, backbone, before, 1, again, trained, images)
    jax.tree.map(np.testing.assert_array_equal, after, repeated)
    other, _ = rsiat.start(setup, backbone, before, 1, jax.random.key(7))
    drawn = rsiat.after_task(setup, backbone, before, 1, other, trained, images)
    assert np.abs(drawn.heads - after.heads).max() > 1e-4


def test_one_compilation_and_one_size_for_all_tasks(trajectory, update):
    assert update.step._cache_size() == 1
    shapes = [jax.tree.map(jnp.shape, step[:3] + step[4:]) for step in trajectory]
    assert shapes[0] == shapes[1] == shapes[2]


def test_keys_of_a_task_are_different(setup, backbone):
    key = jax.random.key(3)
    frozen, _ = rsiat.start(setup, backbone, rsiat.initial_state(setup), 0, key)
    used = [*jax.random.split(key, 5)[:3], key]
    ours = [tuple(np.asarray(frozen[name])) for name in ("dropout", "calibration")]
    others = [tuple(np.asarray(jax.random.key_data(each))) for each in used]
    assert len({*ours, *others}) == 6


def test_an_encoder_that_diverged_says_so(setup, backbone, trajectory):
    before, frozen, trained, images, _ = trajectory[1]
    lost = trained | {"adapter": jax.tree.map(lambda leaf: leaf * jnp.nan, trained["adapter"])}
    with pytest.raises(TrainingError, match="class 0 of task 2 has features that are not finite"):
        rsiat.after_task(setup, backbone, before, 1, frozen, lost, images)


# Settings ----------------------------------------------------------------------------------------


def test_it_is_found_by_its_name():
    assert learners.find("rsiat") is rsiat


def test_the_settings_stated_by_the_paper():
    ours = base.get_config().learner.rsiat
    assert (ours.calibration_epochs, ours.calibration_batch_size, ours.warm_up_epochs) == (
        10,
        256,
        3,
    )
    # As many batches in an epoch of calibration as there are classes.
    assert ours.samples_per_class == ours.calibration_batch_size


def test_parameters_of_the_adapter_of_vit_b():
    setup = make_rsiat(learner__rsiat__bottleneck=64)
    shapes = jax.eval_shape(
        lambda: rsiat.initial_state(
            training.Setup(setup.model, (2,), configured_for("B/16", setup.config))
        )
    )
    assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(shapes.adapter)) == 1_189_632


def configured_for(variant, config):
    config = config.copy_and_resolve_references()
    config.encoder.variant = variant
    return config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bottleneck", 0),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("scale", 0.0),
        ("margin", -0.1),
        ("steering_weight", -1.0),
        ("warm_up_epochs", -1),
        ("separation_threshold", float("nan")),
        ("repulsion_weight", float("nan")),
        ("projector_width", 0),
        ("projector_learning_rate", -1e-3),
        ("calibration_optimizer", "lion"),
        ("drift_width", 0.0),
        ("ridge", 0.0),
        ("calibration_epochs", 0),
        ("mean_scale", 1.5),
    ],
)
def test_impossible_settings_are_named(field, value):
    config = base.get_config()
    config.learner.rsiat[field] = value
    with pytest.raises(InputError, match=rf"^config\.learner\.rsiat\.{field}: expected "):
        configuration.validate(config)
