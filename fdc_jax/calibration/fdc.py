"""Feature Distribution Calibration: post-hoc task routing over the heads of a shared encoder."""

import itertools
import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from fdc_jax.calibration import accounting, function_heads, inputs, storage, whitened_prototypes
from fdc_jax.calibration.earlier import EarlierTasks
from fdc_jax.calibration.foreign import ForeignReference, fit_foreign_reference
from fdc_jax.calibration.head_rows import common_kind, head_kind, head_rows
from fdc_jax.calibration.measures import SCALE_FLOOR
from fdc_jax.calibration.numpy_scorer import NumpyScorer
from fdc_jax.calibration.scorer import Scorer
from fdc_jax.calibration.scores import Scores
from fdc_jax.calibration.second_pass import second_pass
from fdc_jax.calibration.settings import Settings
from fdc_jax.calibration.statistics import Task, first_pass
from fdc_jax.calibration.terms import Terms
from fdc_jax.calibration.whitening import WithinClass
from fdc_jax.errors import InputError

_LOGGER = logging.getLogger("fdc_jax.calibration")


class FDC:
    """Calibrates the competition of task heads from feature statistics (Algorithm 1).

    Call `fit_task` after each task is learned, then `finalize`, then `score`; more tasks may follow
    with `fit_task` and `finalize` again. Nothing is refitted then but the foreign reference.

    The order of tasks matters: a task's foreign residuals are measured against earlier tasks only.
    Features are used as they are, never centred or scaled as a whole: TSF and PAC depend on where
    the origin is.

    Args:
        retained_energy: eta, share of a task's variance that its subspace keeps, in (0, 1].
        attenuation: gamma, how much of a feature outside the subspace TSF removes, in [0, 1].
        rlc_weight: alpha.
        pac_weight: beta.
        adapted_view_weight: w_T.
        pretrained_view_weight: w_0; with 0 the pretrained features may be left out when scoring.
        neighbours: K, class prototypes whose cosines PAC averages.
        affinity_reference: "own" standardises affinities by the task's training moments; "nearest"
            by their moments over the candidate tasks of each input (paper, "PAC Neighborhood
            Size"); "pooled", of the whitened metric alone, by the mean of all tasks' own moments.
        affinity_metric: "cosine"; or "whitened", the cosine in the metric of the pooled
            within-class covariance, which is beyond the paper (docs/beyond.md).
        affinity_evidence: "tanh" of the standardised affinity, or "linear", the affinity itself.
        affinity_scope: "task" gives a task the affinity of its nearest class; "class", of the
            whitened metric alone, gives each class its own, before the maximum over classes.
        affinity_shrinkage: lambda, share of the mean variance added to the within-class covariance.

    With the whitened metric, the terms still hold the paper's evidence, too.

    Raises:
        InputError: a setting outside its range.
    """

    def __init__(
        self,
        retained_energy: float = 0.75,
        attenuation: float = 0.5,
        rlc_weight: float = 1.0,
        pac_weight: float = 1.0,
        adapted_view_weight: float = 1.0,
        pretrained_view_weight: float = 1.0,
        neighbours: int = 1,
        affinity_reference: str = "own",
        affinity_metric: str = "cosine",
        affinity_evidence: str = "tanh",
        affinity_scope: str = "task",
        affinity_shrinkage: float = 0.05,
    ):
        self.settings = Settings(
            retained_energy,
            attenuation,
            rlc_weight,
            pac_weight,
            adapted_view_weight,
            pretrained_view_weight,
            neighbours,
            affinity_reference,
            affinity_metric,
            affinity_evidence,
            affinity_scope,
            affinity_shrinkage,
        ).checked()
        self.tasks: list[Task] = []
        self.heads: list[Any] = []
        self.references: list[ForeignReference | None] = []
        # Per task, the standardised foreign residuals of each view; None once released.
        self.foreign: list[list[Float[np.ndarray, "earlier n"]]] | None = []
        # Per view, what the whitened metric is made of; empty with the cosine.
        self.shared: list[WithinClass] = []
        self._earlier: list[EarlierTasks] = []
        self._finalized = False
        self._scorer: Scorer | None = None

    @property
    def num_tasks(self) -> int:
        """Returns the number of tasks fitted so far."""
        return len(self.tasks)

    @property
    def num_views(self) -> int:
        """Returns 2 when tasks were fitted with a pretrained view, else 1; 0 before any task."""
        return len(self.tasks[0].views) if self.tasks else 0

    @property
    def classes(self) -> list[Int[np.ndarray, " c"]]:
        """Returns the labels of each task's head rows, in row order."""
        return [task.classes for task in self.tasks]

    def fit_task(
        self,
        adapted: Any,
        labels: Any,
        head: Any,
        pretrained: Any = None,
        classes: Any = None,
    ) -> None:
        """Collects the statistics of the next task (Algorithm 1, lines 5 to 11).

        Args:
            adapted: features E_t(D_t), [n, d], as an array of NumPy, JAX or any library that offers
                `__array__` or `__dlpack__`; memory maps are read block by block. Or a source: a
                function without arguments that returns a fresh iterator over chunks (adapted,
                pretrained or None, labels). It is called twice, since residuals can be measured
                only when the subspace is known, and must give the same samples both times.
            labels: integer labels [n]; None with a source.
            head: the task's head, of the same type for all tasks.
            pretrained: features E_0(D_t), [n, e]; given for all tasks or for none; None with a
                source.
            classes: label of each head row. By default the distinct labels in ascending order. Only
                when named may a class have no sample; PAC then ignores it.

        Raises:
            InputError: input that is malformed or unlike earlier tasks. The calibrator then is as
                it was before the call.

        Logs a warning when the task's residual ratios do not vary, as with one or two samples.
        """
        if self.foreign is None:
            raise InputError("the foreign residuals were released: no further task can be fitted")
        task = self.num_tasks
        name = f"head of task {task}"
        kind = head_kind(head, name)
        if kind == "function" and self.settings.affinity_scope == "class":
            raise InputError(
                f"{name}: affinity_scope class needs the logit of every class; expected a built-in "
                "head, found a function"
            )
        if self.heads and kind != (expected := head_kind(self.heads[0], "head of task 0")):
            raise InputError(f"{name}: expected a {expected} head like task 0, found {kind}")
        source = inputs.task_source(adapted, labels, pretrained, task)
        stream = inputs.blocks(source, task)
        start = next(stream, None)
        if start is None:
            raise InputError(f"task {task}: expected at least one sample, found none")
        width = start.adapted.shape[1]
        if self.tasks:
            inputs.check_views(start, self._widths, task)
        if kind == "function":
            rows, num_classes = None, function_heads.count_classes(head, width, name)
        else:
            rows = head_rows(head, name, width)
            num_classes = len(rows.rows)
        if classes is not None:
            classes = inputs.class_labels(classes, f"classes of task {task}")
            if len(classes) != num_classes:
                raise InputError(
                    f"classes of task {task}: expected {num_classes} labels, one per row of the "
                    f"head, found {len(classes)}"
                )
        first = first_pass(
            itertools.chain([start], stream),
            task,
            self.settings.retained_energy,
            num_classes,
            classes,
            self.classes,
            self.settings.affinity_metric == "whitened",
        )
        present = int((first.class_counts > 0).sum())
        if present < self.settings.neighbours:
            raise InputError(
                f"task {task}: {self.settings.neighbours} neighbours need as many classes with "
                f"samples, found {present}"
            )
        self._earlier = self._earlier or [EarlierTasks() for _ in first.shapes]
        for view, earlier in enumerate(self._earlier):
            earlier.update([fitted.views[view] for fitted in self.tasks])
        shared, prototypes = whitened_prototypes.of_new_task(
            self.shared, self.tasks, first, self.settings.affinity_shrinkage
        )
        fitted, foreign = second_pass(
            source,
            task,
            first,
            head,
            rows,
            self._earlier,
            self.settings.attenuation,
            self.settings.neighbours,
            prototypes,
        )
        self.tasks.append(fitted)
        self.shared = shared
        self.heads.append(head)
        self.foreign.append(foreign)
        self._finalized = False
        _warn_of_constant_residuals(fitted, task)

    def finalize(self, release: bool = False) -> None:
        """Fits the foreign reference of RLC (Algorithm 1, line 13). May be called again.

        Args:
            release: drop the foreign residual scalars, one float32 per sample, earlier task and
                view. No further task can be fitted then.

        Raises:
            InputError: no task was fitted.
        """
        if not self.tasks:
            raise InputError("finalize: no task was fitted")
        if self.foreign is not None and not self._finalized:
            self.references = [
                fit_foreign_reference([task[view] for task in self.foreign])
                for view in range(self.num_views)
            ]
            self._scorer = None
        self._finalized = True
        if release:
            self.foreign = None
            self._earlier = []

    def score(self, adapted: Any, pretrained: Any = None) -> Scores:
        """Returns calibrated scores of a batch of any size (Algorithm 1, lines 14 to 20).

        All components are switched on.

        Args:
            adapted: final features E_T(x), [n, d].
            pretrained: features E_0(x), [n, e]; needed when tasks were fitted with a pretrained
                view whose weight is not 0.

        Raises:
            InputError: not finalized, or features of another shape than at fit time.
        """
        return self.terms(adapted, pretrained).fuse()

    def raw(self, adapted: Any, pretrained: Any = None) -> Scores:
        """Returns the largest raw logit of each head as its score (Eq. raw)."""
        return self.terms(adapted, pretrained).raw()

    def terms(self, adapted: Any, pretrained: Any = None) -> Terms:
        """Returns what scores are made of, for all component combinations from one pass.

        Takes and raises what `score` does.
        """
        self._require_finalized()
        needed = self.settings.pretrained_view_weight != 0.0
        views = inputs.score_views(adapted, pretrained, self._widths, needed)
        if self._scorer is None:
            self._scorer = Scorer(
                self.settings, self.tasks, self.heads, self.references, self.shared
            )
        return self._scorer.terms(*views)

    def replace_heads(self, heads: Sequence[Any]) -> None:
        """Predicts with other heads from now on, for learners that rewrite old heads.

        Score scales and all other statistics stay those collected when each task was learned.

        Raises:
            InputError: not one head per task, heads of different types or shapes.
        """
        heads = list(heads)
        if len(heads) != self.num_tasks:
            raise InputError(f"heads: expected one per task, {self.num_tasks}, found {len(heads)}")
        kind = common_kind(heads)
        if kind == "function" and self.settings.affinity_scope == "class":
            raise InputError(
                "heads: affinity_scope class needs the logit of every class; expected built-in "
                "heads, found functions"
            )
        for index, (head, task) in enumerate(zip(heads, self.tasks, strict=True)):
            name, width = f"head of task {index}", self._widths[0]
            if kind == "function":
                found = function_heads.count_classes(head, width, name)
            else:
                found = len(head_rows(head, name, width).rows)
            if found != len(task.classes):
                raise InputError(f"{name}: expected {len(task.classes)} classes, found {found}")
        self.heads = heads
        self._scorer = None

    @property
    def paper_storage_bytes(self) -> int:
        """Returns what `storage_bytes` would be with the cosine instead of the whitened metric."""
        return accounting.storage_bytes(self.settings, self.tasks, whitened=False)

    @property
    def storage_bytes(self) -> int:
        """Returns the bytes of the statistics in use, by the paper's accounting, in float32.

        Foreign residuals, which `finalize(release=True)` drops, are not counted.
        """
        return accounting.storage_bytes(self.settings, self.tasks, whitened=bool(self.shared))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the finalized calibrator to one `.npz` file, whole or not at all.

        The foreign residuals are part of it unless released, so that a loaded calibrator can take
        further tasks. Heads that are functions are left out; `load` then needs them.

        Raises:
            InputError: not finalized, or the file cannot be written.
        """
        storage.save(path, self._state())

    @classmethod
    def load(cls, path: str | os.PathLike[str], heads: Sequence[Any] | None = None) -> "FDC":
        """Reads a calibrator that `save` wrote; it scores as the saved one did.

        Args:
            path: the file.
            heads: heads to predict with instead of the stored ones; required for functions.

        Raises:
            InputError: the file is missing, damaged, of another schema, or needs `heads`.
        """
        state = storage.load(path, heads)
        calibrator = cls(**state.settings._asdict())
        calibrator.tasks = state.tasks
        calibrator.references = state.references
        calibrator.foreign = state.foreign
        calibrator.shared = state.shared
        try:
            calibrator.replace_heads(state.heads)
        except InputError as error:
            # Heads that were given are the caller's, not the file's.
            if heads is not None:
                raise
            raise InputError(f"{path}: {error}") from error
        calibrator._finalized = True
        return calibrator

    def to_numpy(self) -> NumpyScorer:
        """Returns a scorer of the same statistics that needs NumPy alone.

        Raises:
            InputError: not finalized, or the heads are functions.
        """
        arrays = storage.to_arrays(self._state())
        if str(arrays["head_kind"]) == "function":
            raise InputError("heads that are functions cannot be scored with NumPy alone")
        return NumpyScorer(arrays)

    @property
    def _widths(self) -> list[int]:
        """Feature width of each view, once there is a task."""
        return [len(view.mean) for view in self.tasks[0].views]

    def _state(self) -> storage.State:
        self._require_finalized()
        return storage.State(
            self.settings, self.tasks, self.heads, self.references, self.foreign, self.shared
        )

    def _require_finalized(self) -> None:
        if not self._finalized:
            raise InputError("call fit_task for every task, then finalize, first")


def _warn_of_constant_residuals(fitted: Task, task: int) -> None:
    for name, view in zip(inputs.VIEWS, fitted.views, strict=False):
        # A subspace that is the whole space leaves no residual to anybody.
        if view.residual_std > SCALE_FLOOR or len(view.basis) == len(view.mean):
            continue
        _LOGGER.warning(
            "task %d: the residual ratios of its training samples (%d) do not vary in the %s "
            "view; RLC's foreign reference, which all tasks share, will be dominated by this task",
            task,
            fitted.samples,
            name,
        )
