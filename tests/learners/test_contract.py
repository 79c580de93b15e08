"""The contract of every learner, over three tasks of the tiny encoder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax import learners
from fdc_jax.errors import InputError
from fdc_jax.learners import loda, training
from fdc_jax.machine import devices
from fdc_jax.model import vit
from fdc_jax.run import base, configuration
from fdc_jax.run import setup as setups
from tests.learners import toy

NAMES = learners.names(trained=True)
PROBE = toy.random_images(77)
# Learners that align earlier heads when a later task ends.
ALIGNED = ("inflora_ca", "rsiat", "slca", "e2_lora")
# Learners that keep the newest encoder alone.
KEEP_THE_NEWEST = ("e2_lora", "finetune", "rsiat", "slca")


# Learners whose programs take longer to compile.
LONG = ("e2_lora", "ewc_lora", "loda", "rsiat", "slca")


def marked(names):
    """Returns the names as parameters; CI alone runs the long ones."""
    return [pytest.param(name, marks=[pytest.mark.ci] if name in LONG else []) for name in names]


@pytest.fixture(scope="module", params=marked(NAMES))
def run(request):
    return toy.trajectory(request.param)


def kinds(tree):
    return jax.tree.map(lambda leaf: (type(leaf), jnp.shape(leaf), jnp.result_type(leaf)), tree)


def test_no_shape_depends_on_the_task(run):
    """Nothing grows, and what is on the host stays there."""
    first = run.steps[0]
    for step in run.steps:
        assert kinds(step.designed) == kinds(step.after) == kinds(first.before)
        assert kinds((step.frozen, step.trained)) == kinds((first.frozen, first.trained))


def test_random_keys_are_never_used_twice(run, backbone, monkeypatch):
    """Not by draws at the start of tasks, nor by what comes later, whose keys are frozen."""
    used = []

    def recorded(function):
        def draw(key, *arguments, **options):
            if not isinstance(key, jax.core.Tracer):
                used.append(tuple(np.asarray(jax.random.key_data(key))))
            return function(key, *arguments, **options)

        return draw

    for name in ("uniform", "normal", "randint"):
        monkeypatch.setattr(jax.random, name, recorded(getattr(jax.random, name)))
    for key in (8, 9):
        given = backbone, run.steps[1].designed, 1, jax.random.key(key)
        frozen, _ = run.learner.start_task(*given)
        keys = [leaf for leaf in jax.tree.leaves(frozen) if leaf.dtype == jnp.uint32]
        used += [tuple(np.array(leaf)) for leaf in keys]
    assert len(set(used)) == len(used) > 0


def test_training_changes_the_trained_leaves_alone(run, backbone):
    """Also rows of the head that are no classes stay, and every part trains in some task."""
    moved = jax.tree.map(lambda leaf: 0.0, run.steps[0].trained)
    for step, classes in zip(run.steps, toy.CLASSES, strict=True):
        trained = jax.tree.map(np.asarray, step.trained)
        change = jax.tree.map(lambda new, old: np.abs(new - old), trained, step.started)
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


# A new task of these learners starts elsewhere: they drop or normalise directions, or start away
# from zero, as their authors do.
START_ELSEWHERE = ("e2_lora", "sd_lora", "lora_subtraction")


def test_features_change_in_training_alone(run, backbone):
    """A new task starts with the last features, and merging keeps those of training."""
    for task, step in enumerate(run.steps):
        before = toy.encode(PROBE, run.learner.encoder(backbone, step.before, task))
        after = toy.encode(PROBE, run.learner.encoder(backbone, step.after, task + 1))
        assert np.abs(after - before).max() > 1e-3
        if run.name not in START_ELSEWHERE:
            started = run.features(step.frozen, step.started, PROBE)
            np.testing.assert_allclose(started, before, atol=1e-5)
        if task == 0 or run.name != "loda":  # LoDA shrinks what points along earlier inputs.
            trained = run.features(step.frozen, step.trained, PROBE)
            np.testing.assert_allclose(after, trained, atol=5e-5)


def test_encoders_and_heads_of_all_tasks_are_recovered(run, backbone):
    """Heads have no padding; learners that keep the newest encoder alone say so."""
    final = run.steps[-1].after
    for state in (run.steps[0].before, final):
        pretrained = toy.encode(PROBE, run.learner.encoder(backbone, state, 0))
        np.testing.assert_allclose(pretrained, toy.encode(PROBE), atol=1e-6)
    for task, step in enumerate(run.steps):
        heads = run.learner.heads(final, task + 1)
        logits = [head.logits(pretrained) for head in heads]
        assert [row.shape[1] for row in logits] == [*toy.CLASSES[: task + 1]]
        if run.name not in ALIGNED:
            toy.assert_equal(heads, run.learner.heads(step.after, task + 1))
        if run.name not in KEEP_THE_NEWEST or step is run.steps[-1]:
            again = run.learner.encoder(backbone, final, task + 1)
            toy.assert_equal(again, run.learner.encoder(backbone, step.after, task + 1))
        else:
            wanted = rf"expected E_0 or E_{len(toy.CLASSES)}, found E_{task + 1}"
            with pytest.raises(InputError, match=wanted):
                run.learner.encoder(backbone, final, task + 1)


RIDGES = {"e2_lora": 2e-4, "inflora_ca": 1e-4, "rsiat": 1e-3, "slca": 1e-4}


@pytest.mark.parametrize("name", marked(RIDGES))
def test_gaussians_of_classes_come_from_plain_images(backbone, name):
    """Their means, and on the host Cholesky factors of their covariances with a ridge."""
    run = toy.trajectory(name)
    for task, step in enumerate(run.steps):
        pixels, labels = toy.shown(step.images.plain())
        kernels = run.learner.encoder(backbone, step.after, task + 1)
        features = toy.float64(toy.encode(pixels, kernels))
        means, factors = step.after.gaussians.means, run.steps[-1].after.gaussians.factors
        for label in range(toy.CLASSES[task]):
            rows, factor = features[labels == label], toy.float64(factors)[task, label]
            np.testing.assert_allclose(means[task, label], rows.mean(0), atol=1e-4)
            expected = np.cov(rows, rowvar=False) + RIDGES[name] * np.eye(toy.TINY.width)
            np.testing.assert_allclose(factor @ factor.T, expected, atol=1e-4)


# A stream of classes that grows must go on as if it had been planned.
GROWN = [
    pytest.param(name, marks=pytest.mark.ci if name == "inflora_ca" else pytest.mark.slow)
    for name in NAMES
]


@pytest.mark.parametrize("name", GROWN)
def test_unplanned_tasks_change_no_earlier_task(name):
    """Bit for bit; processors round some of RSIAT's losses, which are over pairs, otherwise."""
    complete, few = toy.trajectory(name), toy.trajectory(name, toy.CLASSES[:2])
    grown = training.grown_to(few.steps[-1].after, complete.learner.initial_state())
    expected = complete.steps[1].after
    if few.learner.task_count:
        # How much of the inputs InfLoRA protects depends on how many tasks it plans for.
        expected = expected._replace(memory=grown.memory, memory_size=grown.memory_size)
    toy.assert_near(grown, expected, 1e-4 if name == "rsiat" else 0.0)


