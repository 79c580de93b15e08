"""EWC-LoRA: its penalty, its Fisher information, and how increments are folded in."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from fdc_jax import configuration, learners
from fdc_jax import heads as head_types
from fdc_jax.data.batches import Batch
from fdc_jax.errors import InputError
from fdc_jax.learners import cumulative_lora, ewc_lora, training
from fdc_jax.model import increments, vit
from tests.learners import small_stream
from tests.learners.small_stream import RANK, TINY, float64, make_batch, make_setup

PARTS = ("key", "value")


@pytest.fixture(scope="module")
def update():
    return ewc_lora.update(make_setup())


def random_state(setup, seed=0):
    state = ewc_lora.initial_state(setup)
    filled = small_stream.random_like(state, seed)
    return filled._replace(importance=jax.tree.map(jnp.square, filled.importance))


def products(increment):
    """A B per block and part, in float64."""
    factors = float64(increment)
    return {part: factors[part]["A"] @ factors[part]["B"] for part in PARTS}


def trained_leaves(setup, backbone, seed=0):
    """Leaves of a task in the middle of its training, B being no longer zero."""
    frozen, trained = ewc_lora.start(setup, backbone, random_state(setup), 1, jax.random.key(seed))
    return frozen, small_stream.random_like(trained, seed + 1)


def test_penalty_and_its_gradient_in_closed_form(backbone):
    frozen, trained = trained_leaves(make_setup(), backbone)
    omega, factors = float64(frozen["importance"]), float64(trained["increment"])
    change = products(trained["increment"])
    expected = sum(np.sum(omega[part] * change[part] ** 2) for part in PARTS) / 2
    value, gradient = jax.value_and_grad(ewc_lora.penalty, argnums=1)(
        frozen["importance"], trained["increment"]
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for part in PARTS:
        inner = omega[part] * change[part]
        of_a = inner @ factors[part]["B"].swapaxes(1, 2)
        of_b = factors[part]["A"].swapaxes(1, 2) @ inner
        np.testing.assert_allclose(gradient[part]["A"], of_a, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(gradient[part]["B"], of_b, rtol=1e-4, atol=1e-6)


def test_penalty_vanishes_at_the_start_of_a_task(backbone):
    setup = make_setup()
    frozen, trained = ewc_lora.start(setup, backbone, random_state(setup), 1, jax.random.key(0))
    value, gradient = jax.value_and_grad(ewc_lora.penalty, argnums=1)(
        frozen["importance"], trained["increment"]
    )
    assert value == 0
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, 0), gradient)


def test_loss_is_cross_entropy_plus_strength_times_penalty(backbone):
    frozen, trained = trained_leaves(make_setup(), backbone)
    batch = make_batch(classes=3, padding=1)
    kernels = float64(frozen["kernels"])
    change = products(trained["increment"])
    features = small_stream.reference_features(
        backbone, batch.images, {part: kernels[part] + change[part] for part in PARTS}
    )
    losses = small_stream.reference_cross_entropy(features, trained["head"], batch.labels, 3)
    omega = float64(frozen["importance"])
    penalty = sum(np.sum(omega[part] * change[part] ** 2) for part in PARTS) / 2
    setup = make_setup(learner__ewc_lora__strength=3.0)
    found = jax.jit(partial(ewc_lora.loss, setup))(backbone, frozen, trained, batch)
    np.testing.assert_allclose(found, losses[:3].mean() + 3.0 * penalty, rtol=1e-4)


def ended(setup, backbone, images, task=1, importance=0.0):
    """State after a task with random leaves, and what it was computed from."""
    state = random_state(setup)
    constant = jax.tree.map(lambda omega: jnp.full_like(omega, importance), state.importance)
    state = state._replace(importance=constant)
    frozen, _ = ewc_lora.start(setup, backbone, state, task, jax.random.key(0))
    _, trained = trained_leaves(setup, backbone)
    after = ewc_lora.after_task(setup, backbone, state, task, frozen, trained, images)
    return state, trained, after


def fisher_of(setup, backbone, *batches):
    _, _, after = ended(setup, backbone, small_stream.task_images(*batches))
    return float64(after.importance)


@pytest.mark.parametrize("fisher", ["per_sample", "batch_mean"])
def test_fisher_information_by_finite_differences(backbone, fisher):
    """Some entries of the two estimators, from a float64 forward pass; one image is padding."""
    setup = make_setup(learner__ewc_lora__fisher=fisher)
    batches = [make_batch(1, size=4, classes=3), make_batch(2, size=4, classes=3, padding=1)]
    _, trained, after = ended(setup, backbone, small_stream.task_images(*batches))
    kernels = float64(ewc_lora.encoder(setup, backbone, after, 2))
    for part in PARTS:
        for block in range(TINY.depth):
            found = float64(after.importance[part][block])
            row, column = np.unravel_index(found.argmax(), found.shape)
            total = 0.0
            for batch in batches:
                losses = []
                for sign in (1, -1):
                    moved = {name: kernel.copy() for name, kernel in kernels.items()}
                    moved[part][block, row, column] += sign * 1e-5
                    features = small_stream.reference_features(backbone, batch.images, moved)
                    losses.append(
                        small_stream.reference_cross_entropy(
                            features, trained["head"], batch.labels, 3
                        )
                    )
                gradients = (losses[0] - losses[1])[batch.weights > 0] / 2e-5
                if fisher == "per_sample":
                    total += np.sum(gradients**2)
                else:
                    total += len(gradients) * np.mean(gradients) ** 2
            assert total > 0
            np.testing.assert_allclose(found[row, column], total / 7, rtol=2e-3)


def test_gradient_of_a_kernel_is_the_sum_over_tokens_of_inputs_times_errors(backbone):
    """X^T Delta, Delta being the gradient at the output of the value projection.

    Of the last block only the class token's output counts. Its weights on all tokens sum to one,
    so Delta is the gradient of the bias, shared out by those weights.
    """
    variant = vit.Variant(width=8, depth=1, heads=1, patch=4)
    params = small_stream.random_params(3, variant, side=4)
    image = np.random.default_rng(0).integers(0, 256, (1, 4, 4, 3)).astype(np.uint8)
    model = vit.VisionTransformer(variant)
    kernels = vit.pretrained_kernels(params)

    def output(kernels, params):
        return jnp.sum(jnp.sin(model.apply({"params": params}, image, kernels)))

    of_kernels, of_params = jax.jit(jax.grad(output, argnums=(0, 1)))(kernels, params)
    _, captured = jax.jit(partial(model.apply, mutable=["intermediates"]))(
        {"params": params}, image
    )
    block = captured["intermediates"]["Transformer"]["encoderblock_0"]
    inputs = float64(block["attention_input"][0][0])
    attention = params["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_1"]

    def project(name, tokens):
        return tokens @ float64(attention[name]["kernel"]).reshape(8, 8) + float64(
            attention[name]["bias"]
        ).reshape(8)

    scores = project("key", inputs) @ project("query", inputs)[0] / np.sqrt(8)
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    of_bias = of_params["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_1"]
    errors = shares[:, None] * float64(of_bias["value"]["bias"]).reshape(1, 8)
    np.testing.assert_allclose(of_kernels["value"][0], inputs.T @ errors, rtol=1e-4, atol=1e-6)


def test_estimators_agree_for_batches_of_one_and_differ_by_the_batch_size_in_noise(backbone):
    """Labels that decide the sign of a common gradient make that gradient noise of mean zero."""
    setup = make_setup()
    count, size = 32, 4
    image = make_batch(5, size=1).images
    labels = np.random.default_rng(0).integers(0, 2, count).astype(np.int32)
    state = ewc_lora.initial_state(setup)
    frozen, _ = ewc_lora.start(setup, backbone, state, 0, jax.random.key(0))
    _, trained = trained_leaves(setup, backbone)
    # With equal logits the gradients of the two labels are opposite.
    merged = increments.merge(frozen["kernels"], trained["increment"])
    features = small_stream.encode(setup, backbone, np.repeat(image, 4, 0), merged)
    head = trained["head"]
    trained["head"] = head._replace(bias=-(features @ head.weight.T)[0])

    def fisher(estimator, batch_size):
        ours = make_setup(learner__ewc_lora__fisher=estimator)
        batches = [
            Batch(np.repeat(image, batch_size, 0), part, np.ones(batch_size, np.float32))
            for part in np.split(labels, count // batch_size)
        ]
        images = small_stream.task_images(*batches)
        return ewc_lora.after_task(ours, backbone, state, 0, frozen, trained, images).importance

    per_sample = fisher("per_sample", size)
    alone, together = fisher("batch_mean", 1), fisher("batch_mean", size)
    signs = 2.0 * labels - 1.0
    shrinkage = np.mean(signs.reshape(-1, size).mean(axis=1) ** 2)
    assert 0.5 / size < shrinkage < 2 / size
    for part in PARTS:
        top = float(per_sample[part].max())
        assert top > 0
        np.testing.assert_allclose(alone[part], per_sample[part], rtol=1e-3, atol=1e-5 * top)
        np.testing.assert_allclose(
            together[part], shrinkage * per_sample[part], rtol=1e-3, atol=1e-5 * top
        )


def test_images_held_at_once_and_padding_change_nothing(backbone):
    batch = make_batch(3, classes=3)
    whole = fisher_of(make_setup(), backbone, batch)
    padded = Batch(
        np.concatenate([batch.images, np.zeros_like(batch.images[:2])]),
        np.concatenate([batch.labels, np.zeros(2, np.int32)]),
        np.concatenate([batch.weights, np.zeros(2, np.float32)]),
    )
    again = fisher_of(make_setup(learner__ewc_lora__images_at_once=4), backbone, padded)
    for part in PARTS:
        top = whole[part].max()
        assert top > 0
        np.testing.assert_allclose(again[part], whole[part], rtol=1e-3, atol=1e-5 * top)


# The head on the unit feature, and labels drawn from the model ------------------------------------


def unit(features):
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def test_the_head_on_the_unit_feature(backbone):
    """In training, in the Fisher pass and in what is offered for inference."""
    setup = make_setup(learner__ewc_lora__head_input="l2", learner__ewc_lora__strength=0.0)
    frozen, trained = trained_leaves(setup, backbone)
    # Unit features are short, so that rows must be long to matter.
    trained["head"] = jax.tree.map(lambda leaf: 10.0 * leaf, trained["head"])
    batch, head = make_batch(classes=3), trained["head"]
    merged = float64(increments.merge(frozen["kernels"], trained["increment"]))
    features = small_stream.reference_features(backbone, batch.images, merged)
    expected = small_stream.reference_cross_entropy(unit(features), head, batch.labels, 3)
    found = jax.jit(partial(ewc_lora.loss, setup))(backbone, frozen, trained, batch)
    np.testing.assert_allclose(found, expected.mean(), rtol=1e-4)

    images = small_stream.task_images(batch)
    state = random_state(setup)._replace(importance=ewc_lora.initial_state(setup).importance)
    after = ewc_lora.after_task(setup, backbone, state, 1, frozen, trained, images)
    (_, offered) = ewc_lora.heads(setup, after, 2)
    assert isinstance(offered, head_types.NormalisedLinearHead)
    kernels = float64(ewc_lora.encoder(setup, backbone, after, 2))
    features = small_stream.reference_features(backbone, batch.images, kernels)
    weight, bias = float64(head.weight)[:3], float64(head.bias)[:3]
    np.testing.assert_allclose(
        offered.logits(jnp.asarray(features, jnp.float32)),
        unit(features) @ weight.T + bias,
        atol=1e-4,
    )
    importance = float64(after.importance["value"])
    block, row, column = np.unravel_index(importance.argmax(), importance.shape)
    losses = []
    for sign in (1, -1):
        moved = {name: kernel.copy() for name, kernel in kernels.items()}
        moved["value"][block, row, column] += sign * 1e-5
        features = small_stream.reference_features(backbone, batch.images, moved)
        losses.append(small_stream.reference_cross_entropy(unit(features), head, batch.labels, 3))
    gradients = (losses[0] - losses[1]) / 2e-5
    np.testing.assert_allclose(importance.max(), np.mean(gradients**2), rtol=2e-3)


def test_labels_of_the_model_follow_its_softmax(backbone):
    """Copies of two images that a head tells apart; its third row is no class of the task."""
    setup, count = make_setup(), 1500
    kernels = random_state(setup).importance
    images = make_batch(0, size=2).images
    mask = np.array([True, True, False])
    features = small_stream.reference_features(backbone, images, float64(kernels))
    apart = features[0] - features[1]
    weight = np.stack([2.0 * apart / np.sum(apart**2), 0.0 * apart, apart])
    bias = np.array([-weight[0] @ features.mean(axis=0), 0.5, 9.0])
    head = head_types.LinearHead(*(jnp.asarray(part, jnp.float32) for part in (weight, bias)))
    shares = np.exp((features @ weight.T + bias)[:, :2])
    shares /= shares.sum(axis=1, keepdims=True)
    assert np.abs(shares[0] - shares[1]).max() > 0.3
    copies = np.repeat(images, count, axis=0)
    drawn = ewc_lora.labels_of_model(
        setup.model, backbone, kernels, head, mask, copies, jax.random.key(0)
    )
    drawn = np.asarray(drawn).reshape(2, count)
    for image in range(2):
        found = np.bincount(drawn[image], minlength=3) / count
        assert found[2] == 0
        np.testing.assert_allclose(found[:2], shares[image], atol=0.04)


def test_fisher_information_with_labels_of_the_model(backbone):
    """It is that of the labels drawn; they follow from the task's key and differ by batch."""
    model = make_setup(learner__ewc_lora__fisher_labels="model")
    data = make_setup()
    same = make_batch(6, size=8, classes=3)
    batches = [same, same]
    state = random_state(model)._replace(importance=ewc_lora.initial_state(model).importance)
    _, trained = trained_leaves(model, backbone)

    def importance(setup, batches, seed=0):
        frozen, _ = ewc_lora.start(setup, backbone, state, 1, jax.random.key(seed))
        images = small_stream.task_images(*batches)
        return ewc_lora.after_task(setup, backbone, state, 1, frozen, trained, images), frozen

    after, frozen = importance(model, batches)
    again, _ = importance(model, batches)
    jax.tree.map(np.testing.assert_array_equal, after, again)
    key = jax.random.wrap_key_data(frozen["labels"])
    kernels = ewc_lora.encoder(model, backbone, after, 2)
    drawn = [
        np.asarray(
            ewc_lora.labels_of_model(
                model.model,
                backbone,
                kernels,
                trained["head"],
                frozen["class_mask"],
                batch.images,
                jax.random.fold_in(key, number),
            )
        )
        for number, batch in enumerate(batches)
    ]
    assert np.any(drawn[0] != drawn[1])
    relabelled = [
        batch._replace(labels=labels) for batch, labels in zip(batches, drawn, strict=True)
    ]
    expected, _ = importance(data, relabelled)
    with_data, _ = importance(data, batches)
    other, _ = importance(model, batches, seed=7)
    for part in PARTS:
        found = after.importance[part]
        np.testing.assert_array_equal(found, expected.importance[part])
        for different in (with_data, other):
            assert np.abs(found - different.importance[part]).max() > 1e-3 * found.max()


