"""AnaCP: an analytic contrastive projection in front of a ridge classifier."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdc_jax.calibration import random_features
from fdc_jax.calibration.accounting import BYTES
from fdc_jax.calibration.scores import Scores
from fdc_jax.calibration.seen_tasks import SeenTasks
from fdc_jax.errors import InputError
from fdc_jax.heads import NORM_FLOOR, Head, unit


class AnaCP:
    """Ridge maps pull features towards spread-out class means; a ridge classifier reads the result.

    Momeni et al., "AnaCP: Toward Upper-Bound Continual Learning via Analytic Contrastive
    Projection" (2025). With x = g/|g|, class means m_c and a shared covariance S of x:

    1. Targets: centred class means times S^-1/2; their singular values plus 1; un-whitened;
       the centre added again; normalised.
    2. Each of several heads: z = gelu(x A'), A Gaussian D x d; ridge map from z to the target of
       the sample's class; outputs normalised, then averaged over heads.
    3. Classifier: Gaussian pseudo-features N(m_c, S) per class through step 2, then
       gelu(. B') with B Gaussian D x d and ridge regression to one-hot labels.

    Statistics of steps 1 and 2 accumulate over tasks; the maps are solved in `finalize`. Variants:

    - "corrected": S is the pooled scatter over the sample count, plus 1e-4 I; un-whitening
      multiplies by S^1/2.
    - "released", as the authors' code runs: un-whitening multiplies by S^-1/2 again; when a task
      arrives the old covariance is weighted by a count that already includes the task; the 1e-4 I
      is added to the first task's covariance alone.

    Neither variant adds 1 to the singular value that is zero because the means are centred, as the
    released code does: that would move all targets along a direction made of rounding errors. Step
    3 samples, so scores depend on the seed.

    Args:
        view: "adapted" or "pretrained"; the method is meant for features that do not move.
        variant: one of the two above.
        projections: D. The default takes 0.6 GB of host memory while fitting.
        heads: number of maps in step 2.
        ridge: regularisation of both steps.
        samples_per_class: pseudo-features in step 3.
        seed: of the random matrices and the pseudo-features.

    Raises:
        InputError: an argument outside its range.
    """

    name = "anacp"
    jitter = 1e-4

    def __init__(
        self,
        view: str = "adapted",
        variant: str = "corrected",
        projections: int = 5_000,
        heads: int = 3,
        ridge: float = 100.0,
        samples_per_class: int = 100,
        seed: int = 0,
    ):
        if variant not in ("corrected", "released"):
            raise InputError(f"anacp: variant: expected corrected or released, found {variant!r}")
        if min(projections, heads, samples_per_class) < 1 or not ridge > 0:
            raise InputError(
                "anacp: expected projections, heads and samples_per_class of at least 1 and ridge "
                f"above 0; found {projections}, {heads}, {samples_per_class}, {ridge}"
            )
        if seed < 0:
            raise InputError(f"anacp: seed: expected a whole number from 0, found {seed}")
        self.variant = variant
        self.projections = projections
        self.ridge = ridge
        self.samples_per_class = samples_per_class
        self._seed = seed
        self._seen = SeenTasks(self.name, view)
        self._num_heads = heads
        self._inner: list[Float[Array, "d m"]] = []
        self._outer: Float[Array, "d m"] | None = None
        self._grams = [np.zeros((projections, projections)) for _ in range(heads)]
        # Per task and head: sums of z over each class.
        self._sums: list[list[Float[np.ndarray, "m c"]]] = [[] for _ in range(heads)]
        self._counts: list[Int[np.ndarray, " c"]] = []
        self._means: list[Float[np.ndarray, "c d"]] = []
        self._covariance: Float[np.ndarray, "d d"] | None = None
        self._solved: tuple[list[Float[Array, "m d"]], Float[Array, "m classes"]] | None = None

    def fit_task(
        self,
        adapted: object,
        labels: object,
        head: Head | None = None,
        pretrained: object = None,
        classes: object = None,
    ) -> None:
        """Adds one more task to the statistics of steps 1 and 2.

        Takes and raises what `NearestClassMean.fit_task` does.
        """
        samples = self._seen.check(adapted, labels, head, pretrained, classes)
        width = samples.features.shape[1]
        if self._outer is None:
            random = np.random.default_rng(self._seed)
            matrices = [
                random_features.gaussian_matrix(random, width, self.projections)
                for _ in range(self._num_heads + 1)
            ]
            self._inner, self._outer = matrices[:-1], matrices[-1]
        wide = samples.features.astype(np.float64)
        wide /= np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), NORM_FLOOR)
        onehot = np.eye(len(samples.classes), dtype=np.float32)[samples.rows]
        counts = np.bincount(samples.rows, minlength=len(samples.classes))
        means = onehot.T.astype(np.float64) @ wide / np.maximum(counts, 1)[:, None]
        within = wide - means[samples.rows]
        self._add_covariance(within.T @ within, len(wide))
        features = wide.astype(np.float32)
        for index, matrix in enumerate(self._inner):
            sums = np.zeros((self.projections, len(samples.classes)))
            for part, labels_part in random_features.expanded_parts(
                features, onehot, matrix, "gelu"
            ):
                gram, cross = random_features.moments(part, jnp.asarray(labels_part))
                self._grams[index] += np.asarray(gram)
                sums += np.asarray(cross)
            self._sums[index].append(sums)
        self._counts.append(counts)
        self._means.append(means)
        self._solved = None
        self._seen.remember(samples, head)

    def _add_covariance(self, scatter: Float[np.ndarray, "d d"], size: int) -> None:
        earlier = int(sum(counts.sum() for counts in self._counts))
        if self._covariance is None:
            self._covariance = scatter / size
            if self.variant == "released":
                self._covariance = self._covariance + self.jitter * np.eye(len(scatter))
            return
        weight = earlier + (size if self.variant == "released" else 0)
        self._covariance = (self._covariance * weight + scatter) / (weight + size)

    def finalize(self) -> None:
        """Solves for the maps and the classifier. More tasks may follow, then finalize again."""
        if self._solved is not None or self._covariance is None or self._outer is None:
            return
        covariance = self._covariance
        if self.variant == "corrected":
            covariance = covariance + self.jitter * np.eye(len(covariance))
        seen = np.concatenate(self._counts) > 0
        means = np.concatenate(self._means)
        targets = np.zeros_like(means)
        targets[seen] = self._spread(means[seen], covariance)
        maps = [
            jnp.asarray(
                random_features.solve_ridge(
                    gram, self.ridge, np.concatenate(sums, axis=1) @ targets
                ),
                jnp.float32,
            )
            for gram, sums in zip(self._grams, self._sums, strict=True)
        ]
        random = np.random.default_rng([self._seed, 1])
        root = np.linalg.cholesky(covariance)
        gram = np.zeros((self.projections, self.projections))
        cross = np.zeros((self.projections, len(means)))
        for c in np.flatnonzero(seen):
            noise = random.standard_normal((self.samples_per_class, len(root))) @ root.T
            pseudo = jnp.asarray(means[c] + noise, jnp.float32)
            expanded = _pulled(pseudo, self._inner, maps, self._outer)
            part, total = random_features.moments(expanded, jnp.ones((len(noise), 1)))
            gram += np.asarray(part)
            cross[:, c] = np.asarray(total)[:, 0]
        self._solved = (
            maps,
            jnp.asarray(random_features.solve_ridge(gram, self.ridge, cross), jnp.float32),
        )

    def _spread(
        self, means: Float[np.ndarray, "c d"], covariance: Float[np.ndarray, "d d"]
    ) -> Float[np.ndarray, "c d"]:
        values, vectors = np.linalg.eigh(covariance)
        root = np.sqrt(np.maximum(values, 0.0) + 1e-8)
        whiten = (vectors / root) @ vectors.T
        centre = means.mean(axis=0)
        left, singular, right = np.linalg.svd((means - centre) @ whiten, full_matrices=False)
        # Centred means span one dimension less than their number; the direction that the
        # decomposition adds to fill up is rounding noise.
        spanned = singular > len(means) * np.finfo(np.float64).eps * singular[0]
        spread = (left * (singular + spanned)) @ right
        back = whiten if self.variant == "released" else (vectors * root) @ vectors.T
        targets = spread @ back + centre
        return targets / np.maximum(np.linalg.norm(targets, axis=1, keepdims=True), NORM_FLOOR)

    def score(self, adapted: object, pretrained: object = None) -> Scores:
        """Scores a batch [n, d] of the method's view."""
        features = self._seen.view_features(adapted, pretrained)
        self.finalize()
        assert self._solved is not None and self._outer is not None
        maps, weight = self._solved
        parts = [
            np.asarray(
                _scores(
                    features[start : start + random_features.ROWS],
                    self._inner,
                    maps,
                    self._outer,
                    weight,
                )
            )
            for start in range(0, max(len(features), 1), random_features.ROWS)
        ]
        scores = np.concatenate(parts)
        scores[:, np.concatenate(self._counts) == 0] = -np.inf
        return self._seen.scores(scores)

    @property
    def storage_bytes(self) -> int:
        """Gram matrices and class sums of the maps, class means, covariance; float32."""
        size, width, classes = self.projections, self._seen.width, self._seen.num_classes
        maps = self._num_heads * size * (size + classes)
        return BYTES * (maps + classes * (width + 1) + width * width)


@jax.jit
def _pulled(
    features: Float[Array, "n d"],
    inner: list[Float[Array, "d m"]],
    maps: list[Float[Array, "m d"]],
    outer: Float[Array, "d m"],
) -> Float[Array, "n m"]:
    """Step 2 and the random features of step 3."""
    highest = jax.lax.Precision.HIGHEST
    outputs = [
        unit(jnp.matmul(random_features.expand(features, matrix, "gelu"), theta, precision=highest))
        for matrix, theta in zip(inner, maps, strict=True)
    ]
    return random_features.expand(sum(outputs) / len(outputs), outer, "gelu")


@jax.jit
def _scores(
    features: Float[Array, "n d"],
    inner: list[Float[Array, "d m"]],
    maps: list[Float[Array, "m d"]],
    outer: Float[Array, "d m"],
    weight: Float[Array, "m classes"],
) -> Float[Array, "n classes"]:
    pulled = _pulled(unit(features), inner, maps, outer)
    return jnp.matmul(pulled, weight, precision=jax.lax.Precision.HIGHEST)
