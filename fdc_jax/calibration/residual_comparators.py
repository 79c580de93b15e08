"""Residual norms against logits: ViM, the nearest relative of RLC among detectors.

Eigenvectors come from a float64 decomposition on the host; residuals are float32 products at the
highest matmul precision under `jax.jit`.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.special import logsumexp

from fdc_jax.calibration.accounting import BYTES
from fdc_jax.calibration.gaussian_comparators import squared_distances
from fdc_jax.calibration.scores import Scores
from fdc_jax.calibration.seen_tasks import SeenTasks, head_logits
from fdc_jax.errors import InputError
from fdc_jax.heads import NORM_FLOOR, Head, LinearHead


class VirtualLogitMatching:
    """s_t = logsumexp_c z_{t,c} - alpha_t |R_t' (g - u_t)|: ViM as a task router.

    Wang et al., "ViM: Out-of-Distribution with Virtual-logit Matching" (2022), one detector per
    head. u_t = -W_t^+ b_t is the head's origin, R_t the eigenvectors of the *uncentred* second
    moment about u_t past the leading D, alpha_t the mean largest logit over the mean residual norm
    on the task's training features. Which head wins is our use of it: ViM itself tells known from
    unknown for a single classifier. The class is the head's local argmax.

    D defaults to the official 1000 for d >= 2048 and 512 for d >= 768, and to d // 2 below. Never
    more than half of the task's n - 1 directions are taken: with n <= D the training residual is
    zero and alpha_t infinite, which small tasks (about 470 images in CUB-200) would otherwise meet.

    Args:
        principal: D, or None for the rule above.

    Raises:
        InputError: D is not below the feature width, or a head is not linear.
    """

    name = "vim"

    def __init__(self, principal: int | None = None):
        if principal is not None and principal < 1:
            raise InputError(f"vim: principal: expected at least 1, found {principal}")
        self.principal = principal
        self._seen = SeenTasks(self.name, needs_linear_head=True)
        self._origins: list[Float[np.ndarray, " d"]] = []
        self._residuals: list[Float[np.ndarray, "d r"]] = []
        self._alphas: list[float] = []

    def fit_task(
        self,
        adapted: object,
        labels: object,
        head: Head,
        pretrained: object = None,
        classes: object = None,
    ) -> None:
        """Takes the residual space of one more task.

        Takes what `Raw.fit_task` does.

        Raises:
            InputError: see `SeenTasks.check`; or D is not below the feature width.
        """
        samples = self._seen.check(adapted, labels, head, pretrained, classes)
        assert isinstance(head, LinearHead)
        wide = samples.features.astype(np.float64)
        size, width = wide.shape
        principal = self.principal or (
            1000 if width >= 2048 else 512 if width >= 768 else width // 2
        )
        if principal >= width:
            raise InputError(f"vim: principal: expected less than width {width}, found {principal}")
        principal = min(principal, (size - 1) // 2)
        weight, bias = (np.asarray(part, np.float64) for part in head)
        origin = -np.linalg.pinv(weight) @ bias
        shifted = wide - origin
        _, vectors = np.linalg.eigh(shifted.T @ shifted / size)
        residual = vectors[:, : width - principal]
        logits = head_logits(head, samples.features, len(samples.classes), len(self._alphas))
        mean_norm = float(np.linalg.norm(shifted @ residual, axis=1).mean())
        self._origins.append(origin)
        self._residuals.append(residual.astype(np.float32))
        self._alphas.append(float(logits.max(axis=1).mean()) / max(mean_norm, NORM_FLOOR))
        self._seen.remember(samples, head)

    def replace_heads(self, heads: Sequence[Head]) -> None:
        """Takes logits from other heads from now on; u_t, R_t and alpha_t stay those of fit time.

        Raises:
            InputError: not one linear head per task, or heads of another shape.
        """
        self._seen.heads = self._seen.check_heads(heads)

    def finalize(self) -> None:
        """Nothing remains to be done after the last task."""

    def score(self, adapted: object, pretrained: object = None) -> Scores:
        """Scores a batch [n, d] of adapted features; `pretrained` is not read."""
        features = self._seen.view_features(adapted, pretrained)
        task_scores, local = [], []
        for task, head in enumerate(self._seen.heads):
            logits = head_logits(head, features, len(self._seen.classes[task]), task)
            squares = squared_distances(features, self._origins[task][None], self._residuals[task])
            virtual = self._alphas[task] * np.sqrt(squares[:, 0])
            energy = np.asarray(logsumexp(logits.astype(np.float64), axis=1))
            task_scores.append(energy - virtual)
            local.append(logits.argmax(axis=1))
        return Scores(
            np.stack(task_scores, axis=1), np.stack(local, axis=1), tuple(self._seen.classes)
        )

    @property
    def storage_bytes(self) -> int:
        """Per task the residual basis, the origin and alpha."""
        return BYTES * sum(basis.size + len(basis) + 1 for basis in self._residuals)
