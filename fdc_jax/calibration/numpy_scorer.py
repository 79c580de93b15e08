"""FDC scores from a saved calibrator with NumPy alone: this file needs nothing beside it.

It may be copied next to a deployed model. Example:

    scorer = NumpyScorer.load("calibrator.npz")
    result = scorer.score(adapted_features, pretrained_features)
    result.label
"""

import zipfile
import zlib
from typing import NamedTuple

import numpy as np

FORMAT = "fdc_jax calibrator"
SCHEMA = 2
NORM_FLOOR = 1e-12
ENERGY_FLOOR = 1e-12
SCALE_FLOOR = 1e-6
LEAST_UNIT = 0.1
_PAPER_AFFINITY = {
    "affinity_metric": np.array("cosine"),
    "affinity_evidence": np.array("tanh"),
    "affinity_scope": np.array("task"),
    "affinity_shrinkage": np.array(0.05),
}
# Kinds of heads whose rows are used as they are, with a bias. All but linear ones see h/|h|.
WITH_BIAS = ("linear", "normalised_linear")


class NumpyScores(NamedTuple):
    """Scores of one batch.

    Attributes:
        task_scores: calibrated score per sample and task, [n, tasks].
        local_class: row of each task's head that the task would predict, [n, tasks].
        task: the chosen task, counted from 0, [n].
        label: the predicted label, [n].
    """

    task_scores: np.ndarray
    local_class: np.ndarray
    task: np.ndarray
    label: np.ndarray


