"""Comparators that choose the task by logits of the heads; the task's head predicts the class."""

from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import log_softmax, logsumexp, softmax

from fdc_jax.calibration.calibrator import Scores, within_tasks
from fdc_jax.calibration.comparators.base import Comparator
from fdc_jax.calibration.comparators.distances import squared_distances
from fdc_jax.calibration.inputs import NotApplicable, input_name
from fdc_jax.heads import NORM_FLOOR, Head, LinearHead


class Raw(Comparator):
    """Largest logit over all heads: s_t = max_c z_{t,c} (paper, Eq. raw).

    The score of a class is that of its task, less the difference of the task's largest logit and
    the class's own. The other methods of this file replace `_adjust` or `_task_score`.
    """

    name = "raw"
    needs_heads = True

    def score(self, adapted: Any, pretrained: Any = None) -> Scores:
        """See `Calibrator.score`."""
        return self._routed(self._features(adapted, pretrained))[0]

    def class_scores(self, adapted: Any, pretrained: Any = None) -> Float[np.ndarray, "n classes"]:
        """See `Calibrator.class_scores`."""
        scores, logits = self._routed(self._features(adapted, pretrained))
        return within_tasks(scores.task_scores, logits)

    def _routed(self, features: Float[np.ndarray, "n d"]) -> tuple[Scores, list[np.ndarray]]:
        """Returns the scores, and the logits of each head."""
        logits = [self._adjust(t, _logits(head, features)) for t, head in enumerate(self.heads)]
        scores = [self._task_score(task, z, features) for task, z in enumerate(logits)]
        rows = np.stack([z.argmax(axis=1) for z in logits], axis=1).astype(np.int32)
        return Scores(np.stack(scores, axis=1), rows, self.classes), logits

    def _adjust(self, task: int, logits: Float[np.ndarray, "n c"]) -> Float[np.ndarray, "n c"]:
        """Returns the logits of a head that scores are computed from."""
        return logits

    def _task_score(self, task: int, logits: Any, features: Any) -> Float[np.ndarray, " n"]:
        """Returns s_t of logits [n, c] and features [n, d]."""
        return logits.max(axis=1)


class LogitStandardisation(Raw):
    """s_t = (max_c z_{t,c} - mu_t) / max(sigma_t, 1e-12) (paper, Eq. logit-standardization).

    mu_t and sigma_t are the mean and the population standard deviation of the head's largest logit
    on its own training features at the time of the task. A task of one image has sigma 0 and is
    divided by 1e-12, as the equation says.
    """

    name = "ls"

    def _collect(self, features, rows, head) -> tuple[np.floating, np.floating]:
        best = _logits(head, features).max(axis=1)
        return best.mean(), best.std()

    def _task_score(self, task, logits, features) -> Float[np.ndarray, " n"]:
        mean, std = self.statistics[task]
        return (logits.max(axis=1) - mean) / max(std, 1e-12)


class Energy(Raw):
    """s_t = log sum_c exp(z_{t,c}), the negative energy of a head.

    Liu et al., "Energy-based Out-of-distribution Detection" (2020), at temperature 1.
    """

    name = "energy"

    def _task_score(self, task, logits, features) -> Float[np.ndarray, " n"]:
        return np.asarray(logsumexp(logits, axis=1))


class MaximumSoftmax(Raw):
    """s_t = max_c softmax_c(z_t), the confidence of a head within its classes.

    Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples"
    (2017). A head of one class is always certain.
    """

    name = "msp"

    def _task_score(self, task, logits, features) -> Float[np.ndarray, " n"]:
        return softmax(logits, axis=1).max(axis=1)


class NegativeEntropy(Raw):
    """s_t = sum_c p_c log p_c of p = softmax(z_t): the head with the least entropy.

    The rule of entropy-based routers (the paper names GR-LoRA), on heads that share an encoder. A
    head of one class is always certain.
    """

    name = "entropy"

    def _task_score(self, task, logits, features) -> Float[np.ndarray, " n"]:
        log_p = log_softmax(logits, axis=1)
        return np.sum(np.exp(log_p) * log_p, axis=1)


class WeightAligning(Raw):
    """Largest logit of heads with the same mean row norm; raises InputError if all rows are zero.

    Zhao et al., "Maintaining Discrimination and Fairness in Class Incremental Learning" (2020). The
    rows of task t, of mean norm n_t, are multiplied by the mean norm of all earlier aligned rows
    over n_t, which by induction is n_1 / n_t. Biases stay.
    """

    name = "wa"
    needs_linear = True

    def _head(self, head: Any, task: int, width: int, first: Any = None) -> Any:
        head = super()._head(head, task, width, first)
        if not _mean_norm(head):
            name = input_name("head weight", task)
            raise NotApplicable(f"{name}: all rows are zero; wa scales them")
        return head

    def _adjust(self, task: int, logits: Float[np.ndarray, "n c"]) -> Float[np.ndarray, "n c"]:
        head = self.heads[task]
        bias = np.asarray(head.bias, np.float64)
        return _mean_norm(self.heads[0]) / _mean_norm(head) * (logits - bias) + bias


class VirtualLogitMatching(Raw):
    """s_t = logsumexp_c z_{t,c} - alpha_t |R_t' (g - u_t)|: ViM as a task router.

    Wang et al., "ViM: Out-of-Distribution with Virtual-logit Matching" (2022) detect inputs that
    are unknown to one classifier; here every head has a detector, and the largest score chooses the
    task. u_t = -W_t^+ b_t is the head's origin, R_t are the eigenvectors of the *uncentred* second
    moment about u_t past the leading D, and alpha_t is the mean largest logit over the mean
    residual norm on the task's training features.

    D is the official 1000 for d >= 2048 and 512 for d >= 768, and d // 2 below, but at most half of
    n - 1 for n training images: with n <= D the training residual is zero and alpha_t infinite.
    """

    name = "vim"
    needs_linear = True

    def _collect(self, features, rows, head) -> tuple[np.ndarray, np.ndarray, float]:
        size, width = features.shape
        principal = 1000 if width >= 2048 else 512 if width >= 768 else width // 2
        weight, bias = (np.asarray(part, np.float64) for part in head)
        origin = -np.linalg.pinv(weight) @ bias
        shifted = features - origin
        _, vectors = np.linalg.eigh(shifted.T @ shifted / size)
        residual = vectors[:, : width - min(principal, (size - 1) // 2)]
        norm = float(np.linalg.norm(shifted @ residual, axis=1).mean())
        best = float(_logits(head, features).max(axis=1).mean())
        return origin, residual.astype(np.float32), best / max(norm, NORM_FLOOR)

    def _task_score(self, task, logits, features) -> Float[np.ndarray, " n"]:
        origin, residual, alpha = self.statistics[task]
        squares = squared_distances(features, origin[None], residual)
        return np.asarray(logsumexp(logits, axis=1)) - alpha * np.sqrt(squares[:, 0])


def _logits(head: Head, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n c"]:
    return head.logits(features).astype(np.float64)


def _mean_norm(head: LinearHead) -> float:
    return float(np.linalg.norm(np.asarray(head.weight, np.float64), axis=1).mean())
