"""InfLoRA: where A points, how the memory grows, and what training leaves alone."""

import numpy as np
import pytest

from fdc_jax.learners import inflora
from tests.learners import toy


def random_moment(seed, width=16, decay=0.7, rank=None):
    """A second moment with a falling spectrum in a random basis."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(width, width)))[0]
    values = decay ** np.arange(width) * rng.uniform(0.5, 1.5, width)
    values[width if rank is None else rank :] = 0.0
    return basis * values @ basis.T


def projector(basis):
    return basis @ basis.T


def test_design_never_points_into_the_memory():
    """Inputs of rank 3, two of whose directions are in the memory, have one direction to give."""
    moment = random_moment(2, rank=3)
    memory = np.linalg.svd(moment)[0][:, :2]
    A = inflora.design(moment, memory, 4)
    np.testing.assert_allclose(memory.T @ A, 0, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(A[:, 0]), 3**-0.5, atol=1e-12)


def test_memory_never_exceeds_the_width():
    grown = inflora.grown_memory(random_moment(3, width=6, decay=0.9), np.eye(6)[:, :4], 1.0)
    assert grown.shape == (6, 6)
    np.testing.assert_allclose(projector(grown), np.eye(6), atol=1e-9)


def dual_gpm(moments, thresholds):
    """The published rule: the complement is kept once it is the smaller of the two.

    Yields the projection on the memory after every task.
    """
    basis, occupied, width = None, True, len(moments[0])
    for moment, wanted in zip(moments, thresholds, strict=True):
        total = np.sum(moment**2)
        if basis is None:
            left, values, _ = np.linalg.svd(moment)
            basis = left[:, : max(int(np.sum(np.cumsum(values**2) / total < wanted)), 1)]
        elif occupied:
            left, values, _ = np.linalg.svd(moment - projector(basis) @ moment)
            held, extra = 1 - np.sum(values**2) / total, 0
            while held < wanted:
                held += values[extra] ** 2 / total
                extra += 1
            basis = np.concatenate([basis, left[:, :extra]], axis=1)
        else:
            left, values, _ = np.linalg.svd(projector(basis) @ moment)
            free, removed = np.sum(values**2) / total, 0
            while free >= 1 - wanted:
                free -= values[removed] ** 2 / total
                removed += 1
            if removed:
                rest = basis - projector(left[:, :removed]) @ basis
                basis = np.linalg.svd(rest)[0][:, : basis.shape[1] - removed]
        if occupied and basis.shape[1] > width / 2:
            basis = np.linalg.svd(basis)[0][:, basis.shape[1] :]
            occupied = False
        yield projector(basis) if occupied else np.eye(width) - projector(basis)


@pytest.mark.parametrize("seed", range(8))
def test_memory_equals_the_rule_with_a_complement(seed):
    """From the first task on, also if the threshold is low, or is reached without growth."""
    moments = [random_moment(10 * seed + task, width=24, decay=0.75) for task in range(8)]
    moments[4] = moments[3]
    thresholds = np.linspace([0.7, 0.05][seed % 2], 0.97, 8)
    thresholds[4] = thresholds[3]
    memory = inflora.first_memory(moments[0], thresholds[0])
    for task, expected in enumerate(dual_gpm(moments, thresholds)):
        old = memory
        if task > 0:
            memory = inflora.grown_memory(moments[task], old, thresholds[task])
        assert memory is old or task != 4
        np.testing.assert_allclose(memory.T @ memory, np.eye(memory.shape[1]), atol=1e-12)
        np.testing.assert_allclose(projector(memory), expected, atol=1e-8)
    assert 12 < memory.shape[1] < 24


def bases(state):
    memory, sizes = toy.float64(state.memory), np.asarray(state.memory_size)
    return [columns[:, :size] for columns, size in zip(memory, sizes, strict=True)]


def test_A_is_designed_before_training_and_stays(backbone):
    run = toy.trajectory("inflora")
    for task, step in enumerate(run.steps):
        A = toy.float64(step.designed.increments["key"]["A"])[task]
        np.testing.assert_array_equal(step.designed.increments["value"]["A"][task], A)
        np.testing.assert_array_equal(step.frozen["A"]["key"], A)
        kernels = run.learner.encoder(backbone, step.before, task)
        moments = toy.input_moments(run, kernels, step.images)
        for block, memory in enumerate(bases(step.before)):
            outside = (np.eye(toy.TINY.width) - projector(memory)) @ moments[block]
            vectors = np.linalg.svd(outside)[0][:, : toy.RANK]
            np.testing.assert_allclose(3 * projector(A[block]), projector(vectors), atol=1e-4)


def test_memory_holds_the_inputs_after_training(backbone):
    run = toy.trajectory("inflora")
    for task, step in enumerate(run.steps):
        kernels = run.learner.encoder(backbone, step.after, task + 1)
        moments, share = toy.input_moments(run, kernels, step.images), 0.9998 + 0.0002 * task / 3
        for block, (old, new) in enumerate(zip(bases(step.before), bases(step.after), strict=True)):
            np.testing.assert_allclose(new.T @ new, np.eye(new.shape[1]), atol=1e-5)
            toy.assert_equal(new[:, : old.shape[1]], old)
            grown = inflora.first_memory(moments[block], share)
            if task > 0:
                grown = inflora.grown_memory(moments[block], old, share)
                assert new.shape[1] > old.shape[1]
            np.testing.assert_allclose(projector(new), projector(grown), atol=1e-4)