def test_the_labels_have_a_key_of_their_own(backbone):
    setup, key = make_setup(), jax.random.key(3)
    frozen, _ = ewc_lora.start(setup, backbone, random_state(setup), 0, key)
    for other in [key, *jax.random.split(key)]:
        assert np.any(frozen["labels"] != jax.random.key_data(other))


def test_importance_accumulates(backbone):
    images = small_stream.task_images(make_batch(4, classes=3))
    fisher = fisher_of(make_setup(), backbone, *images.augmented())
    scale = max(part.max() for part in fisher.values())
    for accumulation in (1.0, 0.25):
        setup = make_setup(learner__ewc_lora__accumulation=accumulation)
        _, _, after = ended(setup, backbone, images, importance=scale)
        for part in PARTS:
            assert fisher[part].min() >= 0
            np.testing.assert_allclose(
                after.importance[part], accumulation * scale + fisher[part], rtol=1e-4
            )


def test_folding(backbone):
    """Products: W_0 + sum A_i B_i. Factors: the sum of As times the sum of Bs, last task apart."""
    pretrained = float64(vit.pretrained_kernels(backbone))
    for folding in ("products", "factors"):
        setup = make_setup(learner__ewc_lora__folding=folding)
        state = random_state(setup)
        factors = float64(state.increments)
        for num_tasks in range(4):
            found = ewc_lora.encoder(setup, backbone, state, num_tasks)
            frozen, _ = (
                ewc_lora.start(setup, backbone, state, num_tasks, jax.random.key(0))
                if num_tasks < 3
                else (None, None)
            )
            for part in PARTS:
                a, b = factors[part]["A"][:num_tasks], factors[part]["B"][:num_tasks]
                expected = folded = pretrained[part] + (a @ b).sum(0)
                if folding == "factors":
                    folded = pretrained[part] + a.sum(0) @ b.sum(0)
                    if num_tasks:
                        expected = pretrained[part] + a[:-1].sum(0) @ b[:-1].sum(0) + a[-1] @ b[-1]
                np.testing.assert_allclose(found[part], expected, atol=1e-5)
                if frozen is not None:
                    np.testing.assert_allclose(frozen["kernels"][part], folded, atol=1e-5)
                if folding == "products":
                    change = np.asarray(found[part], np.float64) - pretrained[part]
                    rank = np.linalg.matrix_rank(change, tol=1e-4).max()
                    assert rank == min(RANK * num_tasks, TINY.width)


