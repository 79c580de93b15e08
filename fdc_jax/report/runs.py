"""Which runs are usable, which belong together, and what sets them apart."""

import dataclasses
import fnmatch
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Int

from fdc_jax import evaluation, learners
from fdc_jax.calibration import FDC
from fdc_jax.data.benchmarks import BENCHMARKS
from fdc_jax.errors import InputError, counted
from fdc_jax.machine.files import named_path, write_json
from fdc_jax.report import analysis, paper, quantities
from fdc_jax.run.configuration import NOT_COMPARED
from fdc_jax.run.saved import open_run

# The paper's settings by field, and what it leaves open by default.
_EXPECTED: dict[str, Any] = (
    paper.NUMBERS["protocol"]["fields"] | paper.NUMBERS["protocol"]["unstated"]
)


@dataclasses.dataclass(frozen=True)
class Group:
    """Finished runs that differ in nothing but the seed."""

    benchmark: str
    learner: str
    # What differs from the paper's protocol, in words; empty when nothing does. Of a benchmark that
    # the paper does not have, differences of the method alone.
    title: str
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
        """Calibrators that stand side by side, by name, `raw` and FDC first."""
        names = [name for run in self.runs for name in run.results["accuracy"]]
        first = [name for name in ("raw", FDC.name) if name in names]
        return [name for name in dict.fromkeys(first + names) if name != "oracle"]

    @property
    def name(self) -> str:
        """Learner, benchmark and what differs from the protocol, for captions."""
        parts = learners.title(self.learner), paper.benchmark_title(self.benchmark), self.title
        return ", ".join(filter(None, parts))

    def values(self, name: str) -> list[float]:
        """Returns a quantity of every seed that has it."""
        return self.numbers[name].dropna().tolist() if name in self.numbers else []

    @property
    def leading(self) -> dict[str, str]:
        """Methods by what they stand for, without those that the group does not have.

        `best` is the best calibrator of the run but for those on frozen features, of which
        `untrained` is the best; with `fdc`, unless it is the best, `raw` and `oracle`.
        """

        def best(names: Iterable[str]) -> str | None:
            known = [name for name in names if self.values(name)]
            return max(known, key=lambda name: np.mean(self.values(name)), default=None)

        frozen = {name for name in self.methods if name.endswith("-pretrained")}
        own = best(name for name in self.methods if name != "raw" and name not in frozen)
        roles = {
            "best": own,
            FDC.name: best([FDC.name]) if own != FDC.name else None,
            "raw": "raw",
            "untrained": best(sorted(frozen.union(analysis.UNTRAINED))),
            "oracle": "oracle",
        }
        return {role: name for role, name in roles.items() if name}

    def gain(self, method: str, over: str | None = "raw") -> evaluation.Gain | None:
        """Returns the gain of a method over another one with its 95 % interval.

        Several seeds: Student's t over gains paired within seeds. One seed, or a gain that no seed
        changes, as on frozen features: over the test images of the first seed, None if predictions
        were not kept. Over None: the accuracy itself.
        """
        of_seeds = self.numbers.assign(none=0.0).reindex(columns=[over or "none", method]).dropna()
        gains = of_seeds.iloc[:, 1] - of_seeds.iloc[:, 0]
        if gains.nunique() > 1:
            return evaluation.student(gains, 0.0 if over is None else -100.0, 100.0)
        columns = predictions(self.runs[0])
        if f"{method}_label" not in columns:
            return None
        label, chosen = columns["label"], columns[f"{method}_label"]
        if over is None:
            return evaluation.share_of(chosen == label)
        return evaluation.sample_gain(label, columns[f"{over}_label"], chosen)

    def record(self, quantity: str, other: paper.Published | None = None) -> dict[str, Any]:
        """Returns a quantity that a seed has with intervals of 95 %, beside another number.

        The interval of accuracies and gains of calibrators is that of `gain`, any other one is
        Student's t over seeds, that of the difference Welch's. Where the other number has seeds of
        ours, both are of these alone, and the difference is paired. None stands for what is not
        known.
        """
        values: Any = self.numbers[quantity].dropna()
        calibrator, kind = quantities.split(quantity)
        own = evaluation.student(values, *quantities.bounds(quantity))
        if kind in ("accuracy", "gain") and quantity != "gain:raw":
            interval = self.gain(calibrator, "raw" if kind == "gain" else None) or own
            own = own._replace(low=interval.low, high=interval.high)
        gap = other and evaluation.welch(values, other.mean, other.std, other.n)
        if other and (paired := [seed for seed in values.index if seed in other.by_seed]):
            values, seeds = values[paired], [other.by_seed[seed] for seed in paired]
            own, gap = evaluation.student(values), evaluation.student(values - seeds)
            other = paper.Published(*evaluation.mean_and_std(seeds), len(seeds))
        row = {
            **{"calibrator": calibrator, "quantity": kind},
            **{"mean": own.mean, "std": own.std, "n": len(values)},
            **{"low": own.low, "high": own.high},
            **{"paper_mean": other and other.mean, "paper_std": other and other.std},
            **{"difference": gap and gap.mean},
            **{"difference_low": gap and gap.low, "difference_high": gap and gap.high},
        }
        return {name: None if cell != cell else cell for name, cell in row.items()}


