"""Class prototypes in the within-class metric: of a task that is new, and of all tasks."""

from collections.abc import Sequence

from fdc_jax.calibration import stacking, whitening
from fdc_jax.calibration.statistics import FirstPass, Task
from fdc_jax.calibration.whitening import Prototypes, WithinClass
from fdc_jax.errors import InputError


def of_new_task(
    shared: Sequence[WithinClass], tasks: Sequence[Task], first: FirstPass, shrinkage: float
) -> tuple[list[WithinClass], list[Prototypes]]:
    """Returns what tasks share with the new one among them, and its own prototypes, per view.

    Args:
        shared: of the tasks before; empty before the first.
        tasks: the tasks before.
        first: results of the new task's first pass.
        shrinkage: lambda.

    Raises:
        InputError: float32 cannot factorise the covariance.
    """
    extended, prototypes = [], []
    for view, (scatter, means) in enumerate(first.within):
        before = shared[view] if shared else None
        with_this = whitening.extended(before, scatter, int(first.class_counts.sum()))
        known = [task.views[view].whitened for task in tasks]
        metric = whitening.metric_of(
            with_this,
            [*(each.class_means for each in known if each), means],
            [*(task.views[view].class_counts for task in tasks), first.class_counts],
            shrinkage,
        )
        if not whitening.is_finite(metric):
            raise InputError(
                f"affinity_shrinkage: {shrinkage:g} is too small for the within-class covariance "
                f"of task {len(tasks)} in float32"
            )
        extended.append(with_this)
        prototypes.append(stacking.stack_prototypes(metric, [means], [first.class_counts]))
    return extended, prototypes


def of_all_tasks(
    shared: Sequence[WithinClass], tasks: Sequence[Task], shrinkage: float
) -> list[Prototypes]:
    """Returns the prototypes of all tasks in the metric of them all, per view.

    Args:
        shared: what the tasks share; empty with the cosine.
        tasks: fitted tasks.
        shrinkage: lambda.
    """
    found = []
    for index, each in enumerate(shared):
        views = [task.views[index] for task in tasks]
        means = [view.whitened.class_means for view in views if view.whitened]
        counts = [view.class_counts for view in views]
        metric = whitening.metric_of(each, means, counts, shrinkage)
        found.append(stacking.stack_prototypes(metric, means, counts))
    return found
