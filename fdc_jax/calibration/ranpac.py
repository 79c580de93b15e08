"""RanPAC: ridge regression on random features, class by class and without gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fdc_jax.calibration import random_features
from fdc_jax.calibration.accounting import BYTES
from fdc_jax.calibration.scores import Scores
from fdc_jax.calibration.seen_tasks import SeenTasks
from fdc_jax.errors import InputError
from fdc_jax.heads import Head, unit


class RanPAC:
    """Ridge regression to one-hot labels on h = relu(g R), with R a Gaussian d x M matrix.

    McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual Learning"
    (2023). G += h'h and Q += h'Y over tasks; W = (G + lambda I)^-1 Q. After every task lambda is
    the one of 10^-8 .. 10^8 with the least squared error on the last 20 % of the task's samples
    after a fit to the first 80 %; samples are shuffled first, since sorted ones would leave whole
    classes out of the fit. The last task's lambda holds. A task of one sample keeps the previous
    one, at the start 1. A class without samples is never predicted.

    Lambda is raised to the float32 machine epsilon times the trace of G where it is below: with
    fewer samples than M, rounding makes eigenvalues of that size out of zeros. The float32 codes
    meet the same errors in their validation and so avoid such a lambda; ours validates in float64.

    Variants of the class score:

    - "original": h W.
    - "pilot", the port in PILOT, which scores through a cosine layer: the cosine of h and each
      column of W.

    Args:
        view: "adapted" or "pretrained".
        variant: one of the two above.
        projections: M. The paper's 10,000 takes 0.8 GB of host memory while fitting.
        seed: of R and of the shuffles.

    Raises:
        InputError: an argument outside its range.
    """

    name = "ranpac"

    def __init__(
        self,
        view: str = "adapted",
        variant: str = "original",
        projections: int = 10_000,
        seed: int = 0,
    ):
        if variant not in ("original", "pilot"):
            raise InputError(f"ranpac: variant: expected original or pilot, found {variant!r}")
        if projections < 1:
            raise InputError(f"ranpac: projections: expected at least 1, found {projections}")
        if seed < 0:
            raise InputError(f"ranpac: seed: expected a whole number from 0, found {seed}")
        self.variant = variant
        self.projections = projections
        self.ridge = 1.0
        self._random = np.random.default_rng(seed)
        self._seen = SeenTasks(self.name, view)
        self._projection: Float[Array, "d m"] | None = None
        self._gram = np.zeros((projections, projections))
        self._targets: list[Float[np.ndarray, "m c"]] = []
        self._present: list[Bool[np.ndarray, " c"]] = []
        self._weight: Float[Array, "m classes"] | None = None

    def fit_task(
        self,
        adapted: object,
        labels: object,
        head: Head | None = None,
        pretrained: object = None,
        classes: object = None,
    ) -> None:
        """Adds one more task to G and Q and chooses lambda.

        Takes and raises what `NearestClassMean.fit_task` does.
        """
        samples = self._seen.check(adapted, labels, head, pretrained, classes)
        if self._projection is None:
            self._projection = random_features.gaussian_matrix(
                self._random, samples.features.shape[1], self.projections
            )
        order = self._random.permutation(len(samples.rows))
        features, rows = samples.features[order], samples.rows[order]
        onehot = np.eye(len(samples.classes), dtype=np.float32)[rows]
        target = np.zeros((self.projections, len(samples.classes)))
        expanded = []
        for part, labels_part in random_features.expanded_parts(
            features, onehot, self._projection, "relu"
        ):
            gram, cross = random_features.moments(part, jnp.asarray(labels_part))
            self._gram += np.asarray(gram)
            target += np.asarray(cross)
            expanded.append(np.asarray(part))
        split = int(0.8 * len(rows))
        if split > 0:
            self.ridge = random_features.best_ridge(np.concatenate(expanded), onehot, split)
        floor = float(np.finfo(np.float32).eps * np.trace(self._gram))
        self.ridge = max(self.ridge, floor)
        self._targets.append(target)
        self._present.append(np.bincount(rows, minlength=len(samples.classes)) > 0)
        self._weight = None
        self._seen.remember(samples, head)

    def finalize(self) -> None:
        """Solves for W. More tasks may follow, then finalize again."""
        if self._weight is None and self._targets:
            weight = random_features.solve_ridge(
                self._gram, self.ridge, np.concatenate(self._targets, axis=1)
            )
            self._weight = jnp.asarray(weight, jnp.float32)

    def score(self, adapted: object, pretrained: object = None) -> Scores:
        """Scores a batch [n, d] of the method's view."""
        features = self._seen.view_features(adapted, pretrained)
        self.finalize()
        assert self._projection is not None
        parts = [
            np.asarray(
                _scores(
                    features[start : start + random_features.ROWS],
                    self._projection,
                    self._weight,
                    self.variant == "pilot",
                )
            )
            for start in range(0, max(len(features), 1), random_features.ROWS)
        ]
        scores = np.concatenate(parts)
        scores[:, ~np.concatenate(self._present)] = -np.inf
        return self._seen.scores(scores)

    @property
    def storage_bytes(self) -> int:
        """G and Q in float32; R is regenerated from its seed."""
        return BYTES * self.projections * (self.projections + self._seen.num_classes)


@partial(jax.jit, static_argnames="cosine")
def _scores(
    features: Float[Array, "n d"],
    projection: Float[Array, "d m"],
    weight: Float[Array, "m classes"],
    cosine: bool,
) -> Float[Array, "n classes"]:
    expanded, rows = random_features.expand(features, projection, "relu"), weight.T
    if cosine:
        expanded, rows = unit(expanded), unit(rows)
    return jnp.matmul(expanded, rows.T, precision=jax.lax.Precision.HIGHEST)
