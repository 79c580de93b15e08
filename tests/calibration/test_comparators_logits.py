"""Routers over heads' logits, against SciPy and float64 NumPy."""

import numpy as np
import pytest
import scipy.special
import scipy.stats

from fdc_jax.calibration.comparators import logits
from tests.calibration.streams import fit, known, probe_inputs

TASKS = known(0, 3)
ADAPTED, PRETRAINED = probe_inputs(TASKS)


def logits_of(task, features):
    weight, bias = (np.asarray(part, np.float64) for part in task.head)
    return features.astype(np.float64) @ weight.T + bias


def standardised(task, z):
    best = logits_of(task, task.adapted).max(axis=1)
    return scipy.stats.zmap(z.max(axis=1), best, ddof=0)


FORMULAS = {
    logits.Raw: lambda task, z: z.max(axis=1),
    logits.LogitStandardisation: standardised,
    logits.Energy: lambda task, z: scipy.special.logsumexp(z, axis=1),
    logits.MaximumSoftmax: lambda task, z: scipy.special.softmax(z, axis=1).max(axis=1),
    logits.NegativeEntropy: lambda task, z: (
        -scipy.stats.entropy(scipy.special.softmax(z, axis=1), axis=1)
    ),
}


@pytest.mark.parametrize("make", FORMULAS)
def test_scores_are_the_formulas(make):
    comparator = fit(make(), TASKS)
    scores = comparator.score(ADAPTED, PRETRAINED)
    z = [logits_of(task, ADAPTED) for task in TASKS]
    expected = [FORMULAS[make](*pair) for pair in zip(TASKS, z, strict=True)]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(scores.task_scores.T, expected, rtol=0, atol=1e-5 * scale)
    np.testing.assert_array_equal(scores.local_class.T, [part.argmax(axis=1) for part in z])
    assert comparator.storage_bytes == (24 if make is logits.LogitStandardisation else 0)


def test_weight_aligning_scales_heads_to_the_earlier_mean_norm():
    earlier, expected = [], []
    for task in TASKS:
        norms = np.linalg.norm(task.weight.astype(np.float64), axis=1)
        factor = np.mean(earlier) / norms.mean() if earlier else 1.0
        earlier += [*(factor * norms)]
        without_bias = logits_of(task, ADAPTED) - task.bias
        expected.append((factor * without_bias + task.bias).max(axis=1))
    actual = fit(logits.WeightAligning(), TASKS).score(ADAPTED).task_scores.T
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)
