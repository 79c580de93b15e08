import numpy as np
import pytest
import scipy.special
import scipy.stats

from fdc_jax import heads
from fdc_jax.calibration import comparators
from fdc_jax.errors import InputError
from tests.calibration.comparator_problem import fitted, problem


@pytest.fixture(scope="module")
def data():
    return problem()


def logits(task, features):
    weight, bias = (np.asarray(part, np.float64) for part in task.head)
    return features.astype(np.float64) @ weight.T + bias


def expected(data, task_score):
    parts = [logits(task, data.adapted) for task in data.tasks]
    scores = [task_score(t, z) for t, z in enumerate(parts)]
    return np.stack(scores, axis=1), np.stack([z.argmax(axis=1) for z in parts], axis=1)


def check(data, comparator, task_score):
    scores = fitted(comparator, data.tasks).score(data.adapted, data.pretrained)
    task_scores, local = expected(data, task_score)
    scale = np.abs(task_scores).max()
    np.testing.assert_allclose(scores.task_scores, task_scores, rtol=0, atol=1e-5 * scale)
    np.testing.assert_array_equal(scores.local_class, local)
    np.testing.assert_array_equal(scores.task, task_scores.argmax(axis=1))
    rows = np.arange(len(local))
    np.testing.assert_array_equal(scores.label, 10 * scores.task + local[rows, scores.task])


def test_raw(data):
    check(data, comparators.Raw(), lambda t, z: z.max(axis=1))


def test_logit_standardisation_uses_population_moments(data):
    def score(t, z):
        best = logits(data.tasks[t], data.tasks[t].adapted).max(axis=1)
        return scipy.stats.zmap(z.max(axis=1), best, ddof=0)

    check(data, comparators.LogitStandardisation(), score)


