"""Which runs are usable, which belong together, and what sets them apart."""

import dataclasses
import fnmatch
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Int

from fdc_jax import evaluation, learners
from fdc_jax.data.benchmarks import BENCHMARKS
from fdc_jax.errors import InputError, counted
from fdc_jax.machine.files import named_path, write_json
from fdc_jax.report import baselines, paper, quantities
from fdc_jax.run.configuration import NOT_COMPARED
from fdc_jax.run.saved import open_run

# Columns of `Group.record` that are no numbers of it.
_LABELS = ("benchmark", "learner", "calibrator", "quantity", "settings")


@dataclasses.dataclass(frozen=True)
class Group:
    """Finished runs that differ in nothing but the seed."""

    benchmark: str
    learner: str
    # What differs from the paper's protocol, in words; empty when nothing does. Of a benchmark that
    # the paper does not have, differences of the method alone.
    title: str
    follows_protocol: bool  # whether the paper's numbers are of the same experiment
    runs: list[Any]  # by ascending seed, as `fdc_jax.open_run` returns them
    numbers: pd.DataFrame  # a row per seed, a column per quantity of `quantities.measured`, or NaN
    # By name, what `report.analysis` computes, a value for every seed whose features allow it.
    analyses: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    missing: list[str] = dataclasses.field(default_factory=list)  # why some are absent, in lines

    @property
    def results(self) -> dict[str, Any]:
        """`results.json` of the first seed."""
        return self.runs[0].results

    @property
    def seeds(self) -> list[int]:
        """Training seeds."""
        return self.numbers.index.tolist()

    @property
    def methods(self) -> list[str]:
        """Calibrators that stand side by side, by name, `raw` first."""
        return list(dict.fromkeys(n for run in self.runs for n in quantities.methods(run.results)))

    @property
    def name(self) -> str:
        """Learner, benchmark and what differs from the protocol, for captions."""
        parts = (learners.title(self.learner), paper.benchmark_title(self.benchmark))
        return ", ".join((*parts, self.title) if self.title else parts)

    def values(self, name: str) -> list[float]:
        """Returns a quantity of every seed that has it."""
        return self.numbers[name].dropna().tolist() if name in self.numbers else []

    def estimate(self, quantity: str) -> evaluation.Gain | None:
        """Returns mean, sample deviation and 95 % interval of a quantity; None if no seed has it.

        The interval of accuracies and gains of calibrators is that of `gain`, any other one is
        Student's t over seeds.
        """
        values, (name, kind) = self.values(quantity), quantities.split(quantity)
        if not values:
            return None
        over = {"accuracy": None, "gain": "raw"}.get(kind, name)
        gain = self.gain(name, over) if over != name else None
        over_seeds = evaluation.student(values, *quantities.bounds(quantity))
        return over_seeds if gain is None else over_seeds._replace(low=gain.low, high=gain.high)

    def gain(self, method: str, over: str | None = "raw") -> evaluation.Gain | None:
        """Returns the gain of a method over another one with its 95 % interval.

        Several seeds: Student's t over gains paired within seeds. One seed, or a gain that no seed
        changes, as on frozen features: over the test images of the first seed, None if predictions
        were not kept. Over None: the accuracy itself.
        """
        columns = [over or "none", method]
        pairs = self.numbers.assign(none=0.0).reindex(columns=columns).dropna().to_numpy().T
        if len(np.unique(pairs[1] - pairs[0])) > 1:
            gain = evaluation.paired_gain(*pairs)
            low, high = quantities.bounds(method) if over is None else (-100.0, 100.0)
            return gain._replace(low=max(gain.low, low), high=min(gain.high, high))
        of = predictions(self.runs[0])
        if f"{method}_label" not in of:
            return None
        label, chosen = of["label"], of[f"{method}_label"]
        if over is None:
            return evaluation.share_of(chosen == label)
        return evaluation.sample_gain(label, of[f"{over}_label"], chosen)

    def difference(self, quantity: str) -> evaluation.Gain | None:
        """Returns a quantity minus the paper's, with Welch's interval; None if one is missing."""
        published, values = self.published(quantity), self.values(quantity)
        return evaluation.welch(values, *published) if published and values else None

    def published(self, quantity: str) -> paper.Published | None:
        """Returns the paper's mean of a quantity, None where the paper has none."""
        return paper.find(self.benchmark, self.learner, quantity)

    def record(self, quantity: str) -> dict[str, Any]:
        """Returns a quantity as a row of numbers, beside the paper's; None stands for a gap."""
        own, other = self.estimate(quantity), self.published(quantity)
        gap = self.difference(quantity)
        calibrator, kind = quantities.split(quantity)
        row = {
            **{"benchmark": self.benchmark, "learner": self.learner},
            **{"calibrator": calibrator, "quantity": kind},
            **{name: own and getattr(own, name) for name in ("mean", "std")},
            "n": len(self.values(quantity)),
            **{name: own and getattr(own, name) for name in ("low", "high")},
            **{"paper_mean": other and other.mean, "paper_std": other and other.std},
            "difference": gap and gap.mean,
            **{f"difference_{name}": gap and getattr(gap, name) for name in ("low", "high")},
            "settings": self.title,
        }
        unknown = {name for name, cell in row.items() if isinstance(cell, float) and cell != cell}
        return row | dict.fromkeys(unknown)


