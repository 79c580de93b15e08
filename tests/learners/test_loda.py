"""LoDA: its directions, its shrinking, its loss, and what a task changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from fdc_jax.learners import loda
from tests.learners import rsiat_reference, toy


@pytest.mark.parametrize(("least", "jitter"), [(1e-3, 0.0), (-2e-5, 1.1111111e-4)])
def test_cholesky_adds_growing_multiples_of_the_identity(least, jitter):
    axes = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0]
    matrix = axes @ np.diag([1.0, 0.5, 0.1, 0.1, 0.1, least]) @ axes.T
    root = loda.cholesky(matrix)
    np.testing.assert_allclose(root @ root.T, matrix + jitter * np.eye(6), atol=1e-11)
    np.testing.assert_array_equal(np.triu(root, 1), 0)


@pytest.fixture(scope="module")
def run():
    return toy.trajectory("loda")


@pytest.mark.parametrize("task", [0, 1])
def test_directions_are_eigenvectors_of_moments(run, backbone, task):
    """The first task goes on to train those of the general branch."""
    step, rank = run.steps[task], toy.RANK
    old = toy.float64(step.before.moments)
    new = toy.input_moments(run, run.learner.encoder(backbone, step.before, task), step.images)
    A = toy.float64(step.designed.increments["key"]["A"])[task]
    np.testing.assert_array_equal(step.designed.increments["value"]["A"][task], A)
    np.testing.assert_array_equal(step.frozen["isolated"], A[..., rank:])
    for part in toy.PARTS:
        start, end = (
            leaves["increment"]["general"][part]["A"] for leaves in (step.started, step.trained)
        )
        np.testing.assert_array_equal(start, A[..., :rank])
        assert (np.abs(end - start).max() > 1e-3) == (task == 0)
    for block in range(toy.TINY.depth):
        general, isolated = np.split(A[block], 2, axis=1)
        np.testing.assert_allclose(general.T @ general, np.eye(rank) / 3, atol=1e-5)
        both = new[block] + old[block]
        energies = np.linalg.eigvalsh(both)[::-1][:rank] / 3
        actual = general.T @ both @ general
        np.testing.assert_allclose(actual, np.diag(energies), atol=1e-5 * energies[0])
        if task == 0:
            np.testing.assert_array_equal(isolated, 0)
            continue
        np.testing.assert_allclose(isolated.T @ isolated, np.eye(rank) / 3, atol=1e-5)
        root = loda.cholesky(old[block])
        values = scipy.linalg.eigh(new[block], root @ root.T, eigvals_only=True)
        # The trace of the ratio does not depend on the basis of a space.
        ratio = np.linalg.solve(
            isolated.T @ root @ root.T @ isolated, isolated.T @ new[block] @ isolated
        )
        np.testing.assert_allclose(np.trace(ratio), values[-rank:].sum(), rtol=1e-3)


def merged(kernels, frozen, trained, shrinking=1.0):
    """W + 0.25 sum s_i a_i b_i + 0.5 A B, written for x W."""
    kernels, fixed, leaves = toy.float64((kernels, frozen["isolated"], trained["increment"]))
    shrinking, result = np.broadcast_to(shrinking, (2, toy.TINY.depth, toy.RANK)), {}
    for factors, part in zip(shrinking, toy.PARTS, strict=True):
        A, B = (leaves["general"][part][name] for name in ("A", "B"))
        isolated = 0.5 * fixed @ leaves["isolated"][part]
        general = 0.25 * np.einsum("li,ldi,lie->lde", factors, A, B)
        result[part] = kernels[part] + isolated + general
    return result


def test_merged_kernels_and_moments_in_float64(run, backbone):
    """In float64: energies under the unmerged encoder, and both passes added to the old sum."""
    for task, step in enumerate(run.steps):
        old = toy.float64(step.before.moments)
        start = run.learner.encoder(backbone, step.before, task)
        leaves = step.frozen, step.trained
        before_merging = toy.input_moments(run, merged(start, *leaves), step.images)
        general = toy.float64(step.trained["increment"]["general"])
        A = np.stack([general[part]["A"] for part in toy.PARTS])
        kept, gained = (
            np.einsum("pldr,lde,pler->plr", A, moments, A) for moments in (old, 3 * before_merging)
        )
        shrinking = gained / (kept + gained)
        expected = merged(start, *leaves, shrinking)
        actual = run.learner.encoder(backbone, step.after, task + 1)
        for part in toy.PARTS:
            np.testing.assert_allclose(actual[part], expected[part], atol=2e-6)
        of_merged = toy.input_moments(run, expected, step.images)
        both = old + before_merging + of_merged
        np.testing.assert_allclose(step.after.moments, both, rtol=1e-4, atol=1e-4)
        assert task == 0 or shrinking.max() < 0.9


def test_loss_is_cosface_over_the_tasks_own_classes(run, backbone):
    """A batch of one class makes a plain step, whose moments show the gradients."""
    step = run.steps[2]
    kernels = run.learner.encoder(backbone, step.before, 2)
    frozen = step.frozen | {"trains": jax.tree.map(jnp.ones_like, step.frozen["trains"])}

    def expected(leaves, images, labels):
        features = toy.reference_features(images, merged(kernels, frozen, leaves))
        return rsiat_reference.cosface(features, leaves["head"][:2], labels, 20.0, 0.15)

    toy.check_loss(
        run, frozen, toy.random_like(step.trained, 1), expected, classes=1, value_rtol=2e-4
    )
