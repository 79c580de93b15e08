"""The table on the screen at the end of a run, and sentences about it."""

import numpy as np
import pandas as pd
from tabulate import tabulate

from fdc_jax.calibration import METHODS
from fdc_jax.errors import counted
from fdc_jax.learners import title
from fdc_jax.report import formatting, tables
from fdc_jax.report.runs import Group


def show(group: Group) -> None:
    """Prints a line per calibrator: accuracies in percent, gains over raw in percentage points.

    Below: the best calibrator, and whether it beats no training at all.

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
    frame = tables.of_calibrators([group]).frame.rename_axis("percent").fillna("")
    shown = frame.drop(columns="storage, MiB", errors="ignore")
    align = ("left", *["right"] * len(shown.columns))
    print(tabulate(shown, "keys", disable_numparse=True, colalign=align), end="\n\n")
    if best := group.leading.get("best"):
        print(f"Best calibrator of the run: {formatting.method_title(best)}.")
    if "paper" in shown and group.title:
        print(f"The paper's numbers are of other settings; here: {group.title}.")
    for line in filter(None, (verdict(group), *notes(group))):
        print(line)


def verdict(group: Group) -> str:
    """Returns a sentence on whether the run beats no training at all; empty if not known."""
    roles = group.leading
    known = {"best", "untrained"} <= roles.keys()
    gain = group.gain(roles["best"], roles["untrained"]) if known else None
    if gain is None or np.isnan(gain.low):
        return ""
    said = "Better than no training at all" if gain.low > 0 else "No training at all does better"
    if gain.low <= 0 <= gain.high:
        said = "Not significantly better than no training at all"
    best, untrained = (formatting.method_title(roles[role]) for role in ("best", "untrained"))
    return (
        f"{said}: {best} minus {untrained} is {gain.mean:+.2f} points, 95 % interval "
        f"{formatting.interval(gain._asdict())}."
    )


def notes(group: Group) -> list[str]:
    """Returns lines about calibrators and skipped images; numbers are means over seeds."""
    seeds = [run.results for run in group.runs]
    own = [note for results in seeds for note in (results.get("notes") or {}).values()]
    lines = [f"{note[:1].upper()}{note[1:]}." for note in dict.fromkeys(own)]
    skipped = dict(kind for results in seeds for kind in (results.get("skipped") or {}).items())
    lines += [f"Images: {reason}: {paths}." for reason, paths in skipped.items()]
    sure, chance = (
        pd.DataFrame([results.get(section) or {} for results in seeds]).mean().to_dict()
        for section in ("calibration_error", "chance_calibration_error")
    )
    if sure:
        said = ", ".join(f"{value:.1f} for {METHODS[name].title}" for name, value in sure.items())
        if chance:
            said += f"; by chance alone {', '.join(f'{chance[name]:.1f}' for name in sure)}"
        lines.append(
            "The Gaussians' probability of the answer is off on the mean, in points: " + said + "."
        )
    shares = [results.get("unlike_learned") for results in seeds]
    if shares := [share for share in shares if share is not None]:
        lines.append(
            f"Of the test images, {np.mean(shares):.1f} % are taken for unlike anything learned, "
            "where 5 % of images like those of training are."
        )
    return lines
