"""FDC under many settings from one pass over the features.

A subspace of a smaller eta has the first directions of a larger one, so that one decomposition and
one product with the directions serve every eta. All that gamma and K change is arithmetic on the
measurements.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np
from jaxtyping import Array, Float

from fdc_jax.calibration import compiled, fdc, inputs
from fdc_jax.calibration.calibrator import Calibrator
from fdc_jax.calibration.compiled import Blocks
from fdc_jax.calibration.fdc import FDC, Measured, PackedTasks
from fdc_jax.calibration.shapes import in_groups, mean_of_smallest
from fdc_jax.calibration.statistics import Task, View
from fdc_jax.calibration.terms import Terms

# The axis of eta, in the statistics and in the measurements that depend on it.
_ABSENT: Any = None
_SECOND: Any = 1
_OF_TASKS = PackedTasks(_ABSENT, _ABSENT, leading=0)
_OF_MEASURED = Measured(residual=_SECOND, projected=_SECOND, kept=_SECOND)


class Sweep(Calibrator):
    """Calibrators of several settings that are fitted and measured together.

    Attributes:
        calibrators: FDC by setting, equal to one that is fitted alone up to rounding.
        etas: ascending.
    """

    name = "fdc"
    needs_heads = True

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
        rows = blocks[0].place(given.rows)
        tasks = [Task([]) for _ in self.etas]
        centres = fdc.means_and_prototypes(blocks, rows, given.counts)
        for view, (mean, prototypes) in zip(blocks, centres, strict=True):
            bases = compiled.principal(view, rows, mean, self.etas)
            for task, basis in zip(tasks, bases, strict=True):
                task.views.append(View(mean, basis, prototypes))
        alone = fdc.pack(tasks[-1:], [given.counts], [given.head], pad=False)
        for index, packed in enumerate(alone):
            alone[index] = with_leading(packed, _views([[task] for task in tasks], index))
        by_block = compiled.map_blocks(lambda *part: measure_by_eta(part, alone), *blocks)
        own = blocks[0].gather(by_block)
        host = jax.device_get(alone[0]._replace(leading=None))
        ordered = [np.sort(view.distances[:, 0], axis=-1) for view in own]
        foreign = [[] for _ in self.etas]
        if self.classes:
            foreign = foreign_residuals(blocks, [self._of(eta).tasks for eta in self.etas])
        predicted = fdc.filtered(_of_eta(own[0], 0), host, 0.0)[:, 0].argmax(axis=1)
        warned: set[int] = set()  # etas
        kept: dict[Any, Any] = {}  # moments that several settings have in common
        for calibrator in self.calibrators:
            settings, views = calibrator.settings, []
            e = self.etas.index(settings.retained_energy)
            for index, view in enumerate(tasks[e].views):
                key = index, settings.neighbours
                if key not in kept:
                    nearest = ordered[index][:, : settings.neighbours].mean(axis=-1)
                    mean, std = fdc.moments(nearest)
                    kept[key] = 1.0 - mean, std
                residual = fdc.moments(own[index].residual[:, e])
                views.append(view._replace(residual=residual, affinity=kept[key]))
            scales = []
            for gamma in (0.0, settings.attenuation):
                key = "scale", e, gamma
                if key not in kept:
                    logits = fdc.filtered(_of_eta(own[0], e), host, gamma)
                    kept[key] = fdc.moments(logits.max(axis=-1))[1]
                scales.append(kept[key])
            if e not in warned:
                fdc.warn_without_residual(views, given)
            warned.add(e)
            calibrator.add(given, Task(views, *scales), foreign[e], predicted)
        self._append(given, predicted)

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
        by_eta, tasks = [self._of(eta).tasks for eta in self.etas], []
        for index, of in enumerate(packed):
            tasks.append(with_leading(of, _views(by_eta, index)))
        measured = compiled.map_blocks(lambda *views: measure_by_eta(views, tasks), *blocks)
        chosen, selected = None, []
        for calibrator in self.calibrators:
            settings = calibrator.settings
            choice = self.etas.index(settings.retained_energy), settings.neighbours
            if choice != chosen:
                chosen, numbers = choice, jax.device_put(choice)
                selected = [_selected(views, *numbers) for views in measured]
            moments = [
                of._replace(**fdc.packed_moments(calibrator.tasks, index, len(of.mean)))
                for index, of in enumerate(packed)
            ]
            ratios = fdc.packed_ratios(calibrator.references)[: len(blocks)]
            # The mean distance to K prototypes is a distance to one.
            one = msgspec.structs.replace(settings, neighbours=1)
            yield Terms(blocks[0], selected, moments, ratios, one, self.classes)


@jax.jit
def measure_by_eta(
    views: Sequence[Float[Array, "n d"]], tasks: Sequence[PackedTasks]
) -> list[Measured]:
    """Returns `fdc.measure` by view, with an axis of eta in what depends on it."""
    of_view = jax.vmap(fdc.measure, (None, _OF_TASKS), _OF_MEASURED)
    return [of_view(*pair) for pair in zip(views, tasks, strict=True)]


def with_leading(packed: PackedTasks, by_eta: Sequence[Sequence[View]]) -> PackedTasks:
    """Returns packed tasks of the largest eta with the directions that each eta has."""
    size, rank = packed.basis.shape[:2]
    ranks = np.zeros((len(by_eta), size, 1))
    for e, views in enumerate(by_eta):
        ranks[e, : len(views), 0] = [len(view.basis) for view in views]
    return packed._replace(leading=jax.device_put(np.float32(np.arange(rank) < ranks)))


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


def foreign_residuals(
    blocks: Sequence[Blocks], by_eta: Sequence[Sequence[Task]]
) -> list[list[Float[np.ndarray, "earlier n"]]]:
    """Returns u_j of features for every earlier task j (line 7), by eta and view."""
    results: list[list[Any]] = [[] for _ in by_eta]
    for index, block in enumerate(blocks):
        views, ratios = _views(by_eta, index), []
        groups = in_groups([*zip(*views, strict=True)], _packed)
        for part in block:
            ratios.append([measure_by_eta([part], [group])[0].residual for group in groups])
        together = np.concatenate(block.gather(ratios), axis=2)
        for e, of in enumerate(views):
            mean_std = np.array([view.residual for view in of], np.float32)
            results[e].append(fdc.standardised(together[:, e, : len(of)], mean_std).T)
    return results


def _packed(tasks: Sequence[tuple[View, ...]], size: int) -> PackedTasks:
    """Returns tasks, whose views are given by eta, for `measure_by_eta`."""
    by_eta = [*zip(*tasks, strict=True)]
    return with_leading(fdc.subspaces(by_eta[-1], size), by_eta)


def _views(by_eta: Sequence[Sequence[Task]], index: int) -> list[list[View]]:
    """Returns one view of tasks by eta."""
    views = []
    for tasks in by_eta:
        views.append([task.views[index] for task in tasks])
    return views