def test_an_interrupted_task_resumes_exactly(run, backbone):
    """From what a checkpoint holds, in its steps, before them and after them."""
    step = run.steps[1]
    # What stays on the host is read back as it is, all else is put on the devices.
    state = jax.tree.map(
        lambda leaf: leaf if type(leaf) is np.ndarray else toy.placed(np.array(leaf)), step.before
    )
    designed = devices.replicate(
        run.setup.mesh, run.learner.before_task(backbone, state, 1, step.images)
    )
    frozen, started = run.learner.start_task(backbone, designed, 1, jax.random.key(1))
    expected = step.designed, step.frozen, step.started
    toy.assert_equal((designed, frozen, started), expected)
    frozen = toy.placed(frozen)
    saved = started, run.update.initialise(toy.placed(started))
    for batch in step.images.augmented():
        trained, progress = toy.placed(jax.tree.map(np.array, saved))
        rate = toy.RATES.get(run.name, toy.RATE)
        *saved, _ = run.update.step(backbone, step.frozen, trained, progress, batch, rate)
    trained, _ = saved
    toy.assert_equal(trained, step.trained)
    after = run.learner.after_task(backbone, designed, 1, frozen, trained, step.images)
    toy.assert_equal(after, step.after)


def test_parity_mode_sets_the_precision_of_every_product(run):
    """GPUs would round the factors to 10 bits, TPUs to 7; a CPU never shows it."""
    assert len(run.lines) > 20
    for line in run.lines:
        assert "[HIGHEST, HIGHEST]" in line


FACTORS, TASKS = 12 * 2 * 768 * 10, 5
PARAMETERS = dict.fromkeys(NAMES, 2 * FACTORS)
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


