"""InfLoRA+CA: InfLoRA's encoder, and heads aligned on one Gaussian per class."""

import jax
import numpy as np
import optax
import pytest

from fdc_jax.learners import gaussian_alignment, training
from fdc_jax.model import increments
from tests.learners import toy


def test_training_equals_inflora():
    """From the same state, key and images both design, start and train alike."""
    runs = [toy.trajectory(name) for name in ("inflora_ca", "inflora")]
    aligned, plain = (run.steps[0] for run in runs)
    toy.assert_equal(aligned.designed[:4], tuple(plain.designed))
    frozen = {name: leaf for name, leaf in aligned.frozen.items() if name != "alignment"}
    toy.assert_equal((frozen, aligned.started), (plain.frozen, plain.started))
    given = plain.started, toy.make_batch(size=6)
    toy.assert_equal(*(toy.step(run, run.steps[0].frozen, *given) for run in runs))


def mean_loss(weight, means, tasks, temperature):
    """Returns the cross-entropy of means of classes; the last column of a head is its bias."""
    logits = means @ weight[:, :-1].T + weight[:, -1]
    if temperature:
        norms = [np.linalg.norm(logits[:, tasks == task], axis=1) + 1e-7 for task in (0, 1)]
        logits = logits / np.mean(norms, axis=0)[:, None] / temperature
    return np.mean(np.log(np.sum(np.exp(logits), axis=1)) - np.diag(logits))


@pytest.mark.parametrize(
    ("preset", "rates", "temperature", "optimizer"),
    [
        ("protocol", [5.0e-3, 4.52e-3, 3.27e-3, 1.73e-3, 4.8e-4], 0.1, ("adam", 0.0)),
        ("native", [1.0e-2, 9.05e-3, 6.55e-3, 3.45e-3, 9.5e-4], 0.0, ("sgd", 5e-4)),
    ],
)
def test_alignment_in_float64(one_batch, preset, rates, temperature, optimizer):
    """Classes without spread make every draw a scaled mean; one batch an epoch has no order."""
    options = {"learner__inflora_ca__logit_temperature": temperature}
    learner = toy.make_learner("inflora_ca", learner__preset=preset, **options)
    heads = toy.random_like(learner.initial_state().heads, 0, 1.0)
    gaussians = toy.points(1)
    seen = learner.setup.classes_of_first(2)
    aligned = learner.align(heads, gaussians, seen, jax.random.key(0))

    def rows(heads):
        return np.concatenate([heads.weight, heads.bias[..., None]], axis=2)

    tasks = np.nonzero(seen)[0]
    # Of the first of two tasks 0.9 + 0.1 / 2.
    means = toy.float64(gaussians.means)[seen] * np.array([0.95, 1.0])[tasks, None]
    expected = toy.descent(
        lambda weight: mean_loss(weight, means, tasks, temperature),
        toy.float64(rows(heads))[seen],
        toy.Optimizer(*optimizer),
        rates,
    )
    np.testing.assert_allclose(rows(aligned)[seen], expected, atol=2e-5)
    # Weight decay shrinks unseen heads too, which new heads replace before anything reads them.
    if preset == "protocol":
        np.testing.assert_array_equal(rows(aligned)[~seen], rows(heads)[~seen])


# Optimiser, epochs, rate and temperature; heads are aligned from those of the task's end.
ALIGNMENTS = {
    "inflora_ca": (optax.scale_by_adam(), 5, 5e-3, 0.1),
    "slca": (training.sgd(5e-4), 5, 1e-2, 0.4),
    "e2_lora": (training.sgd(5e-4), 3, 0.02, 0.0),
}


@pytest.mark.parametrize("name", ALIGNMENTS)
def test_all_heads_are_aligned_from_the_second_task_on(name):
    run = toy.trajectory(name)
    step, seen = run.steps[1], run.setup.classes_of_first(2)
    heads = increments.store(step.before.heads, 1, step.trained["head"])
    key = jax.random.wrap_key_data(step.frozen["alignment"])
    align = gaussian_alignment.linear_retraining(*ALIGNMENTS[name])
    expected = training.unpadded(run.setup, align(heads, step.after.gaussians, seen, key), 2)
    toy.assert_equal(run.learner.heads(step.after, 2), expected)