class Skipped(NamedTuple):
    """A folder that could not be used, and why."""

    path: Path
    reason: str


def load(
    paths: Iterable[str | os.PathLike[str]],
    data: str | None = None,
    host: Mapping[str, Any] | None = None,
) -> tuple[list[Group], list[Skipped]]:
    """Opens run folders; a folder stands for all run folders at any depth in it.

    Folders that cannot be used are named with the reason and do not stop the others. Of two runs
    with the same benchmark, learner, seed and settings the first counts. Further arguments are
    those of `fdc_jax.open_run`.

    Returns:
        Groups, in the paper's order and of its protocol first; and folders that are unusable.
    """
    skipped: list[Skipped] = []
    opened: dict[tuple[str, int], Any] = {}
    named = [named_path("run", path) for path in paths]
    given = [folder for path in named for folder in _runs_in(path) or [path]]
    folders = {os.path.realpath(path): path for path in given}
    for path in folders.values():
        try:
            run = _open(path, data, host)
        except InputError as error:
            skipped.append(Skipped(path, str(error)))
            continue
        first = opened.setdefault((_experiment(run.results), run.results["seed"]), run)
        if first is not run:
            reason = f"same benchmark, learner, seed and settings as {first.folder}"
            skipped.append(Skipped(path, f"{reason}, but for what moves no number of the paper's"))
    return group(list(opened.values())), skipped