def test_the_end_of_a_task_leaves_features_unchanged(backbone, update):
    setup = make_setup()
    state = ewc_lora.initial_state(setup)
    state, frozen, trained, images = small_stream.train(
        ewc_lora, setup, backbone, state, 0, update, rate=100.0
    )
    shown = make_batch(9).images
    in_training = small_stream.encode(
        setup, backbone, shown, frozen["kernels"], trained["increment"]
    )
    after = ewc_lora.after_task(setup, backbone, state, 0, frozen, trained, images)
    frozen, trained = ewc_lora.start(setup, backbone, after, 1, jax.random.key(1))
    merged = small_stream.encode(
        setup, backbone, shown, ewc_lora.encoder(setup, backbone, after, 1)
    )
    np.testing.assert_allclose(merged, in_training, atol=5e-5)
    started = small_stream.encode(setup, backbone, shown, frozen["kernels"], trained["increment"])
    np.testing.assert_allclose(started, merged, atol=1e-5)
    pretrained = ewc_lora.encoder(setup, backbone, after, 0)
    unchanged = small_stream.encode(setup, backbone, shown, pretrained)
    assert np.abs(np.asarray(merged - unchanged)).max() > 0.01


def test_earlier_tasks_and_the_backbone_stay(backbone, update):
    setup = make_setup()
    before = small_stream.copy(backbone)
    first = small_stream.train_whole(
        ewc_lora, setup, backbone, ewc_lora.initial_state(setup), 0, update
    )
    kept = small_stream.copy(first)
    second = small_stream.train_whole(ewc_lora, setup, backbone, first, 1, update)
    jax.tree.map(np.testing.assert_array_equal, before, backbone)
    jax.tree.map(np.testing.assert_array_equal, kept, first)
    for old, new in zip(
        jax.tree.leaves((first.increments, first.heads)),
        jax.tree.leaves((second.increments, second.heads)),
        strict=True,
    ):
        np.testing.assert_array_equal(old[0], new[0])
        assert np.any(np.asarray(old[1]) != np.asarray(new[1]))
        np.testing.assert_array_equal(new[2], 0)
    shapes = [head.weight.shape for head in ewc_lora.heads(setup, second, 2)]
    assert shapes == [(2, TINY.width), (3, TINY.width)]


