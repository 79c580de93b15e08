"""Storage of a calibrator's statistics, as the paper counts it."""

from collections.abc import Sequence

from fdc_jax.calibration.settings import Settings
from fdc_jax.calibration.statistics import Task

BYTES = 4  # of a float32, in which all statistics are counted


def storage_bytes(settings: Settings, tasks: Sequence[Task], whitened: bool) -> int:
    """Returns the bytes of the statistics in use.

    PCA bases count as factors, beside prototypes, feature means and scalars; classifier weights and
    foreign residuals do not count. A view of weight 0 counts no more than what TSF needs: the
    adapted bases.

    Args:
        settings: of the calibrator.
        tasks: fitted tasks.
        whitened: count the whitened metric, too: class means stand for prototypes, and half of the
            symmetric scatter is counted once.
    """
    numbers = 0
    weights = (settings.adapted_view_weight, settings.pretrained_view_weight)
    for index, weight in enumerate(weights[: len(tasks[0].views) if tasks else 0]):
        views = [task.views[index] for task in tasks]
        if weight or (index == 0 and settings.attenuation):
            numbers += sum(view.basis.size for view in views)
        if not weight:
            continue
        width = len(views[0].mean)
        present = sum(int((view.class_counts > 0).sum()) for view in views)
        numbers += (len(views) + present) * width
        # Four moments per task; mean, variance and scale of the foreign reference.
        numbers += 4 * len(views) + (3 if len(views) > 1 else 0)
        if whitened:
            numbers += width * (width + 1) // 2 + 1
    # Score scales with and without TSF.
    return BYTES * (numbers + 2 * len(tasks))