class NumpyScorer:
    """Scores features with the statistics of a finalized calibrator.

    Args:
        arrays: the fields of a saved calibrator, by name.

    Raises:
        ValueError: the fields are of another format or schema, one is missing, of another shape or
            not finite, or the heads are functions, which are not stored.
    """

    def __init__(self, arrays):
        if str(arrays.get("format")) != FORMAT:
            raise ValueError(f"format: expected {FORMAT!r}, found {arrays.get('format')!s:.80}")
        schema = int(_field(arrays, "schema", ()))
        if not 1 <= schema <= SCHEMA:
            raise ValueError(f"schema: expected version 1 to {SCHEMA}, found {schema}")
        # What version 1 had not.
        arrays = {**_PAPER_AFFINITY, **arrays}
        _check_fields(arrays)
        self.arrays = arrays
        self.width = arrays["adapted_mean"].shape[1]
        self.sizes = arrays["class_sizes"].tolist()
        self.views = ["adapted"] + ["pretrained"] * ("pretrained_mean" in arrays)
        self._tasks = {view: self._split(view) for view in self.views}
        self._prototypes = {}
        if str(arrays["affinity_metric"]) == "whitened":
            self._prototypes = {view: self._whitened_prototypes(view) for view in self.views}
        self._heads = self._split_heads()

    @classmethod
    def load(cls, path):
        """Returns a scorer for the calibrator saved at `path`.

        Raises:
            ValueError: the file is damaged or no saved calibrator; the message names the field.
            OSError: the file cannot be read.
        """
        name = "archive"
        arrays = {}
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):
                raise ValueError(f"{path}: archive: damaged, or no .npz file at all")
            file.seek(0)
            try:
                with np.load(file, allow_pickle=False) as archive:
                    for name in archive.files:
                        arrays[name] = archive[name]
            except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
                raise ValueError(f"{path}: {name}: damaged: {error}") from error
        try:
            return cls(arrays)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def score(
        self,
        adapted,
        pretrained=None,
        tsf=True,
        rlc=True,
        pac=True,
        adapted_view=True,
        pretrained_view=True,
    ):
        """Returns `NumpyScores` of features E_T(x), [n, d], and E_0(x), [n, e].

        The flags switch components off. The pretrained features may be left out when the calibrator
        has no such view or does not use it.

        Raises:
            ValueError: features of another shape than at fit time, not finite, or so large that
                their squared length is not finite in float32.
        """
        arrays = self.arrays
        adapted = self._checked("adapted", adapted)
        used = {"adapted": adapted_view, "pretrained": pretrained_view}
        features = {"adapted": adapted}
        if pretrained is not None:
            features["pretrained"] = self._checked("pretrained", pretrained)
            if len(pretrained) != len(adapted):
                raise ValueError(
                    f"pretrained features: expected {len(adapted)} rows, found {len(pretrained)}"
                )
        tasks = range(len(self.sizes))
        logits = [self._logits(task, adapted, tsf) for task in tasks]
        by_class = pac and str(arrays["affinity_scope"]) == "class"
        scale = arrays["filtered_scale" if tsf else "raw_scale"].astype(np.float32)
        correction = np.zeros((len(adapted), len(logits)), np.float32)
        closeness = [np.float32(0.0) for _ in tasks]
        corrected = False
        for view in self.views:
            weight = float(arrays[f"{view}_view_weight"])
            if not used[view] or weight == 0.0 or not (rlc or pac):
                continue
            if view not in features:
                raise ValueError(f"{view} features: expected, since the calibrator uses them")
            corrected = True
            if pac:
                up = np.float32(weight * float(arrays["pac_weight"]))
                for task, found in enumerate(self._affinity(view, features[view])):
                    if by_class:
                        closeness[task] = closeness[task] + up * found
                    else:
                        correction[:, task] += up * scale[task] * found[:, 0]
            if rlc:
                down = np.float32(weight * float(arrays["rlc_weight"]))
                correction -= down * scale * self._residual_evidence(view, features[view])
        scores = np.zeros(correction.shape, np.float32)
        local = np.zeros(correction.shape, np.int64)
        for task in tasks:
            each = logits[task]
            if by_class and corrected:
                unit = max(scale[task], np.float32(LEAST_UNIT) * scale.mean())
                each = (each + correction[:, task, None]) / unit + closeness[task]
            local[:, task] = each.argmax(axis=1)
            scores[:, task] = each.max(axis=1)
        if not (by_class and corrected):
            scores += correction
        task = scores.argmax(axis=1)
        first = np.cumsum([0, *self.sizes[:-1]])
        label = arrays["classes"][first[task] + local[np.arange(len(task)), task]]
        return NumpyScores(scores, local, task, label)

    def _split(self, view):
        """Returns (mean, basis, centre, offsets, constants) per task; see `_evidence`."""
        arrays = self.arrays
        bases = np.split(arrays[f"{view}_basis"], np.cumsum(arrays[f"{view}_rank"])[:-1])
        ends = np.cumsum(self.sizes)[:-1]
        prototypes = np.split(arrays[f"{view}_prototypes"].astype(np.float64), ends)
        tasks = []
        for task, counts in enumerate(np.split(arrays["class_counts"], ends)):
            rows = prototypes[task][counts > 0]
            centre = rows.mean(axis=0).astype(np.float32)
            offsets = rows - centre
            # A prototype of length zero has cosine 0 to everything, that is distance 1.
            constants = 0.5 * (offsets**2).sum(axis=1) + 0.5 * (1.0 - rows.any(axis=1))
            tasks.append(
                (
                    arrays[f"{view}_mean"][task],
                    bases[task],
                    centre,
                    offsets.astype(np.float32),
                    constants.astype(np.float32),
                )
            )
        return tasks

    def _split_heads(self):
        """Returns (rows, filtered rows, bias) per task, scaled so that they give the logits."""
        arrays, kind = self.arrays, str(self.arrays["head_kind"])
        gamma = np.float32(arrays["attenuation"])
        ends = np.cumsum(self.sizes)[:-1]
        heads = []
        for task, rows in enumerate(np.split(arrays["head_weight"], ends)):
            bias = np.zeros(len(rows), np.float32)
            if kind in WITH_BIAS:
                bias = np.split(arrays["head_bias"], ends)[task]
            else:
                norms = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
                rows = (rows / np.maximum(norms, NORM_FLOOR)).astype(np.float32)
            if kind == "cosine":
                rows = arrays["head_scale"][task] * rows
            if kind == "nearest_mean":
                rows, bias = 2 * rows, bias - 2
            basis = self._tasks["adapted"][task][1]
            heads.append((rows, (1 - gamma) * rows + gamma * (rows @ basis.T) @ basis, bias))
        return heads

    def _logits(self, task, features, tsf):
        rows, folded, bias = self._heads[task]
        logits = features @ (folded if tsf else rows).T
        if str(self.arrays["head_kind"]) != "linear":
            energy = np.square(features).sum(axis=1)
            if tsf:
                inside = np.square(features @ self._tasks["adapted"][task][1].T).sum(axis=1)
                kept = np.square(1 - np.float32(self.arrays["attenuation"]))
                energy = kept * energy + (1 - kept) * inside
            logits = logits / np.maximum(np.sqrt(energy), NORM_FLOOR)[:, None]
        return logits + bias

    def _residual_evidence(self, view, features):
        """Returns tanh of the RLC argument, [n, tasks]."""
        arrays = self.arrays
        ratios = []
        for mean, basis, *_ in self._tasks[view]:
            centred = features - mean
            energy = np.square(centred).sum(axis=1)
            inside = np.square(centred @ basis.T).sum(axis=1)
            ratios.append(np.maximum(energy - inside, 0) / np.maximum(energy, ENERGY_FLOOR))
        ratio = np.stack(ratios, axis=1)
        if not arrays[f"{view}_foreign_fit"].size:
            return np.zeros_like(ratio)
        mean, variance, tau = arrays[f"{view}_foreign_fit"]
        residual = (ratio - arrays[f"{view}_residual_mean"]) / arrays[f"{view}_residual_std"]
        log_ratio = residual**2 - (residual - mean) ** 2 / variance - np.log(variance)
        return np.tanh(0.5 * log_ratio / tau).astype(np.float32)

    def _affinity(self, view, features):
        """Returns the affinity evidence of each task: [n, 1], or [n, classes] in class scope."""
        if self._prototypes:
            found = self._whitened_affinity(view, features)
        else:
            found = [column[:, None] for column in self._cosine_affinity(view, features).T]
        if str(self.arrays["affinity_evidence"]) == "tanh":
            found = [np.tanh(each) for each in found]
        return [each.astype(np.float32) for each in found]

    def _cosine_affinity(self, view, features):
        arrays = self.arrays
        norm = np.sqrt(np.square(features).sum(axis=1))
        unit = features / np.maximum(norm, NORM_FLOOR)[:, None]
        neighbours = int(arrays["neighbours"])
        distances = []
        for _, _, centre, offsets, constants in self._tasks[view]:
            centred = unit - centre
            half = 0.5 * np.square(centred).sum(axis=1)
            distance = half[:, None] + constants - centred @ offsets.T
            nearest = np.sort(distance, axis=1)[:, :neighbours]
            # The cosine of a zero feature to everything is 0.
            distances.append(np.where(norm >= NORM_FLOOR, nearest.mean(axis=1), np.float32(1)))
        distance = np.stack(distances, axis=1)
        if str(arrays["affinity_reference"]) == "nearest":
            std = np.maximum(distance.std(axis=1, keepdims=True), SCALE_FLOOR)
            return (distance.mean(axis=1, keepdims=True) - distance) / std
        return (arrays[f"{view}_distance_mean"] - distance) / arrays[f"{view}_distance_std"]

    def _whitened_prototypes(self, view):
        """Returns the origin, the whitening map, and per task the unit prototypes, in float64."""
        arrays = self.arrays
        means = arrays[f"{view}_class_means"].astype(np.float64)
        width = means.shape[1]
        scatter = np.zeros((width, width))
        scatter[np.triu_indices(width)] = arrays[f"{view}_within_scatter"]
        scatter += np.triu(scatter, 1).T
        variance = np.trace(scatter) / width
        scatter /= variance if variance > 0 else 1.0
        factor = np.linalg.cholesky(scatter + arrays["affinity_shrinkage"] * np.eye(width))
        whitener = np.linalg.inv(factor)
        present = arrays["class_counts"] > 0
        # A single class is not its own origin.
        origin = means[present].mean(axis=0) * (present.sum() > 1)
        directions = _directions(means, origin, whitener)
        directions[~present] = np.nan
        return origin, whitener, np.split(directions, np.cumsum(self.sizes)[:-1])

    def _whitened_affinity(self, view, features):
        arrays = self.arrays
        origin, whitener, prototypes = self._prototypes[view]
        mean, std = arrays[f"{view}_cosine_mean"], arrays[f"{view}_cosine_std"]
        if str(arrays["affinity_reference"]) == "pooled":
            mean, std = np.full_like(mean, mean.mean()), np.full_like(std, std.mean())
        directions = _directions(features.astype(np.float64), origin, whitener)
        found = []
        for task, each in enumerate(prototypes):
            cosines = directions @ each.T
            # Classes without an image have no prototype.
            cosines = np.where(np.isnan(cosines), -np.inf, cosines)
            if str(arrays["affinity_scope"]) == "task":
                cosines = cosines.max(axis=1, keepdims=True)
            found.append((cosines - mean[task]) / std[task])
        return found

    def _checked(self, view, features):
        if view not in self.views:
            raise ValueError(f"{view} features: the calibrator has no such view")
        features = np.asarray(features)
        width = self.arrays[f"{view}_mean"].shape[1]
        if features.ndim != 2 or features.shape[1] != width:
            raise ValueError(
                f"{view} features: expected shape [n, {width}], found {[*features.shape]}"
            )
        if features.dtype.kind in "bcOSUMm":
            raise ValueError(f"{view} features: expected real numbers, found {features.dtype}")
        with np.errstate(over="ignore", invalid="ignore"):
            features = features.astype(np.float32)
            finite = np.isfinite(np.einsum("nd,nd->n", features, features))
        if not finite.all():
            row = int(np.argmin(finite))
            raise ValueError(f"{view} features: row {row} is not finite, or too large for float32")
        return features


