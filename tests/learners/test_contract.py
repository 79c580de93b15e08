"""The contract of every learner, over three tasks of the tiny encoder."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax import learners
from fdc_jax.errors import InputError
from fdc_jax.learners import training
from fdc_jax.machine import devices
from fdc_jax.model import operations, vit
from fdc_jax.run import base, configuration
from fdc_jax.run import setup as setups
from tests.learners import toy

NAMES = learners.names(trained=True)
PROBE = toy.random_images(77)
# Leaves of earlier tasks that change when a later task ends: aligned heads, and drifting means.
REVISED = {"inflora_ca": (".heads",), "rsiat": (".heads", ".means"), "slca": (".aligned",)}
REVISED["e2_lora"] = (".heads",)
# Learners that keep the newest encoder alone.
KEEP_THE_NEWEST = ("e2_lora", "finetune", "rsiat", "slca")


@pytest.fixture(scope="module", params=NAMES)
def run(request):
    return toy.trajectory(request.param)


def name_of(run):
    return run.learner.section()


def assert_near(actual, expected, tolerance):
    """Compares two trees: bit for bit, or up to a share of the largest number of a leaf."""

    def compare(one, other):
        scale = max(float(np.abs(other).max(initial=0.0)), 1e-6)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale)

    jax.tree.map(compare, actual, expected)


def kinds(tree):
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree)


def test_no_shape_depends_on_the_task(run):
    """One compilation serves all tasks, and nothing grows; what is on the host stays there."""
    first = run.steps[0]
    for step in run.steps:
        for state in (step.designed, step.after):
            learners.check_state(name_of(run), "any", first.before, state)
            assert [type(leaf) for leaf in jax.tree.leaves(state)] == [
                type(leaf) for leaf in jax.tree.leaves(first.before)
            ]
        assert kinds(step.frozen) == kinds(first.frozen)
        assert kinds(step.started) == kinds(step.trained) == kinds(first.trained)
        for leaf in jax.tree.leaves((step.frozen, step.trained)):
            assert isinstance(leaf, jax.Array)
    assert run.update.step._cache_size() == 1


def test_a_task_starts_from_state_task_and_key(run, backbone):
    for task in (0, 2):
        step = run.steps[task]
        again, other = (
            run.learner.start_task(backbone, step.designed, task, jax.random.key(seed))
            for seed in (task, 9)
        )
        toy.assert_equal(again, (step.frozen, step.started))
        head, other_head = (jax.tree.leaves(start[1]["head"])[0] for start in (again, other))
        assert np.abs(head - other_head).max() > 1e-3


def test_random_keys_are_never_used_twice(run, backbone, monkeypatch):
    """Not by two draws at the start of a task, nor by what comes later, whose keys are frozen."""
    used = []

    def recorded(function):
        def draw(key, *arguments, **options):
            if not isinstance(key, jax.core.Tracer):
                used.append(tuple(np.asarray(jax.random.key_data(key))))
            return function(key, *arguments, **options)

        return draw

    for name in ("uniform", "normal", "randint"):
        monkeypatch.setattr(jax.random, name, recorded(getattr(jax.random, name)))
    frozen, _ = run.learner.start_task(backbone, run.steps[1].designed, 1, jax.random.key(1))
    used += [tuple(np.array(leaf)) for leaf in jax.tree.leaves(frozen) if leaf.dtype == jnp.uint32]
    assert len(set(used)) == len(used) > 0


def test_training_changes_the_trained_leaves_alone(run, backbone):
    """Also rows of the head that are no classes stay, and every part trains in some task."""
    moved = jax.tree.map(lambda leaf: 0.0, run.steps[0].trained)
    for step, snapshot, classes in zip(run.steps, run.snapshots, toy.CLASSES, strict=True):
        toy.assert_equal((step.designed, step.frozen), snapshot)
        change = jax.tree.map(lambda new, old: np.abs(new - old), step.trained, step.started)
        moved = jax.tree.map(lambda most, leaf: max(most, leaf.max()), moved, change)
        for leaf in jax.tree.leaves(change["head"]):
            rows = leaf.reshape(len(leaf), -1).max(axis=1)
            assert np.all(rows[:classes] > 1e-3) and np.all(rows[classes:] == 0)
    for path, most in jax.tree_util.tree_leaves_with_path(moved):
        where = jax.tree_util.keystr(path)
        if "['key']['bias']" in where:  # Added to all keys alike, it is nothing to a softmax.
            assert most < 1e-6
        else:
            assert most > (1e-5 if "['encoder']" in where else 1e-3), where
    toy.assert_equal(backbone, toy.random_params(11))


def test_slots_of_other_tasks_stay(run):
    """Slots of earlier tasks, and those of tasks to come, are left alone."""
    revised, changed = REVISED.get(name_of(run), ()), {}
    for task, step in enumerate(run.steps):
        paths = jax.tree_util.tree_leaves_with_path(step.before)
        for (path, old), new in zip(paths, jax.tree.leaves(step.after), strict=True):
            where = jax.tree_util.keystr(path)
            if np.shape(old)[:1] != (len(toy.CLASSES),) or ".encoder" in where:
                continue
            if not any(name in where for name in revised):
                np.testing.assert_array_equal(old[:task], new[:task], err_msg=where)
            elif task > 0:
                assert np.abs(np.asarray(new)[:task] - old[:task]).max() > 1e-3, where
            np.testing.assert_array_equal(old[task + 1 :], new[task + 1 :], err_msg=where)
            moved = np.any(np.asarray(old[task]) != np.asarray(new[task]))
            changed[where] = changed.get(where, False) or moved
    assert all(changed.values()) and len(changed) > 1


def test_merging_keeps_the_features_of_training(run, backbone):
    for task, step in enumerate(run.steps):
        if task > 0 and name_of(run) == "loda":
            continue  # It shrinks what points along earlier inputs; see its own tests.
        in_training = run.features(step.frozen, step.trained, PROBE)
        before, after = (
            toy.encode(run.setup, PROBE, run.learner.encoder(backbone, state, done))
            for state, done in ((step.before, task), (step.after, task + 1))
        )
        np.testing.assert_allclose(after, in_training, atol=5e-5)
        assert np.abs(after - before).max() > 1e-3


def test_a_new_task_starts_with_the_last_features(run, backbone):
    if name_of(run) in ("e2_lora", "sd_lora", "lora_subtraction"):
        return  # They drop or normalise directions, or start away from zero, as their authors do.
    for task, step in enumerate(run.steps):
        started = run.features(step.frozen, toy.copy(step.started), PROBE)
        kernels = run.learner.encoder(backbone, step.before, task)
        np.testing.assert_allclose(started, toy.encode(run.setup, PROBE, kernels), atol=1e-5)


def test_encoders_of_all_tasks_are_recovered(run, backbone):
    """But those of learners that keep the newest alone, and say so."""
    final, expected = run.steps[-1].after, toy.encode(run.setup, PROBE)
    for state in (run.steps[0].before, final):
        pretrained = run.learner.encoder(backbone, state, 0)
        np.testing.assert_allclose(toy.encode(run.setup, PROBE, pretrained), expected, atol=1e-6)
    for task, step in enumerate(run.steps):
        expected = run.learner.encoder(backbone, step.after, task + 1)
        if name_of(run) not in KEEP_THE_NEWEST or step is run.steps[-1]:
            again = run.learner.encoder(backbone, final, task + 1)
            toy.assert_equal(again, expected)
        else:
            wanted = rf"expected E_0 or E_{len(toy.CLASSES)}, found E_{task + 1}"
            with pytest.raises(InputError, match=wanted):
                run.learner.encoder(backbone, final, task + 1)
    if name_of(run) != "rsiat":
        toy.assert_equal(pretrained, vit.pretrained_kernels(backbone))


def test_heads_have_no_padding(run):
    final = run.steps[-1].after
    features = jnp.asarray(np.random.default_rng(0).normal(size=(4, toy.TINY.width)), jnp.float32)
    for num_tasks in range(len(toy.CLASSES) + 1):
        heads = run.learner.heads(final, num_tasks)
        assert [head.logits(features).shape for head in heads] == [
            (4, classes) for classes in toy.CLASSES[:num_tasks]
        ]
    if name_of(run) not in REVISED:
        for task, step in enumerate(run.steps):
            early = run.learner.heads(step.after, task + 1)
            toy.assert_equal(early, heads[: task + 1])
    else:
        # FDC takes its score scales from the head of a task's own end and predicts with the last.
        early = run.learner.heads(run.steps[1].after, 2)
        assert np.abs(early[1].weight - heads[1].weight).max() > 1e-3


RIDGES = {"e2_lora": 2e-4, "inflora_ca": 1e-4, "rsiat": 1e-3, "slca": 1e-4}


@pytest.mark.parametrize("name", RIDGES)
def test_gaussians_of_classes_come_from_plain_images(backbone, name):
    """Their means, and on the host Cholesky factors of their covariances with a ridge."""
    run = toy.trajectory(name)
    for task, step in enumerate(run.steps):
        pixels, labels = toy.shown(step.images.plain())
        kernels = run.learner.encoder(backbone, step.after, task + 1)
        features = toy.float64(toy.encode(run.setup, pixels, kernels))
        means, factors = step.after.gaussians
        assert type(factors) is np.ndarray
        for label in range(toy.CLASSES[task]):
            rows, factor = features[labels == label], toy.float64(factors)[task, label]
            np.testing.assert_allclose(means[task, label], rows.mean(0), atol=1e-4)
            expected = np.cov(rows, rowvar=False) + RIDGES[name] * np.eye(toy.TINY.width)
            np.testing.assert_allclose(factor @ factor.T, expected, atol=1e-4)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "cumulative_lora"]


@pytest.mark.parametrize("name", ["cumulative_lora", *SLOW])
def test_unplanned_tasks_change_no_earlier_task(backbone, name, known=2):
    """Bit for bit, in more slots for tasks; of longer heads processors round otherwise.

    So do some of RSIAT's losses, which are over pairs.
    """
    complete = toy.trajectory(name)
    learner = toy.make_learner(name, toy.CLASSES[:known])
    few = learner.setup
    tolerance = 0.0 if few.head_rows == complete.setup.head_rows else 1e-5
    tolerance = 1e-4 if name == "rsiat" else tolerance
    update = learner.update()
    state, rate = learner.initial_state(), toy.RATES.get(name, toy.RATE)
    for task, step in enumerate(complete.steps[:known]):
        designed = learner.before_task(backbone, state, task, step.images)
        frozen, trained = learner.start_task(backbone, designed, task, jax.random.key(task))
        progress = update.initialise(trained)
        for batch in toy.augmented_of(task, toy.CLASSES[task]):
            trained, progress, _ = update.step(backbone, frozen, trained, progress, batch, rate)
        assert_near(training.grown_to(trained, step.started), step.trained, tolerance)
        state = learner.after_task(backbone, designed, task, frozen, trained, step.images)
    grown = training.grown_to(state, complete.learner.initial_state())
    expected = complete.steps[known - 1].after
    assert_near(*(complete.learner.heads(state, known) for state in (grown, expected)), tolerance)

    def compare(path, actual, leaf):
        name = jax.tree_util.keystr(path)
        # Of heads, rows beyond the classes were compared with none. And how much of the inputs
        # InfLoRA protects depends on how many tasks it plans for.
        of_heads = any(field in name for field in (".heads", ".aligned"))
        if not of_heads and not (learner.task_count and ".memory" in name):
            assert_near(actual, leaf, tolerance)

    jax.tree_util.tree_map_with_path(compare, grown, expected)


def test_an_interrupted_task_resumes_exactly(run, backbone):
    """From what a checkpoint holds, in its steps, before them and after them."""
    step = run.steps[1]
    first, second = step.images.augmented()
    rate = toy.RATES.get(name_of(run), toy.RATE)

    def steps(trained, optimizer, batches, frozen=step.frozen):
        for batch in batches:
            trained, optimizer, _ = run.update.step(
                backbone, frozen, trained, optimizer, batch, rate
            )
        return trained, optimizer

    started = toy.copy(step.started)
    saved = jax.tree.map(np.array, steps(started, run.update.initialise(started), [first]))
    toy.assert_equal(steps(*toy.copy(saved), [second])[0], step.trained)
    # What stays on the host is read back as it is, all else is put on the devices.
    state = jax.tree.map(
        lambda leaf: leaf if type(leaf) is np.ndarray else jnp.array(np.array(leaf)), step.before
    )
    designed = run.learner.before_task(backbone, state, 1, step.images)
    toy.assert_equal(designed, step.designed)
    frozen, _ = run.learner.start_task(backbone, designed, 1, jax.random.key(1))
    after = run.learner.after_task(backbone, designed, 1, frozen, step.trained, step.images)
    toy.assert_equal(after, step.after)


def test_padding_rows_change_nothing(run, backbone):
    """Pixels and labels of rows without weight may be anything."""
    batch = toy.make_batch(3, size=6, classes=2, padding=2)
    other = batch._replace(images=toy.random_images(5, 6), labels=batch.labels + batch.labels)
    other.images[:4] = batch.images[:4]
    other.labels[:4], other.labels[4:] = batch.labels[:4], 1
    rate = (1.0, 1.0) if name_of(run) == "rsiat" else 1.0
    for step in run.steps[:2]:
        results = []
        for given in (batch, other):
            trained = toy.random_like(step.trained, 4, 0.1)
            progress = run.update.initialise(trained)
            results.append(run.update.step(backbone, step.frozen, trained, progress, given, rate))
        # Adam's first moments are the gradients; its first step would hide their size.
        assert_near(results[1][1:], results[0][1:], 1e-5)


def test_parity_mode_sets_the_precision_of_every_product(run):
    """GPUs would round the factors to 10 bits, TPUs to 7; a CPU never shows it."""
    assert len(run.lines) > 20
    for line in run.lines:
        assert "[HIGHEST, HIGHEST]" in line


FACTORS, TASKS = 12 * 2 * 768 * 10, 5
PARAMETERS = dict.fromkeys(("cumulative_lora", "ewc_lora", "lora_subtraction"), 2 * FACTORS)
PARAMETERS |= dict.fromkeys(("finetune", "joint"), 2 * FACTORS)
PARAMETERS |= dict.fromkeys(("inflora", "inflora_ca", "splitlora"), FACTORS)  # A is not trained.
PARAMETERS |= {
    "sd_lora": 2 * FACTORS + TASKS,  # A magnitude for every task.
    "loda": 3 * FACTORS - 10,  # Two A and the B of two branches; the head has no bias.
    "rsiat": 1_189_632 + 2 * (768 * 64 + 64 * 128) + 2 * 64 + 128 + 768 - 10,  # No bias, too.
    "slca": 85_798_656,  # All of the encoder.
    "e2_lora": 12 * (768 + 2304) * 2304 + 12 * (768 + 3072) * 3072,  # Full rank.
}


def test_counts_of_trained_parameters_of_vit_b():
    """The current increment and a head of 10 classes alone, as the authors count."""
    model, mesh = vit.build("B/16", 224), devices.data_mesh()
    shapes = vit.parameter_shapes(model, 224)

    def count(name):
        config = configuration.typed(base.get_config(learner=name))
        learner = setups.make_learner(config, model, (10,) * TASKS, mesh)

        def start(backbone):
            return learner.start_task(backbone, learner.initial_state(), 0, jax.random.key(0))[1]

        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(start, shapes)))

    assert {name: count(name) - 10 * 769 for name in NAMES} == PARAMETERS


PAPER = dict.fromkeys(("increment", "adapter", "encoder", "magnitudes"), 5e-4)
PAPER |= {"head": 5e-3, "earlier_heads": 5e-3, "projector": 3.121e-4}
CONSTANT, COSINE = (1.0,) * 5, (1.0, 0.9045085, 0.6545085, 0.3454915, 0.0954915)
LATE = (1.0, 1.0, 1.0, 1.0, 0.1)
# As the authors' scheduler gave it when it was run.
QUARTER = (1.0, 1.0, 0.925, 0.713, 0.394)
# RSIAT's rate and decay, and both of the projector, after the first task.
RSIAT = {
    "cub200": (3.7739e-2, 3.426e-6, 9.989e-2, 9.419e-5),
    "digits": (6.6885e-3, 5.930e-7, 3.121e-4, 2.424e-5),
}


def routine(name, benchmark="cub200", kind="adam", rate=None, decay=0.0, schedule=CONSTANT, **more):
    """Rates and decays of a learner, by the native preset or `preset`; `more` has other rates."""
    rates = PAPER if rate is None else dict.fromkeys(PAPER, rate)
    decays = dict.fromkeys(PAPER, decay) | {"projector": more.pop("projector_decay", decay)}
    preset, task = more.pop("preset", "native"), more.pop("task", 0)
    return dict(name=name, benchmark=benchmark, kind=kind, schedule=schedule) | dict(
        preset=preset, task=task, rates=rates | more, decays=decays
    )


ROUTINES = [
    *(
        routine(name, preset="protocol", schedule=QUARTER if name[:7] == "inflora" else CONSTANT)
        for name in NAMES
        if name not in ("e2_lora", "slca")
    ),
    routine("e2_lora", preset="protocol", kind="sgd", increment=0.03, head=0.02),
    routine("e2_lora", "cub200", "sgd", decay=5e-4, increment=0.03, head=0.02),
    routine("e2_lora", "cifar100", "sgd", decay=5e-4, increment=0.03, head=0.02, schedule=LATE),
    routine("slca", preset="protocol", kind="sgd", encoder=0.03, head=0.2),
    routine("slca", "cifar100", "sgd", decay=5e-4, encoder=0.03, head=0.2),
    routine("slca", "cub200", "sgd", decay=5e-4, encoder=0.03, head=0.2, schedule=LATE),
    routine("cumulative_lora", "imagenet_r"),
    routine("inflora", head=5e-4, schedule=QUARTER),
    routine("inflora_ca", head=5e-4, schedule=QUARTER),
    routine("splitlora", "cub200", "adamw", 1e-3, 5e-5, (1, 1, 0.1, 0.1, 0.01), head=1e-2),
    routine("ewc_lora", "cifar100", schedule=COSINE),
    routine("ewc_lora", "imagenet_r", decay=5e-3, head=5e-4, schedule=COSINE),
    routine("sd_lora", "cifar100", "sgd", 8e-3),
    routine("sd_lora", "cub200", "sgd", 1e-2),
    routine("lora_subtraction", "imagenet_r", head=5e-4, schedule=QUARTER),
    routine("lora_subtraction", "imagenet_a", head=5e-4, schedule=QUARTER),
    routine("lora_subtraction", "cub200", head=1e-3, schedule=QUARTER),
    routine("loda", "cifar100", "sgd", 5e-3, 5e-4, COSINE),
    routine("loda", "imagenet_r", "sgd", 2e-2, 0.0, COSINE),
    routine("loda", "omnibench", "sgd", 1e-2, 5e-4, COSINE),
    routine("rsiat", "cub200", "sgd", 1e-2, 3.426e-6, COSINE, projector_decay=9.419e-5),
    *(
        routine(
            "rsiat", name, "sgd", rate, decay, COSINE, task=1, projector=of_p, projector_decay=d
        )
        for name, (rate, decay, of_p, d) in RSIAT.items()
    ),
]


def follow(kind, leaf, slope, rate, decay):
    """Two steps on a loss of constant slope in float64, `rate` with its factor."""
    optimizer = toy.Optimizer(kind, decay)
    for _ in range(2):
        leaf = leaf - rate * optimizer(slope, leaf)
    return leaf


@pytest.mark.parametrize(
    "expect",
    ROUTINES,
    ids=lambda expect: "-".join([expect["name"], expect["preset"], expect["benchmark"]]),
)
def test_rates_decays_and_schedules(backbone, monkeypatch, expect):
    """Two steps on a loss of known slopes, a third of them zero; no encoder is needed."""
    fields = dict(benchmark=expect["benchmark"], learner__preset=expect["preset"], train__epochs=5)
    learner, decays = toy.make_learner(expect["name"], **fields), expect["decays"]
    state = learner.initial_state()
    frozen, trained = learner.start_task(backbone, state, expect["task"], jax.random.key(0))
    trained = toy.random_like(trained, 0, 1.0)
    start, rng = toy.float64(trained), np.random.default_rng(1)

    def random_slopes(leaf, scale):
        return scale * rng.uniform(0.5, 1.5, leaf.shape) * rng.integers(-1, 2, leaf.shape)

    slopes = {
        part: jax.tree.map(partial(random_slopes, scale=decays[part] or 1.0), leaves)
        for part, leaves in trained.items()
    }

    def linear(self, backbone, frozen, leaves, *batch):
        return sum(jax.tree.leaves(jax.tree.map(lambda s, x: jnp.sum(s * x), slopes, leaves)))

    for kind in (learners.find("inflora"), type(learner)):
        monkeypatch.setattr(kind, "loss", linear)
    update = learner.update()
    if update.schedule is None:
        assert expect["schedule"] == CONSTANT
    else:
        # Others follow `train.schedule` under the protocol.
        assert expect["preset"] == "native" or expect["name"] in ("inflora", "inflora_ca", "rsiat")
        factors = [np.ravel(update.schedule(epoch, 5))[0] for epoch in range(5)]
        np.testing.assert_allclose(factors, expect["schedule"], atol=6e-4)
    # So large a factor that the smallest decay is seen.
    least = min(expect["rates"][part] * (decays[part] or 1.0) for part in trained)
    factor = 1e-3 / least if expect["kind"] == "sgd" else 100.0
    expected = {
        part: jax.tree.map(
            lambda x, s, p=part: follow(
                expect["kind"], x, s, factor * expect["rates"][p], decays[p]
            ),
            start[part],
            slopes[part],
        )
        for part in trained
    }
    # Of several classes LoDA would make two steps.
    optimizer, one_class = update.initialise(trained), toy.make_batch(classes=1)
    for _ in range(2):
        rate = (factor, 1.0) if expect["name"] == "rsiat" else factor
        trained, optimizer, _ = update.step(None, frozen, trained, optimizer, one_class, rate)
    for x, new, wanted in zip(*map(jax.tree.leaves, (start, trained, expected)), strict=True):
        # Optax takes powers of the decays in float32.
        tolerance = 3e-5 * np.abs(wanted - x) + 5e-7 * (1 + np.abs(x) + np.abs(wanted))
        assert np.all(np.abs(new - wanted) <= tolerance)


def test_a_batch_in_portions_makes_the_same_step(backbone, monkeypatch):
    """A full portion, one partly of padding and one of nothing else."""
    run, sizes = toy.trajectory("ewc_lora"), []
    frozen, mean = run.steps[1].frozen, training.mean_over_portions
    batch = toy.make_batch(3, size=6, classes=3, padding=3)

    def step(update):
        # Factors of a fresh increment are zero on one side, which would hide what it adds.
        trained = toy.random_like(run.steps[1].trained, 4, 0.05)
        return update.step(backbone, frozen, trained, update.initialise(trained), batch, 1.0)

    def counting(*arguments):
        sizes.append(arguments[2])
        return mean(*arguments)

    expected = step(run.update)
    monkeypatch.setattr(training, "mean_over_portions", counting)
    monkeypatch.setitem(operations.PORTION_TOKENS, "cpu", toy.TWO_IMAGES)
    actual = step(run.learner.update())
    assert sizes == [2]
    assert_near(actual[1:], expected[1:], 2e-4)
