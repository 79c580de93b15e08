"""The table on the screen at the end of a run."""

from tabulate import tabulate

from fdc_jax.errors import counted
from fdc_jax.learners import title
from fdc_jax.report import frames, quantities, words
from fdc_jax.report.runs import Group


def show(group: Group) -> None:
    """Prints a line per calibrator: accuracies in percent, gains over raw in percentage points.

    Of several seeds, means ± sample standard deviations. Which is the best, and whether it beats
    no training at all, is said below.

    Args:
        group: the seeds of one configuration.
    """
    first, several = group.results, len(group.runs) > 1
    sizes = (("num_tasks", "task"), ("num_classes", "class"), ("num_test_images", "test image"))
    print(
        f"{first['benchmark']}, {title(first['learner'])}, seed{'s' * several} "
        f"{', '.join(map(str, group.seeds))}: "
        f"{', '.join(counted(first[name], noun) for name, noun in sizes)}\n"
    )
    shown = frames.calibrators(group).drop(columns="storage, MiB").rename_axis("percent").fillna("")
    align = ("left", *["right"] * len(shown.columns))
    print(tabulate(shown, "keys", disable_numparse=True, colalign=align), end="\n\n")
    best = frames.leading(group).get("best", "")
    said = [f"Best calibrator of the run: {words.method_title(best)}."] * bool(best)
    for line in filter(None, (*said, frames.verdict(group), *quantities.notes(first))):
        print(line)