def test_logit_standardisation_of_one_image_divides_by_the_floor():
    data = problem(((1,), (20, 20)))
    comparator = fitted(comparators.LogitStandardisation(), data.tasks)
    best = logits(data.tasks[0], data.tasks[0].adapted).max()
    scores = comparator.score(data.adapted).task_scores[:, 0]
    z = logits(data.tasks[0], data.adapted).max(axis=1)
    np.testing.assert_allclose(scores, (z - best) * 1e12, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_energy(data, temperature):
    check(
        data,
        comparators.Energy(temperature),
        lambda t, z: temperature * scipy.special.logsumexp(z / temperature, axis=1),
    )


def test_energy_tends_to_raw(data):
    cold = fitted(comparators.Energy(1e-4), data.tasks).score(data.adapted)
    raw = fitted(comparators.Raw(), data.tasks).score(data.adapted)
    np.testing.assert_allclose(cold.task_scores, raw.task_scores, atol=1e-3)


@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_maximum_softmax_and_entropy(data, temperature):
    def softmax(z):
        return scipy.special.softmax(z / temperature, axis=1)

    check(data, comparators.MaximumSoftmax(temperature), lambda t, z: softmax(z).max(axis=1))
    check(
        data,
        comparators.NegativeEntropy(temperature),
        lambda t, z: -scipy.stats.entropy(softmax(z), axis=1),
    )


def test_weight_aligning_sequential_by_hand():
    tasks = [
        (np.array([[3.0, 4.0], [0.0, 1.0]]), np.array([1.0, 0.0])),  # norms 5, 1: mean 3
        (np.array([[0.0, 1.0]]), np.array([2.0])),  # factor 3 / 1
        (np.array([[2.0, 0.0], [0.0, 2.0]]), np.array([0.0, -1.0])),  # factor mean(5, 1, 3) / 2
    ]
    features = np.array([[1.0, 0.5], [-1.0, 2.0]])
    comparator = comparators.WeightAligning("sequential")
    label = 0
    for weight, bias in tasks:
        head = heads.LinearHead(weight.astype(np.float32), bias.astype(np.float32))
        comparator.fit_task(features, [label, label], head, classes=label + np.arange(len(bias)))
        label += len(bias)
    comparator.finalize()
    factors = [1.0, 3.0, 1.5]
    aligned = [
        factor * features @ weight.T + bias
        for factor, (weight, bias) in zip(factors, tasks, strict=True)
    ]
    scores = comparator.score(features)
    np.testing.assert_allclose(
        scores.task_scores, np.stack([z.max(axis=1) for z in aligned], axis=1), rtol=1e-6
    )
    np.testing.assert_array_equal(
        scores.local_class, np.stack([z.argmax(axis=1) for z in aligned], axis=1)
    )


def test_weight_aligning_symmetric_divides_the_logits_by_the_mean_norm(data):
    def score(t, z):
        weight = np.asarray(data.tasks[t].head.weight, np.float64)
        return z.max(axis=1) / np.linalg.norm(weight, axis=1).mean()

    check(data, comparators.WeightAligning("symmetric"), score)


def test_without_biases_both_alignments_choose_alike(data):
    tasks = [
        task._replace(head=heads.LinearHead(task.head.weight, 0 * task.head.bias))
        for task in data.tasks
    ]
    sequential, symmetric = (
        fitted(comparators.WeightAligning(variant), tasks).score(data.adapted)
        for variant in ("sequential", "symmetric")
    )
    np.testing.assert_array_equal(sequential.label, symmetric.label)
    raw = fitted(comparators.Raw(), tasks).score(data.adapted)
    assert (raw.task != symmetric.task).any()


@pytest.mark.parametrize(
    "method",
    [
        comparators.Raw,
        comparators.LogitStandardisation,
        comparators.Energy,
        comparators.MaximumSoftmax,
        comparators.NegativeEntropy,
        comparators.WeightAligning,
    ],
)
def test_a_head_is_needed_and_a_wrong_one_changes_nothing(data, method):
    comparator, task = method(), data.tasks[0]
    with pytest.raises(InputError, match=f"{method.name}: task 0 has no head"):
        comparator.fit_task(task.adapted, task.labels, None)
    narrow = heads.FunctionHead(lambda parameters, features: features[:, :2])
    with pytest.raises(InputError, match=r"head of task 0: expected 3 classes|needs linear heads"):
        comparator.fit_task(task.adapted, task.labels, narrow)
    few = heads.LinearHead(task.head.weight[:2], task.head.bias[:2])
    with pytest.raises(InputError, match="head of task 0: expected 3 classes, found 2"):
        comparator.fit_task(task.adapted, task.labels, few)
    assert not comparator.classes
    fitted(comparator, data.tasks)
    assert len(comparator.classes) == 3


def test_other_heads_are_scored_by_their_own_logits(data):
    tasks = [task._replace(head=heads.CosineHead(task.head.weight, 4.0)) for task in data.tasks]
    scores = fitted(comparators.Raw(), tasks).score(data.adapted)
    for t, task in enumerate(tasks):
        rows = np.asarray(task.head.weight, np.float64)
        cosine = (
            data.adapted
            @ rows.T
            / np.outer(np.linalg.norm(data.adapted, axis=1), np.linalg.norm(rows, axis=1))
        )
        np.testing.assert_allclose(scores.task_scores[:, t], 4 * cosine.max(axis=1), rtol=1e-5)
    with pytest.raises(InputError, match=r"wa: needs linear heads, .* is a CosineHead"):
        fitted(comparators.WeightAligning(), tasks)


def test_arguments_and_storage(data):
    for method in (comparators.Energy, comparators.MaximumSoftmax, comparators.NegativeEntropy):
        with pytest.raises(InputError, match="temperature: expected more than 0"):
            method(0.0)
    with pytest.raises(InputError, match="variant: expected sequential or symmetric"):
        comparators.WeightAligning("both")
    zero = heads.LinearHead(0 * data.tasks[0].head.weight, data.tasks[0].head.bias)
    with pytest.raises(InputError, match="all rows of the head of task 0 are zero"):
        fitted(comparators.WeightAligning(), [data.tasks[0]._replace(head=zero)])
    assert fitted(comparators.Raw(), data.tasks).storage_bytes == 0
    assert fitted(comparators.LogitStandardisation(), data.tasks).storage_bytes == 3 * 2 * 4


# Heads that changed later ------------------------------------------------------------------------


def replaced(data, comparator):
    """The comparator fitted with other heads, which were then replaced by those of the problem."""
    rng = np.random.default_rng(1)
    others = [
        heads.LinearHead(
            (2.0 * task.head.weight + rng.normal(size=task.head.weight.shape)).astype(np.float32),
            np.flip(task.head.bias),
        )
        for task in data.tasks
    ]
    early = [task._replace(head=head) for task, head in zip(data.tasks, others, strict=True)]
    comparator = fitted(comparator, early)
    comparator.replace_heads([task.head for task in data.tasks])
    return early, comparator.score(data.adapted, data.pretrained)


@pytest.mark.parametrize(
    "make",
    [
        comparators.Raw,
        comparators.Energy,
        comparators.MaximumSoftmax,
        comparators.NegativeEntropy,
        comparators.WeightAligning,
        lambda: comparators.WeightAligning("symmetric"),
    ],
)
def test_methods_of_heads_alone_forget_replaced_heads(data, make):
    _, found = replaced(data, make())
    expected = fitted(make(), data.tasks).score(data.adapted)
    np.testing.assert_array_equal(found.task_scores, expected.task_scores)
    np.testing.assert_array_equal(found.label, expected.label)


def test_logit_standardisation_keeps_the_moments_of_replaced_heads(data):
    early, found = replaced(data, comparators.LogitStandardisation())
    for t, task in enumerate(early):
        best = logits(task, task.adapted).max(axis=1)
        z = logits(data.tasks[t], data.adapted).max(axis=1)
        expected = (z - best.mean()) / best.std()
        np.testing.assert_allclose(found.task_scores[:, t], expected, atol=1e-4)


def test_vim_keeps_the_residuals_of_replaced_heads(data):
    early, found = replaced(data, comparators.VirtualLogitMatching())
    before = fitted(comparators.VirtualLogitMatching(), early).score(data.adapted)
    for t, task in enumerate(early):
        change = scipy.special.logsumexp(logits(data.tasks[t], data.adapted), axis=1)
        change -= scipy.special.logsumexp(logits(task, data.adapted), axis=1)
        np.testing.assert_allclose(
            found.task_scores[:, t], before.task_scores[:, t] + change, rtol=1e-3, atol=1e-3
        )


def test_replacing_heads_is_checked(data):
    comparator = fitted(comparators.WeightAligning(), data.tasks)
    own = [task.head for task in data.tasks]
    with pytest.raises(InputError, match="wa: heads: expected one per task, 3, found 2"):
        comparator.replace_heads(own[:2])
    with pytest.raises(
        InputError, match=r"head of task 0: expected 3 classes, found 2"
    ):
        comparator.replace_heads([own[1], own[0], own[2]])
    zero = own[1]._replace(weight=np.zeros_like(own[1].weight))
    with pytest.raises(InputError, match="wa: all rows of the head of task 1 are zero"):
        comparator.replace_heads([own[0], zero, own[2]])
    expected = fitted(comparators.WeightAligning(), data.tasks).score(data.adapted)
    np.testing.assert_array_equal(comparator.score(data.adapted).task_scores, expected.task_scores)