def _runs_in(path: Path) -> list[Path]:
    """Returns the run folders at any depth below a folder, which may be one itself."""
    if (path / "config.json").exists():
        return [path]
    children = [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []
    children.sort(key=lambda child: (len(child.name), child.name))
    return [run for child in children for run in _runs_in(child)]


def _open(path: Path, data: str | None, host: Mapping[str, Any] | None) -> Any:
    """Opens a finished run, whose files its manifest has checked."""
    run = open_run(path, data, host=host)
    if run.results is None:
        done = len(list((path / "tasks").glob("task_*.json")))
        raise InputError(f"unfinished: no results.json, {counted(done, 'task')} done")
    predictions(run)
    return run


def predictions(run: Any) -> dict[str, Int[np.ndarray, " n"]]:
    """Returns labels and tasks out of `predictions.npz`, and labels of `baselines`."""
    columns = run.predictions if run.predictions_file.exists() else {}
    columns = baselines.labels(run) | columns
    return {name: each for name, each in columns.items() if name.endswith(("label", "task"))}


# Groups ------------------------------------------------------------------------------------------


def group(runs: Sequence[Any]) -> list[Group]:
    """Puts together opened runs that differ in nothing but the seed, in the order of `load`."""
    members: dict[str, list[Any]] = {}
    for run in sorted(runs, key=lambda run: run.results["seed"]):
        members.setdefault(_experiment(run.results), []).append(run)
    groups = []
    for alike in members.values():
        of = alike[0].results
        title = ", ".join(deviations(of["benchmark"], of["learner"], settings(of)))
        follows = not title and of["benchmark"] in paper.benchmarks()
        seeds = pd.Index([run.results["seed"] for run in alike], name="seed")
        numbers = pd.DataFrame([_numbers(run) for run in alike], index=seeds)
        groups.append(Group(of["benchmark"], of["learner"], title, follows, alike, numbers))
    return sorted((_told_apart(each, groups) for each in groups), key=_order)


def _numbers(run: Any) -> dict[str, float]:
    latency = run.read_latency()
    return quantities.measured(run.results, baselines.accuracies(run), latency)


def _experiment(results: dict[str, Any]) -> str:
    """What runs of one group have in common."""
    return json.dumps([results["benchmark"], results["learner"], settings(results)], sort_keys=True)


def _order(each: Group) -> tuple[Any, ...]:
    def place(name: str, known: Iterable[str]) -> tuple[Any, ...]:
        names = list(known)
        return names.index(name) if name in names else len(names), name

    learner, benchmark = place(each.learner, learners.names()), place(each.benchmark, BENCHMARKS)
    return *learner, *benchmark, not each.follows_protocol, each.title


def _told_apart(each: Group, groups: Sequence[Group]) -> Group:
    """Adds to a title the fields in which groups of the same title differ."""
    key = (each.benchmark, each.learner, each.title)
    alike = [of for of in groups if (of.benchmark, of.learner, of.title) == key]
    fields = pd.DataFrame([settings(of.results) for of in alike]).astype(str)
    mine = settings(each.results)
    differing = [
        f"{field} {str(mine.get(field, 'not recorded'))[:40]}"
        for field in fields.columns[fields.nunique() > 1].difference(["encoder.weights"])
    ]
    title = ", ".join([each.title] * bool(each.title) + differing)
    return dataclasses.replace(each, title=title)


def write_summary(group: Group) -> None:
    """Writes `results.json` of all seeds beside the folders of the seeds, if they lie together."""
    folders = {run.folder.absolute().parent for run in group.runs}
    named = all(run.folder.name == f"seed_{run.results['seed']}" for run in group.runs)
    if not named or len(folders) > 1 or len(group.runs) < 2:
        return
    numbers = {
        name: {k: v for k, v in group.record(name).items() if k not in _LABELS}
        | {"by_seed": {str(seed): value for seed, value in group.numbers[name].dropna().items()}}
        for name in group.numbers
    }
    fields = ("benchmark", "learner", "class_order_seed", "num_tasks", "num_classes", "versions")
    summary = {name: group.results.get(name) for name in fields}
    summary["config"] = group.results["config"] | {"seed": group.seeds}
    summary |= {"seeds": group.seeds, "settings": group.title, "numbers": numbers}
    write_json(folders.pop() / "results.json", summary)


# Settings ----------------------------------------------------------------------------------------


def settings(results: dict[str, Any]) -> dict[str, Any]:
    """Returns everything that the numbers of a `results.json` depend on but its seed, by field.

    Options of other learners are left out; of a field that is absent, the paper's value stands.
    """
    benchmark, learner = results["benchmark"], results["learner"]
    options = learners.options(learner)
    values = _expected() | {name: each.default_on(benchmark) for name, each in options.items()}
    for field, value in results["config"].items():
        if field not in NOT_COMPARED and not learners.of_another(field, learner):
            values[field] = value
    for section, names in (
        ("encoder", ("sha256", "weights")),
        ("data", ("train_sha256", "test_sha256")),
    ):
        of_section = results.get(section) or {}
        values |= {f"{section}.{name}": of_section.get(name) for name in names}
    values |= {name: results.get(name) for name in ("split", "num_train_images", "num_test_images")}
    return dict(sorted(values.items()))


def deviations(benchmark: str, learner: str, values: dict[str, Any]) -> list[str]:
    """Says what departs from the paper's protocol, and from what it leaves open.

    Of a benchmark that the paper does not have, only settings of learner and FDC are compared.
    """
    expected, sizes = _expected(), paper.sizes(benchmark)
    if not sizes:
        method = ("learner.preset", "fdc.")
        expected = {name: value for name, value in expected.items() if name.startswith(method)}
    phrases = [
        f"{field.split('.')[-1].replace('_', ' ')} {values[field]}"
        for field, value in expected.items()
        if values[field] != value
    ]
    for part, word in (("train", "training"), ("test", "test")):
        count = values[f"num_{part}_images"]
        if sizes and not values[f"data.{part}_per_class"] and count not in (None, sizes[part]):
            phrases.append(f"{count:,} of {sizes[part]:,} {word} images")
    weights, patterns = values["encoder.weights"], paper.numbers()["protocol"]["weights"]
    same_size = values["encoder.variant"] == expected.get("encoder.variant")
    if weights and same_size and not any(fnmatch.fnmatch(weights, each) for each in patterns):
        phrases.append(f"weights {weights}")
    return phrases + learners.deviations(learner, values | {"benchmark": benchmark})


def _expected() -> dict[str, Any]:
    """The paper's settings by field, and what it leaves open by default."""
    known = paper.numbers()["protocol"]
    return known["fields"] | known["unstated"]