def _directions(vectors, origin, whitener):
    """Returns whitened differences from the origin over their length; zero at the origin."""
    whitened = (vectors - origin) @ whitener.T
    norm = np.linalg.norm(whitened, axis=1, keepdims=True)
    return whitened / np.maximum(norm, NORM_FLOOR)


def _field(arrays, name, shape, kind="iu"):
    """Returns a field after a check of its shape (None: any size) and of its finiteness."""
    if name not in arrays:
        raise ValueError(f"{name}: missing")
    found = np.asarray(arrays[name])
    fits = found.ndim == len(shape) and all(
        expected in (None, size) for expected, size in zip(shape, found.shape, strict=True)
    )
    if not fits or found.dtype.kind not in kind:
        expected = ["any" if size is None else size for size in shape]
        raise ValueError(
            f"{name}: expected shape {expected}, found {found.dtype} of shape {[*found.shape]}"
        )
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise ValueError(f"{name}: holds values that are not finite")
    return found


def _check_fields(arrays):
    """Raises ValueError unless all fields that scoring reads are there and fit each other."""
    for name in ("attenuation", "rlc_weight", "pac_weight"):
        _field(arrays, name, (), "f")
    neighbours = int(_field(arrays, "neighbours", ()))
    known = {
        "affinity_metric": ("cosine", "whitened"),
        "affinity_evidence": ("tanh", "linear"),
        "affinity_reference": ("own", "nearest", "pooled"),
        "affinity_scope": ("task", "class"),
    }
    for name, words in known.items():
        if (found := str(_field(arrays, name, (), "U"))) not in words:
            raise ValueError(f"{name}: expected one of {', '.join(words)}, found {found!r}")
    whitened = str(arrays["affinity_metric"]) == "whitened"
    if float(_field(arrays, "affinity_shrinkage", (), "f")) <= 0:
        raise ValueError("affinity_shrinkage: expected a number above 0")
    sizes = _field(arrays, "class_sizes", (None,))
    tasks, rows = len(sizes), int(sizes.sum())
    if tasks == 0 or sizes.min() < 1:
        raise ValueError("class_sizes: expected a task, and a class in each")
    _field(arrays, "classes", (rows,))
    counts = np.split(_field(arrays, "class_counts", (rows,)), np.cumsum(sizes)[:-1])
    fewest = min(int((each > 0).sum()) for each in counts)
    if fewest < 1:
        raise ValueError("class_counts: expected a class with samples in every task")
    if not 1 <= neighbours <= fewest:
        raise ValueError(f"neighbours: expected 1 to {fewest}, found {neighbours}")
    names = ["raw_scale", "filtered_scale"]
    moments = ("residual_mean", "residual_std", "distance_mean", "distance_std")
    views = ["adapted"] + ["pretrained"] * ("pretrained_mean" in arrays)
    for view in views:
        names += [f"{view}_{moment}" for moment in moments]
        _field(arrays, f"{view}_view_weight", (), "f")
        width = _field(arrays, f"{view}_mean", (tasks, None), "f").shape[1]
        ranks = _field(arrays, f"{view}_rank", (tasks,))
        if ranks.min() < 0:
            raise ValueError(f"{view}_rank: expected counts from 0")
        _field(arrays, f"{view}_basis", (int(ranks.sum()), width), "f")
        _field(arrays, f"{view}_prototypes", (rows, width), "f")
        if whitened:
            names += [f"{view}_cosine_mean", f"{view}_cosine_std"]
            _field(arrays, f"{view}_class_means", (rows, width), "f")
            _field(arrays, f"{view}_within_scatter", (width * (width + 1) // 2,), "f")
        fit = _field(arrays, f"{view}_foreign_fit", (0 if tasks == 1 else 3,), "f")
        if fit.size and fit[1:].min() <= 0:
            raise ValueError(f"{view}_foreign_fit: expected a variance and a scale above 0")
    for name in names:
        values = _field(arrays, name, (tasks,), "f")
        if not name.endswith("mean") and values.min() <= 0:
            raise ValueError(f"{name}: expected numbers above 0")
    kind = str(_field(arrays, "head_kind", (), "U"))
    if kind == "function":
        raise ValueError("head_kind: the heads are functions, which are not stored")
    if kind not in (*WITH_BIAS, "cosine", "nearest_mean"):
        raise ValueError(f"head_kind: unknown kind {kind!r}")
    _field(arrays, "head_weight", (rows, arrays["adapted_mean"].shape[1]), "f")
    if kind in WITH_BIAS:
        _field(arrays, "head_bias", (rows,), "f")
    if kind == "cosine":
        _field(arrays, "head_scale", (tasks,), "f")
