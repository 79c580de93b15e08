"""Routers that read nothing but the heads' logits: the controls FDC has to beat.

All keep each head's local argmax as the class and differ in the score that picks the task. Logits
are computed in float32 at the highest matmul precision; moments are taken in float64 on the host,
where they cost nothing.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.special import log_softmax, logsumexp, softmax

from fdc_jax.calibration.accounting import BYTES
from fdc_jax.calibration.scores import Scores
from fdc_jax.calibration.seen_tasks import SeenTasks, head_logits
from fdc_jax.errors import InputError
from fdc_jax.heads import Head, LinearHead


class Raw:
    """Largest logit over all heads: s_t = max_c z_{t,c} (paper, Eq. raw). Stores nothing.

    The other methods of this file inherit its fitting and scoring and replace one step.
    """

    name = "raw"
    needs_linear_head = False

    def __init__(self):
        self._seen = SeenTasks(self.name, needs_head=True, needs_linear_head=self.needs_linear_head)

    def fit_task(
        self,
        adapted: object,
        labels: object,
        head: Head,
        pretrained: object = None,
        classes: object = None,
    ) -> None:
        """Takes one more task.

        Args:
            adapted: features [n, d] of the task's training images by the encoder of that time.
            labels: [n] integers.
            head: the task's head.
            pretrained: not read.
            classes: label of each row of the head; ascending distinct labels when None.

        Raises:
            InputError: see `SeenTasks.check`; nothing has changed then.
        """
        samples = self._seen.check(adapted, labels, head, pretrained, classes)
        logits = head_logits(head, samples.features, len(samples.classes), self.num_tasks)
        self._collect(head, logits)
        self._seen.remember(samples, head)

    def _collect(self, head: Head, logits: Float[np.ndarray, "n c"]) -> None:
        """Keeps what the method needs of a new task, given its logits on its own samples."""

    def replace_heads(self, heads: Sequence[Head]) -> None:
        """Predicts with other heads from now on; moments of logits stay those of fit time.

        Raises:
            InputError: not one head per task, or heads of another shape or type.
        """
        self._seen.heads = self._seen.check_heads(heads)

    def finalize(self) -> None:
        """Nothing remains to be done after the last task."""

    def score(self, adapted: object, pretrained: object = None) -> Scores:
        """Scores a batch [n, d] of adapted features; `pretrained` is not read."""
        features = self._seen.view_features(adapted, pretrained)
        logits = [
            self._adjust(task, head_logits(head, features, len(self._seen.classes[task]), task))
            for task, head in enumerate(self._seen.heads)
        ]
        return Scores(
            np.stack([self._task_score(task, z) for task, z in enumerate(logits)], axis=1),
            np.stack([z.argmax(axis=1) for z in logits], axis=1),
            tuple(self._seen.classes),
        )

    def _adjust(self, task: int, logits: Float[np.ndarray, "n c"]) -> Float[np.ndarray, "n c"]:
        """Changes the logits of a head before anything is read from them."""
        return logits

    def _task_score(self, task: int, logits: Float[np.ndarray, "n c"]) -> Float[np.ndarray, " n"]:
        return logits.max(axis=1)

    @property
    def num_tasks(self) -> int:
        """Number of fitted tasks."""
        return len(self._seen.classes)

    @property
    def storage_bytes(self) -> int:
        """Bytes beyond encoder and heads."""
        return 0


class LogitStandardisation(Raw):
    """s_t = (max_c z_{t,c} - mu_t) / max(sigma_t, 1e-12) (paper, Eq. logit-standardization).

    mu_t and sigma_t are the mean and the population standard deviation of the head's largest logit
    on its own training features at the time of the task. Two scalars per task. A task of one image
    has sigma 0 and is divided by 1e-12, as the equation says.
    """

    name = "ls"
    floor = 1e-12

    def __init__(self):
        super().__init__()
        self._moments: list[tuple[float, float]] = []

    def _collect(self, head: Head, logits: Float[np.ndarray, "n c"]) -> None:
        best = logits.max(axis=1).astype(np.float64)
        self._moments.append((float(best.mean()), float(best.std())))

    def _task_score(self, task: int, logits: Float[np.ndarray, "n c"]) -> Float[np.ndarray, " n"]:
        mean, std = self._moments[task]
        return (logits.max(axis=1).astype(np.float64) - mean) / max(std, self.floor)

    @property
    def storage_bytes(self) -> int:
        """Two scalars per task."""
        return 2 * BYTES * self.num_tasks


class _Tempered(Raw):
    def __init__(self, temperature: float = 1.0):
        if not temperature > 0:
            raise InputError(f"{self.name}: temperature: expected more than 0, found {temperature}")
        super().__init__()
        self.temperature = temperature


class Energy(_Tempered):
    """s_t = tau * log sum_c exp(z_{t,c} / tau), the negative energy of each head.

    Liu et al., "Energy-based Out-of-distribution Detection" (2020), applied to each head by itself.
    Tends to Raw as tau goes to 0.
    """

    name = "energy"

    def _task_score(self, task: int, logits: Float[np.ndarray, "n c"]) -> Float[np.ndarray, " n"]:
        wide = logits.astype(np.float64) / self.temperature
        return self.temperature * np.asarray(logsumexp(wide, axis=1))


class MaximumSoftmax(_Tempered):
    """s_t = max_c softmax_c(z_t / tau), the confidence of each head within its own classes.

    Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples"
    (2017); with tau other than 1, temperature scaling. A head of one class is always certain.
    """

    name = "msp"

    def _task_score(self, task: int, logits: Float[np.ndarray, "n c"]) -> Float[np.ndarray, " n"]:
        return softmax(logits.astype(np.float64) / self.temperature, axis=1).max(axis=1)


class NegativeEntropy(_Tempered):
    """s_t = sum_c p_c log p_c of p = softmax(z_t / tau): the head that hesitates least wins.

    The selection rule of entropy-based routers (the paper names GR-LoRA), here on heads that share
    one encoder. A head of one class is always certain.
    """

    name = "entropy"

    def _task_score(self, task: int, logits: Float[np.ndarray, "n c"]) -> Float[np.ndarray, " n"]:
        wide = logits.astype(np.float64) / self.temperature
        log_p = log_softmax(wide, axis=1)
        return np.sum(np.exp(log_p) * log_p, axis=1)


class WeightAligning(Raw):
    """Heads rescaled to one mean row norm (Zhao et al., "Maintaining Discrimination and Fairness in
    Class Incremental Learning", 2020). Weights alone, nothing stored.

    With n_t the mean Euclidean norm of the rows of W_t, two variants:

    - "sequential", the original: when task t arrives its rows are multiplied by
      (mean norm of all earlier rows, already aligned) / n_t; biases stay as they are.
    - "symmetric", for heads that are trained apart: every head's logits, weights and bias together,
      are divided by n_t, so that no task is the reference.

    By induction all aligned heads have the mean norm n_1; without biases both variants therefore
    choose alike.

    Raises:
        InputError: a head is not linear, or all its rows are zero.
    """

    name = "wa"
    needs_linear_head = True

    def __init__(self, variant: str = "sequential"):
        if variant not in ("sequential", "symmetric"):
            raise InputError(f"wa: variant: expected sequential or symmetric, found {variant!r}")
        super().__init__()
        self.variant = variant
        self._factors: list[float] = []
        # Row norms of all heads after alignment, and what is left to add to a rescaled bias.
        self._norms: list[Float[np.ndarray, " c"]] = []
        self._bias_left: list[Float[np.ndarray, " c"]] = []

    def replace_heads(self, heads: Sequence[Head]) -> None:
        """Aligns other heads instead, from the first on, and predicts with them.

        Raises:
            InputError: not one linear head per task, or all rows of one are zero.
        """
        heads = self._seen.check_heads(heads)
        aligned = WeightAligning(self.variant)
        for head in heads:
            aligned._align(head)
        self._factors, self._norms = aligned._factors, aligned._norms
        self._bias_left, self._seen.heads = aligned._bias_left, heads

    def _collect(self, head: Head, logits: Float[np.ndarray, "n c"]) -> None:
        self._align(head)

    def _align(self, head: Head) -> None:
        assert isinstance(head, LinearHead)
        norms = np.linalg.norm(np.asarray(head.weight, np.float64), axis=1)
        if not norms.any():
            raise InputError(f"wa: all rows of the head of task {len(self._factors)} are zero")
        factor = 1.0 / float(norms.mean())
        bias_left = np.zeros(len(norms))
        if self.variant == "sequential":
            factor *= float(np.concatenate(self._norms or [norms]).mean())
            bias_left = np.asarray(head.bias, np.float64) * (1.0 - factor)
        self._factors.append(factor)
        self._norms.append(norms * factor)
        self._bias_left.append(bias_left)

    def _adjust(self, task: int, logits: Float[np.ndarray, "n c"]) -> Float[np.ndarray, "n c"]:
        return self._factors[task] * logits.astype(np.float64) + self._bias_left[task]