def test_a_strong_penalty_holds_important_entries(backbone, update):
    """The same steps with and without Omega, in the half of the kernels that it protects."""
    setup = make_setup()
    shape = (TINY.depth, TINY.width, TINY.width)
    half = jnp.zeros(shape).at[:, :, : TINY.width // 2].set(1e-3)
    norms = {}
    for name, omega in (("free", jnp.zeros(shape)), ("held", half)):
        state = ewc_lora.initial_state(setup)
        state = state._replace(importance=vit.KeyValueKernels(key=omega, value=omega))
        _, _, trained, _ = small_stream.train(ewc_lora, setup, backbone, state, 1, update, steps=30)
        change = products(trained["increment"])["value"]
        norms[name] = [np.linalg.norm(each) for each in np.split(change, 2, axis=2)]
    assert norms["held"][0] < 0.3 * norms["free"][0]
    assert norms["held"][1] > 0.5 * norms["free"][1]


def test_one_compilation_and_one_size_for_all_tasks(backbone):
    setup = make_setup((3, 2) * 10)
    update = ewc_lora.update(setup)
    functions = (update.step, ewc_lora._add_squared_gradients)
    alive, compiled = small_stream.cost_of_tasks(ewc_lora, setup, backbone, update, functions)
    assert alive[1] == alive[17]
    assert compiled[1] == compiled[17]
    assert compiled[1][0] == 1


def test_native_update(backbone):
    """Adam along half a cosine wave, with coupled weight decay on ImageNet-R: one step in NumPy."""
    setup = make_setup(learner__preset="native", benchmark="imagenet_r")
    update = ewc_lora.update(setup)
    assert update.schedule is not None
    assert [update.schedule(epoch, 4) for epoch in range(4)] == [
        training.learning_rate_factor("cosine", epoch, 4) for epoch in range(4)
    ]
    frozen, trained = trained_leaves(setup, backbone)
    frozen["importance"] = jax.tree.map(jnp.zeros_like, frozen["importance"])
    # Leaves so large that the decay decides the sign of many slopes.
    trained = jax.tree.map(lambda leaf: 20.0 * leaf, trained)
    batch = make_batch(classes=3)
    gradients = float64(
        jax.jit(jax.grad(partial(ewc_lora.loss, setup), argnums=2))(
            backbone, frozen, trained, batch
        )
    )
    start = float64(trained)
    stepped, _, _ = update.step(backbone, frozen, trained, update.initialise(trained), batch, 0.5)
    turned = 0
    for part, rate in (("increment", 5e-4), ("head", 5e-4)):
        for old, gradient, new in zip(
            *map(jax.tree.leaves, (start[part], gradients[part], stepped[part])), strict=True
        ):
            slope = gradient + 5e-3 * old
            expected = old - 0.5 * rate * slope / (np.abs(slope) + 1e-8)
            # Where the slope is rounding, its sign is not known.
            clear = np.abs(slope) > 1e-5
            assert clear.mean() > 0.5
            turned += np.sum(clear & (np.sign(slope) != np.sign(gradient)))
            np.testing.assert_allclose(np.asarray(new)[clear], expected[clear], atol=1e-5)
    assert turned > 50


def test_protocol_is_the_update_of_cumulative_lora(backbone, update):
    """Without importance both learners take the same steps from the same start."""
    setup = make_setup()
    results = []
    for learner, step in ((ewc_lora, update), (cumulative_lora, cumulative_lora.update(setup))):
        state = learner.initial_state(setup)
        results.append(small_stream.train(learner, setup, backbone, state, 0, step)[2])
    for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert update.schedule is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("strength", -1.0),
        ("accumulation", float("nan")),
        ("fisher", "sampled"),
        ("fisher_labels", "teacher"),
        ("head_input", "l1"),
        ("folding", "none"),
        ("images_at_once", 0),
    ],
)
def test_impossible_settings_are_named(field, value):
    config = base.get_config()
    config.learner.ewc_lora[field] = value
    with pytest.raises(InputError, match=rf"^config\.learner\.ewc_lora\.{field}: expected "):
        configuration.validate(config)


def test_it_is_found_by_its_name():
    assert learners.find("ewc_lora") is ewc_lora
