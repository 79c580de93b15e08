"""The table on the screen at the end of a run."""

from tabulate import tabulate

from fdc_jax.errors import counted
from fdc_jax.learners import title
from fdc_jax.report import formatting, frames, quantities
from fdc_jax.report.runs import Group


def show(group: Group) -> None:
    """Prints a line per calibrator: accuracies in percent, gains over raw in percentage points.

    Of several seeds, means ± sample standard deviations; `paper` is the paper's accuracy, if it has
    one. Below: the best calibrator, and whether it beats no training at all.

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
    shown = (
        frames.calibrators(group)
        .drop(columns="storage, MiB", errors="ignore")
        .rename_axis("percent")
        .fillna("")
    )
    align = ("left", *["right"] * len(shown.columns))
    print(tabulate(shown, "keys", disable_numparse=True, colalign=align), end="\n\n")
    best = frames.leading(group).get("best", "")
    said = [f"Best calibrator of the run: {formatting.method_title(best)}."] * bool(best)
    if "paper" in shown and group.title:
        said.append(f"The paper's numbers are of other settings; here: {group.title}.")
    said += [frames.verdict(group), *quantities.notes([run.results for run in group.runs])]
    for line in filter(None, said):
        print(line)
