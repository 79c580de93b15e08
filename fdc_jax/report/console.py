"""The table on the screen at the end of a run, and sentences below it."""

import textwrap

import numpy as np
import pandas as pd
from tabulate import tabulate

from fdc_jax.calibration import FDC, METHODS
from fdc_jax.errors import counted
from fdc_jax.learners import title
from fdc_jax.report import formatting, runs, tables
from fdc_jax.report.runs import Group

FDC_IN_WORDS = (
    "Routing is the choice of the task, by the head with the largest corrected logit. FDC corrects "
    "logits by three components: TSF weakens the part of a feature outside the task's principal "
    "subspace, RLC scores how typical that part is of the task, and PAC scores how near the "
    "closest class prototype is."
)


def show(group: Group) -> None:
    """Prints accuracies in percent and gains in points by calibrator, and sentences about them."""
    first = group.results
    seeds = "seeds" if len(group.runs) > 1 else "seed"
    sizes = (
        counted(first.num_tasks, "task"),
        counted(first.num_classes, "class"),
        counted(first.num_test_images, "test image"),
    )
    print(
        f"{first.benchmark}, {title(first.learner)}, {seeds} "
        f"{', '.join(map(str, group.seeds))}: {', '.join(sizes)}\n"
    )
    frame = tables.of_calibrators([group]).frame.rename_axis("percent").fillna("")
    shown = frame.drop(columns="storage, MiB", errors="ignore")
    align = ["left", *("right" for _ in shown.columns)]
    print(tabulate(shown, "keys", disable_numparse=True, colalign=align), end="\n\n")
    if FDC.name in group.methods:
        print(textwrap.fill(FDC_IN_WORDS, 100), end="\n\n")
    if group.leading == ["raw"] and len(group.methods) > 1:
        print("No calibrator of the run is as accurate as the raw logits.")
    elif group.leading != ["raw"]:
        titles = " and ".join(map(formatting.method_title, group.leading))
        lead = "Most accurate, equally" if len(group.leading) > 1 else "Best calibrator of the run"
        print(f"{lead}: {titles}.")
    print(transfers(group), end="")
    if "paper" in shown and group.title:
        print(f"The paper's numbers are of other settings; here: {group.title}.")
    for line in filter(None, (verdict(group), *notes(group))):
        print(line)


def transfers(group: Group) -> str:
    """Returns a line with forgetting and backward transfer by method; "" if they are not known."""
    parts = []
    for name in group.methods:
        matrices = runs.accuracy_matrices(group, name).values()
        means = pd.DataFrame([runs.transfer(matrix) for matrix in matrices]).mean(skipna=False)
        if len(means):
            numbers = f"{means['Forgetting']:.1f}, {means['Backward transfer']:+.1f}"
            parts.append(f"{formatting.method_title(name)} {numbers}")
    return f"Forgetting and backward transfer, points: {'; '.join(parts)}.\n" if parts else ""


def verdict(group: Group) -> str:
    """Returns a sentence that compares the best method with no training; "" if not known."""
    name = group.untrained
    gain = group.gain(group.best, name) if name else None
    if name is None or gain is None or np.isnan(gain.low):
        return ""
    unclear = "not significantly better" if gain.mean >= 0 else "not better"
    result = "better" if gain.low > 0 else "worse" if gain.high < 0 else unclear
    # The page names another method before this sentence.
    named = group.best != group.headline
    start = f"{formatting.method_title(group.best)}: {result}" if named else result.capitalize()
    return (
        f"{start} than no training at all ({METHODS[name].title}): "
        f"{gain.mean:+.2f} points, 95 % interval {formatting.interval(gain.low, gain.high)}."
    )


def notes(group: Group) -> list[str]:
    """Returns lines about calibrators and skipped images; numbers are means over seeds."""
    seeds = [run.results for run in group.runs]
    texts: dict[str, None] = {}
    skipped: dict[str, str] = {}
    for results in seeds:
        texts |= dict.fromkeys(results.notes.values())
        skipped |= results.skipped
    lines = [f"{note[:1].upper()}{note[1:]}." for note in texts]
    lines += [f"Images: {reason}: {paths}." for reason, paths in skipped.items()]
    errors = pd.DataFrame([results.calibration_error for results in seeds]).mean()
    by_chance = pd.DataFrame([results.chance_calibration_error for results in seeds]).mean()
    for name in filter(lambda name: METHODS[name].gives_confidence, errors.index):
        chance = ""
        if name in by_chance:
            chance = f"; by chance, exact confidence would seem {by_chance[name]:.1f} off"
        lines.append(
            f"The confidence stated by {METHODS[name].title} is {errors[name]:.1f} points too high "
            f"or too low on average{chance}."
        )
    shares = [results.unlike_learned for results in seeds if results.unlike_learned is not None]
    if shares:
        lines.append(
            f"{np.mean(shares):.1f} % of the test images are flagged as unlike anything learned; "
            "5 % are expected of new images of the learned classes."
        )
    return lines