CONSTANT, COSINE = (1.0,) * 5, (1.0, 0.9045085, 0.6545085, 0.3454915, 0.0954915)
# As the authors' scheduler gave it when it was run.
QUARTER = (1.0, 1.0, 0.925, 0.713, 0.394)
EARLY = (1.0,) * 4 + (0.1,) * 6
LAST = (1.0,) * 9 + (0.1,)
STEPS = (1.0,) * 4 + (0.1,) * 3 + (0.01,) * 3
ADAM = ("adam", 0.0, 5e-4, 5e-3)
# RSIAT's after the first task.
IMAGENET_A = (6.6885e-3, 6.6885e-3, 3.121e-4, 2.424e-5, 1)
# Learner, preset, benchmark, factors on the rates by epoch, optimiser, its decay, the rates of the
# increment and of the head; for RSIAT also the rate and the decay of the projector, and the task.
ROUTINES = [
    ("cumulative_lora", "protocol", "cub200", None, *ADAM),
    ("lora_subtraction", "protocol", "cub200", None, *ADAM),
    ("loda", "protocol", "cub200", None, *ADAM),
    ("rsiat", "protocol", "cub200", CONSTANT, *ADAM),
    ("inflora", "protocol", "cub200", QUARTER, *ADAM),
    ("e2_lora", "protocol", "cub200", None, "sgd", 0.0, 0.03, 0.02),
    ("slca", "protocol", "cub200", None, "sgd", 0.0, 0.03, 0.2),
    ("inflora", "native", "cub200", QUARTER, "adam", 0.0, 5e-4, 5e-4),
    ("splitlora", "native", "cub200", STEPS, "adamw", 5e-5, 1e-3, 1e-2),
    ("ewc_lora", "native", "imagenet_r", COSINE, "adam", 5e-3, 5e-4, 5e-4),
    ("sd_lora", "native", "cifar100", CONSTANT, "sgd", 0.0, 8e-3, 8e-3),
    ("lora_subtraction", "native", "imagenet_r", QUARTER, "adam", 0.0, 5e-4, 5e-4),
    ("loda", "native", "omnibench", COSINE, "sgd", 5e-4, 1e-2, 1e-2),
    ("slca", "native", "cifar100", LAST, "sgd", 5e-4, 0.03, 0.2),
    ("e2_lora", "native", "imagenet_a", EARLY, "sgd", 5e-4, 0.03, 0.02),
    ("rsiat", "native", "cub200", COSINE, "sgd", 3.426e-6, 1e-2, 1e-2, 1e-2, 9.419e-5, 0),
    ("rsiat", "native", "digits", COSINE, "sgd", 5.930e-7, *IMAGENET_A),
]


@pytest.mark.parametrize("routine", ROUTINES, ids=lambda routine: "-".join(routine[:3]))
def test_rates_decays_and_schedules(backbone, monkeypatch, routine):
    """Two steps on a loss of known slopes; no encoder is needed."""
    name, preset, benchmark, factors, kind, decay, rate, head_rate, *of_projector = routine
    projector_rate, projector_decay, task = of_projector or (3.121e-4, 0.0, 0)
    rates = {"head": head_rate, "earlier_heads": head_rate, "projector": projector_rate}
    fields = dict(benchmark=benchmark, learner__preset=preset, train__epochs=5)
    learner = toy.make_learner(name, **fields)
    start = learner.start_task(backbone, learner.initial_state(), task, jax.random.key(0))
    frozen, trained = start
    if "encoder" in trained:  # Its parameters are alike.
        trained["encoder"] = jax.tree.leaves(trained["encoder"])[:2]
    trained = toy.random_like(trained, 0, 1.0)
    decays = dict.fromkeys(trained, decay) | {"projector": projector_decay}
    start, slopes = toy.float64((trained, toy.random_like(trained, 1, 1.0)))
    for part, leaves in slopes.items():  # Slopes as large as what the decay adds, none near zero.
        scale = decays[part] or 1.0
        slopes[part] = jax.tree.map(lambda s, k=scale: k * (s + np.sign(s)), leaves)

    def linear(self, backbone, frozen, leaves, *batch):
        return sum(jax.tree.leaves(jax.tree.map(lambda s, x: jnp.sum(s * x), slopes, leaves)))

    monkeypatch.setattr(type(learner), "loss", linear)
    monkeypatch.setattr(loda, "PART_SIZES", (8,))
    update = learner.update()
    # Others follow `train.schedule`.
    assert (update.schedule is None) == (factors is None)
    if factors is not None:
        epochs = len(factors)
        actual = [np.ravel(update.schedule(epoch, epochs))[0] for epoch in range(epochs)]
        np.testing.assert_allclose(actual, factors, atol=6e-4)
    # So large a factor that the smallest decay is seen.
    least = min(rates.get(part, rate) * (decays[part] or 1.0) for part in start)
    factor = 1e-3 / least if kind == "sgd" else 100.0
    # Of several classes LoDA would make two steps.
    optimizer, one_class = update.initialise(trained), toy.make_batch(classes=1)
    for _ in range(2):
        given = (factor, 1.0) if name == "rsiat" else factor
        trained, optimizer, _ = update.step(None, frozen, trained, optimizer, one_class, given)
    for part, leaves in start.items():
        arrays = map(jax.tree.leaves, (leaves, slopes[part], toy.float64(trained[part])))
        for x, slope, actual in zip(*arrays, strict=True):
            expected, expected_optimizer = x, toy.Optimizer(kind, decays[part])
            for _ in range(2):
                step = expected_optimizer(slope, expected)
                expected = expected - factor * rates.get(part, rate) * step
            # Optax takes powers of the decays in float32.
            tolerance = 3e-5 * np.abs(expected - x) + 5e-7 * (1 + np.abs(x) + np.abs(expected))
            assert np.all(np.abs(actual - expected) <= tolerance)
