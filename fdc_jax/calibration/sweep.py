"""FDC under many settings from one pass over the features.

A subspace of a smaller eta has the first directions of a larger one, so that one decomposition and
one product with the directions serve every eta. All that gamma and K change is arithmetic on the
measurements.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import starmap
from typing import Any

import jax
import msgspec
import numpy as np
from jaxtyping import Array, Float

from fdc_jax.calibration import checks, compiled, fdc, inputs
from fdc_jax.calibration.calibrator import Calibrator
from fdc_jax.calibration.fdc import FDC, Measured, PackedTasks
from fdc_jax.calibration.shapes import groups_of, mean_of_smallest
from fdc_jax.calibration.statistics import (
    Task,
    View,
    by_view,
    pack,
    packed_moments,
    stacked,
)
from fdc_jax.calibration.terms import Terms

# The axis of eta, in the statistics and in the measurements that depend on it.
_SECOND: Any = 1
_OF_TASKS = PackedTasks(leading=0)
_OF_MEASURED = Measured(residual=_SECOND, projected=_SECOND, kept=_SECOND)


class Sweep(Calibrator):
    """Calibrators of several settings that are fitted and measured together.

    Attributes:
        calibrators: FDC by setting, equal to one that is fitted alone up to rounding.
        etas: ascending.
    """

    name = "fdc"
    needs_heads = True
    checks_finite = True

    def __init__(self, settings: Sequence[Mapping[str, Any]]):
        super().__init__()
        self.calibrators = [FDC(**values) for values in settings]
        for calibrator in self.calibrators:
            calibrator.doubts = None  # The sweep itself warns of heads.
        self.etas = sorted({c.settings.retained_energy for c in self.calibrators})

    def _fit(self, given: inputs.TaskInput) -> None:
        """Computes the statistics of a task (Algorithm 1, lines 5 to 11)."""
        for calibrator in self.calibrators:
            calibrator.check(given)
        blocks = compiled.blocks_of(given.views)
        earlier = [self._of(eta).tasks for eta in self.etas]
        by_eta = fdc.subspaces(blocks, given, self.etas)
        (host, *_) = packed = pack([Task(by_eta[-1])], [given.counts], [given.head], 1)
        alone = [*map(with_leading, packed, _by_view([[Task(views)] for views in by_eta]))]
        by_block = compiled.map_blocks(partial(measure_by_eta, alone), *blocks)
        own = blocks[0].gather(by_block)
        residuals = []
        for block, views in zip(blocks, _by_view(earlier), strict=False):
            residuals.append(fdc.foreign_residuals(block, *_subspaces(views), _measure))

        # Several settings have these in common.
        @cache
        def affinity(index: int, neighbours: int) -> tuple[float, float]:
            return fdc.affinity_moments(own[index], neighbours)

        @cache
        def foreign(e: int) -> list[Any]:
            return [u[:, e].T for u in residuals]

        @cache
        def residual(index: int, e: int) -> tuple[float, float]:
            return fdc.moments(own[index].residual[:, e])

        @cache
        def scale(e: int, gamma: float) -> float:
            logits = fdc.filtered(_of_eta(own[0], e), host, gamma)
            return fdc.moments(logits.max(axis=-1))[1]

        logits = fdc.filtered(_of_eta(own[0], 0), host, 0.0)
        for calibrator in self.calibrators:
            settings = calibrator.settings
            e = self.etas.index(settings.retained_energy)
            views = []
            for index, view in enumerate(by_eta[e]):
                own_moments = residual(index, e), affinity(index, settings.neighbours)
                views.append(View(*view[:3], *own_moments))
            if calibrator is self._of(settings.retained_energy):
                checks.warn_without_residual(views, given)
            task = Task(views, scale(e, 0.0), scale(e, settings.attenuation))
            calibrator.add(given, task, foreign(e), logits)
        self._append(given, logits[:, 0].argmax(axis=1))

    def _of(self, eta: float) -> FDC:
        """Returns the first calibrator of an eta."""
        return next(c for c in self.calibrators if c.settings.retained_energy == eta)

    def replace_heads(self, heads: Sequence[Any]) -> None:
        """See `Calibrator.replace_heads`."""
        super().replace_heads(heads)
        for calibrator in self.calibrators:
            calibrator.replace_heads(heads)

    def finalize(self, release: bool = False) -> None:
        """See `FDC.finalize`. Calibrators of one eta have the same foreign reference."""
        for calibrator in self.calibrators:
            same = self._of(calibrator.settings.retained_energy)
            same.finalize(release)
            calibrator.references = same.references
            calibrator.finalize(release)

    def terms(self, adapted: Any, pretrained: Any = None) -> Iterator[Terms]:
        """Yields the measurements of a batch by setting, which are computed once.

        Settings that follow each other take less time if they have the same eta and K.
        """
        blocks, (packed, _) = self._of(self.etas[-1]).batch(adapted, pretrained)
        views = _by_view([self._of(eta).tasks for eta in self.etas])
        tasks = [*map(with_leading, packed, views)]
        measured = compiled.map_blocks(partial(measure_by_eta, tasks), *blocks)
        chosen, selected = None, []
        for calibrator in self.calibrators:
            settings = calibrator.settings
            choice = self.etas.index(settings.retained_energy), settings.neighbours
            if choice != chosen:
                chosen, numbers = choice, jax.device_put(choice)
                selected = [_selected(views, *numbers) for views in measured]
            moments = [with_moments(*pair, calibrator) for pair in enumerate(packed)]
            ratios = jax.device_put([*starmap(fdc.log_ratio, calibrator.references)][: len(blocks)])
            # The mean distance to K prototypes is a distance to one.
            one = msgspec.structs.replace(settings, neighbours=1)
            yield Terms(blocks[0], selected, moments, ratios, one, self.classes)


_measure = jax.jit(jax.vmap(fdc.measure, (None, _OF_TASKS), _OF_MEASURED))


@jax.jit
def measure_by_eta(tasks: Sequence[PackedTasks], *views: Float[Array, "n _"]) -> list[Measured]:
    """Returns `fdc.measure` by view; fields that depend on eta have an axis of it."""
    return [*map(_measure, views, tasks)]


def with_leading(packed: PackedTasks, by_eta: Sequence[Sequence[View]]) -> PackedTasks:
    """Returns packed tasks of the largest eta with the directions that each eta has."""
    size, rank = packed.basis.shape[:2]
    ranks = np.zeros((len(by_eta), size, 1))
    for e, views in enumerate(by_eta):
        ranks[e, : len(views), 0] = [len(view.basis) for view in views]
    return jax.device_put(packed._replace(leading=np.float32(np.arange(rank) < ranks)))


def with_moments(index: int, packed: PackedTasks, calibrator: FDC) -> PackedTasks:
    """Returns packed tasks of a view with the moments of a calibrator."""
    moments = [packed_moments(index, task) for task in calibrator.tasks]
    own = stacked([PackedTasks(**of) for of in moments], len(packed.mean))
    fields = {name: getattr(own, name) for name in moments[0]}
    return packed._replace(**jax.device_put(fields))


def _of_eta(measured: Measured, index: Any) -> Measured:
    """Returns the measurements of one eta."""
    chosen = measured._replace(residual=measured.residual[:, index])
    if measured.projected is None:
        return chosen
    return chosen._replace(projected=measured.projected[:, index], kept=measured.kept[:, index])


@jax.jit
def _selected(views: Sequence[Measured], index: Any, neighbours: Any) -> list[Measured]:
    """Returns the measurements of one eta and one K by view."""
    nearest = [mean_of_smallest(view.distances, neighbours)[..., None] for view in views]
    pairs = zip(views, nearest, strict=True)
    return [_of_eta(view, index)._replace(distances=distance) for view, distance in pairs]


def _subspaces(by_eta: Sequence[Sequence[View]]) -> tuple[list[PackedTasks], Any]:
    """Returns `fdc.packed_subspaces` with the directions and the moments of each eta."""
    groups, _ = fdc.packed_subspaces(by_eta[-1])
    rows, _ = groups_of(len(by_eta[-1]))
    leading = []
    for packed, of_group in zip(groups, rows, strict=True):
        leading.append(with_leading(packed, [views[of_group] for views in by_eta]))
    mean_std = []
    for views in by_eta:
        mean_std.append([view.residual for view in views])
    return leading, np.array(mean_std, np.float32)


def _by_view(by_eta: Sequence[Sequence[Task]]) -> list[tuple[Sequence[View], ...]]:
    """Returns the views of tasks by view and eta."""
    return [*zip(*map(by_view, by_eta), strict=True)]