def load(
    paths: Iterable[str | os.PathLike[str]],
    data: str | None = None,
    hosts: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> tuple[list[Group], dict[Path, str]]:
    """Opens run folders; a folder stands for all run folders at any depth in it.

    Folders that cannot be used are named with the reason and do not stop the others. Of two runs
    with the same benchmark, learner, seed and settings the first counts. `data` is that of
    `fdc_jax.open_run`, and `hosts` has its `host` by benchmark.

    Returns:
        Groups, in the paper's order and of its protocol first; and unusable folders with reasons.
    """
    skipped: dict[Path, str] = {}
    opened: dict[tuple[str, int], Any] = {}
    named = [named_path("run", path) for path in paths]
    folders = [folder for path in named for folder in _runs_in(path) or [path]]
    for folder in {os.path.realpath(folder): folder for folder in folders}.values():
        try:
            run: Any = open_run(folder, data)
            if host := hosts.get(run.config["benchmark"]):
                run = open_run(folder, data, host=host)
            if run.results is None:
                done = counted(len(list(folder.glob("tasks/task_*.json"))), "task")
                raise InputError(f"unfinished: no results.json, {done} done")
            predictions(run)
        except InputError as error:
            skipped[folder] = str(error)
            continue
        first = opened.setdefault((_experiment(run.results), run.results["seed"]), run)
        if first is not run:
            skipped[folder] = (
                f"same benchmark, learner, seed and settings as {first.folder}, but for what moves "
                "no number of the paper's"
            )
    return group(list(opened.values())), skipped


def _runs_in(path: Path) -> list[Path]:
    """Returns the run folders at any depth below a folder, which may be one itself."""
    if (path / "config.json").exists():
        return [path]
    children = [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []
    children.sort(key=lambda child: (len(child.name), child.name))
    return [run for child in children for run in _runs_in(child)]


def predictions(run: Any) -> dict[str, Int[np.ndarray, " n"]]:
    """Returns labels and tasks out of `predictions.npz`, and labels of `analysis.untrained`."""
    columns = run.predictions if run.predictions_file.exists() else {}
    columns = analysis.untrained(run) | columns
    return {name: of for name, of in columns.items() if name.endswith(("label", "task"))}


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
        seeds = pd.Index([run.results["seed"] for run in alike], name="seed")
        numbers = pd.DataFrame([_numbers(run) for run in alike], index=seeds)
        groups.append(Group(of["benchmark"], of["learner"], title, alike, numbers))
    return sorted((_distinguished(of, groups) for of in groups), key=_order)


def _numbers(run: Any) -> dict[str, float]:
    untrained = {
        name.removesuffix("_label"): evaluation.accuracy(run.predictions["label"], labels)
        for name, labels in analysis.untrained(run).items()
    }
    return quantities.measured(run.results, untrained, run.read_latency())


def _experiment(results: dict[str, Any]) -> str:
    """Returns what runs of one group have in common."""
    return json.dumps([results["benchmark"], results["learner"], settings(results)], sort_keys=True)


def _order(group: Group) -> tuple[Any, ...]:
    known = [*learners.names(), *BENCHMARKS]
    ranks = {name: rank for rank, name in enumerate(known)}
    names = (group.learner, group.benchmark)
    return *((ranks.get(name, len(known)), name) for name in names), group.title


def _distinguished(group: Group, groups: Sequence[Group]) -> Group:
    """Adds to a title the fields in which groups of the same title differ."""
    key = (group.benchmark, group.learner, group.title)
    alike = [of for of in groups if (of.benchmark, of.learner, of.title) == key]
    fields = pd.DataFrame([settings(of.results) for of in alike]).astype(str)
    own = settings(group.results)
    differing = [
        f"{field} {str(own.get(field, 'not recorded'))[:40]}"
        for field in fields.columns[fields.nunique() > 1].difference(["encoder.weights"])
    ]
    title = ", ".join(filter(None, [group.title, *differing]))
    return dataclasses.replace(group, title=title)


def analyse(group: Group, sweep: analysis.Sweep | None = None) -> None:
    """Fills the analyses of a group and their numbers, and a line per reason why some are missing.

    Args:
        group: of `load`.
        sweep: values of settings of FDC by name. By default the paper's, for the learner whose
            sweeps the paper shows.
    """
    if sweep is None:
        sweep = analysis.VALUES if group.learner == "cumulative_lora" else {}
    missing: dict[str, None] = {}
    for run in group.runs:
        try:
            results, numbers = analysis.of_run(run, sweep, run is group.runs[0])
        except InputError as error:
            missing[f"no diagnostics or sweeps: {error}"] = None
            continue
        if "similarity" not in results:
            missing["no similarity: a single task"] = None
        for name, result in results.items():
            group.analyses.setdefault(name, []).append(result)
        for name, number in numbers.items():
            group.numbers.loc[run.results["seed"], name] = number
    group.missing.extend(missing)


def write_summary(group: Group) -> None:
    """Writes `results.json` of all seeds beside the folders of the seeds, if they lie together."""
    folders = {run.folder.absolute().parent for run in group.runs}
    named = all(run.folder.name == f"seed_{run.results['seed']}" for run in group.runs)
    if not named or len(folders) > 1 or len(group.runs) < 2:
        return
    fields = ("benchmark", "learner", "class_order_seed", "num_tasks", "num_classes", "versions")
    summary = {name: group.results.get(name) for name in fields}
    summary["config"] = group.results["config"] | {"seed": group.seeds}
    summary |= {"seeds": group.seeds, "settings": group.title}
    summary["numbers"] = {
        name: group.record(name, paper.find(group.benchmark, group.learner, name))
        | {"by_seed": {str(seed): value for seed, value in group.numbers[name].dropna().items()}}
        for name in group.numbers
    }
    write_json(folders.pop() / "results.json", summary)


# Settings ----------------------------------------------------------------------------------------


def settings(results: dict[str, Any]) -> dict[str, Any]:
    """Returns everything that the numbers of a `results.json` depend on but its seed, by field.

    Options of other learners are left out; of a field that is absent, the paper's value stands.
    """
    benchmark, learner = results["benchmark"], results["learner"]
    options = learners.options(learner)
    values = _EXPECTED | {name: each.default_on(benchmark) for name, each in options.items()}
    values |= {
        field: value
        for field, value in results["config"].items()
        if field not in NOT_COMPARED and not learners.of_another(field, learner)
    }
    encoder, data = (results.get(section) or {} for section in ("encoder", "data"))
    values |= {f"encoder.{name}": encoder.get(name) for name in ("sha256", "weights")}
    values |= {f"data.{name}": data.get(name) for name in ("train_sha256", "test_sha256")}
    values |= {name: results.get(name) for name in ("split", "num_train_images", "num_test_images")}
    return dict(sorted(values.items()))


def deviations(benchmark: str, learner: str, values: dict[str, Any]) -> list[str]:
    """Says what departs from the paper's protocol, and from what it leaves open.

    Of a benchmark that the paper does not have, only settings of learner and FDC are compared.
    """
    expected, sizes = _EXPECTED, paper.sizes(benchmark)
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
    weights, patterns = values["encoder.weights"], paper.NUMBERS["protocol"]["weights"]
    same_size = values["encoder.variant"] == expected.get("encoder.variant")
    if weights and same_size and not any(fnmatch.fnmatch(weights, each) for each in patterns):
        phrases.append(f"weights {weights}")
    return phrases + learners.deviations(learner, values | {"benchmark": benchmark})
