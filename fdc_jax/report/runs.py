"""Groups of finished runs that differ in the seed alone, and their settings."""

import dataclasses
import fnmatch
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Int

from fdc_jax import evaluation, learners
from fdc_jax.calibration import FDC
from fdc_jax.data.benchmarks import BENCHMARKS
from fdc_jax.errors import InputError
from fdc_jax.machine.files import named_path, write_json
from fdc_jax.report import analysis, paper, quantities
from fdc_jax.report.reference import Published
from fdc_jax.run.configuration import COMPARED
from fdc_jax.run.records import Results
from fdc_jax.run.saved import open_run

# Settings of the paper, and defaults of settings that it leaves open, by field.
_EXPECTED: dict[str, Any] = (
    paper.NUMBERS["protocol"]["fields"] | paper.NUMBERS["protocol"]["unstated"]
)


class Row(NamedTuple):
    """A quantity of a group beside the paper's or another number; None if a number is not known."""

    benchmark: str
    learner: str
    calibrator: str
    quantity: str  # kind, see `quantities.split`
    mean: float = math.nan
    std: float | None = None  # sample deviation over seeds
    n: int | None = None  # number of seeds
    low: float | None = None  # of the 95 % interval
    high: float | None = None
    paper_mean: float | None = None
    paper_std: float | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    settings: str = ""  # title of the group


@dataclasses.dataclass(frozen=True)
class Group:
    """Finished runs that differ in nothing but the seed."""

    benchmark: str
    learner: str
    # Departures from the paper's protocol in words, or "". On a benchmark that the paper does not
    # have, departures of learner and FDC alone.
    title: str
    runs: list[Any]  # by ascending seed, as `fdc_jax.open_run` returns them
    numbers: pd.DataFrame  # a row per seed, a column per quantity of `quantities.measured`, or NaN
    # Results of `report.analysis` by name, one for every seed with suitable features.
    analyses: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    missing: list[str] = dataclasses.field(default_factory=list)  # reasons for missing analyses

    @property
    def results(self) -> Results:
        """`results.json` of the first seed."""
        return self.runs[0].results

    @property
    def seeds(self) -> list[int]:
        """Training seeds."""
        return self.numbers.index.tolist()

    @property
    def methods(self) -> list[str]:
        """Names of `raw` and of the calibrators, FDC first."""
        names = [name for run in self.runs for name in run.results.accuracy]
        first = [name for name in ("raw", FDC.name) if name in names]
        return [name for name in dict.fromkeys(first + names) if name != "oracle"]

    @property
    def name(self) -> str:
        """Learner, benchmark and departures from the protocol, for captions."""
        parts = learners.title(self.learner), paper.benchmark_title(self.benchmark), self.title
        return ", ".join(filter(None, parts))

    def values(self, name: str) -> list[float]:
        """Returns a quantity of every seed that has it."""
        return self.numbers[name].dropna().tolist() if name in self.numbers else []

    @property
    def best(self) -> str:
        """Name of the most accurate calibrator on trained features, or `raw` if it beats all."""
        names = [n for n in self.methods if n != "raw" and not n.endswith("-pretrained")]
        return self._most_accurate([*names, "raw"]) or self.methods[0]

    @property
    def untrained(self) -> str | None:
        """Name of the most accurate calibrator on frozen features, None if there is none."""
        frozen = {name for name in self.methods if name.endswith("-pretrained")}
        return self._most_accurate(sorted(frozen.union(analysis.UNTRAINED)))

    def _most_accurate(self, names: Iterable[str]) -> str | None:
        measured = filter(self.values, names)
        return max(measured, key=lambda name: np.mean(self.values(name)), default=None)

    def gain(self, method: str, over: str | None = "raw") -> evaluation.Gain | None:
        """Returns the gain of a method over another one; if `over` is None, the method's accuracy.

        The interval is Student's t over seeds, paired by seed. If all seeds have the same gain, it
        is over the test images of the first seed, or None if that seed has no predictions.
        """
        by_seed = self.numbers.assign(none=0.0).reindex(columns=[over or "none", method]).dropna()
        gains = by_seed.iloc[:, 1] - by_seed.iloc[:, 0]
        if gains.nunique() > 1:
            return evaluation.student(gains, 0.0 if over is None else -100.0, 100.0)
        columns = predictions(self.runs[0])
        if not {f"{name}_label" for name in (method, over or method)} <= columns.keys():
            return None
        label, predicted = columns["label"], columns[f"{method}_label"]
        if over is None:
            return evaluation.share_of(predicted == label)
        return evaluation.sample_gain(label, columns[f"{over}_label"], predicted)

    def record(self, quantity: str, other: Published | None = None) -> Row:
        """Returns mean, deviation and interval of a quantity, beside another number.

        Accuracies and gains have the interval of `gain`, other quantities Student's t over seeds,
        and the difference Welch's. If the other number has values of our seeds, both numbers are
        means over these seeds, and the difference is paired.
        """
        values: Any = self.numbers[quantity].dropna()
        calibrator, kind = quantities.split(quantity)
        ours = evaluation.student(values, *quantities.bounds(quantity))
        if kind in ("accuracy", "gain") and quantity != "gain:raw":
            interval = self.gain(calibrator, "raw" if kind == "gain" else None) or ours
            ours = ours._replace(low=interval.low, high=interval.high)
        gap = other and evaluation.welch(values, other.mean, other.std, other.n)
        if other and (paired := [seed for seed in values.index if seed in other.by_seed]):
            values, seeds = values[paired], [other.by_seed[seed] for seed in paired]
            ours, gap = evaluation.student(values), evaluation.student(values - seeds)
            other = Published(*evaluation.mean_and_std(seeds), len(seeds))
        row = Row(
            benchmark=self.benchmark,
            learner=self.learner,
            calibrator=calibrator,
            quantity=kind,
            mean=ours.mean,
            std=ours.std,
            n=len(values),
            low=ours.low,
            high=ours.high,
            paper_mean=other and other.mean,
            paper_std=other and other.std,
            difference=gap and gap.mean,
            difference_low=gap and gap.low,
            difference_high=gap and gap.high,
            settings=self.title,
        )
        unknown = {name for name, cell in row._asdict().items() if cell != cell}
        return row._replace(**dict.fromkeys(unknown))


def load(
    paths: Iterable[str | os.PathLike[str]],
    data: str | None = None,
    hosts: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> tuple[list[Group], dict[Path, str]]:
    """Opens the runs in folders, at any depth, and groups them.

    Of two runs with the same benchmark, learner, seed and settings the first counts.

    Args:
        paths: run folders, or folders of run folders.
        data: see `fdc_jax.open_run`.
        hosts: argument `host` of `fdc_jax.open_run`, by benchmark.

    Returns:
        Groups in the paper's order, and the reason for every folder that cannot be used.
    """
    skipped: dict[Path, str] = {}
    opened: dict[tuple[str, int], Any] = {}
    for folder in folders(paths):
        try:
            run: Any = open_run(folder, data)
            if host := hosts.get(run.config.benchmark):
                run = open_run(folder, data, host=host)
            if run.results is None:
                raise InputError(run.unfinished)
            predictions(run)
        except InputError as error:
            skipped[folder] = str(error)
            continue
        first = opened.setdefault((_experiment(run.results), run.results.seed), run)
        if first is not run:
            skipped[folder] = (
                f"same benchmark, learner, seed and settings as {first.folder}, except settings "
                "that change no number of the paper's tables"
            )
    return group(list(opened.values())), skipped


def folders(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Returns the run folders at and below paths, each once; a path without a run stands for it."""
    named = [named_path("run", path) for path in paths]
    found = [folder for path in named for folder in _runs_in(path) or [path]]
    return [*{os.path.realpath(folder): folder for folder in found}.values()]


def _runs_in(path: Path) -> list[Path]:
    """Returns the run folders at any depth below a folder, which may be one itself."""
    if (path / "config.json").exists():
        return [path]
    children = [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []
    children.sort(key=lambda child: (len(child.name), child.name))
    return [run for child in children for run in _runs_in(child)]


def predictions(run: Any) -> dict[str, Int[np.ndarray, " n"]]:
    """Returns labels and tasks of `predictions.npz`, and labels of `analysis.untrained`."""
    columns = analysis.untrained(run) | (run.predictions if run.predictions_file.exists() else {})
    return {name: rows for name, rows in columns.items() if name.endswith(("label", "task"))}


# Groups ------------------------------------------------------------------------------------------


def group(runs: Sequence[Any]) -> list[Group]:
    """Groups opened runs that differ in the seed alone, in the order of `load`."""
    members: dict[str, list[Any]] = {}
    for run in sorted(runs, key=lambda run: run.results.seed):
        members.setdefault(_experiment(run.results), []).append(run)
    groups = []
    for alike in members.values():
        first = alike[0].results
        names = first.benchmark, first.learner
        seeds = pd.Index([run.results.seed for run in alike], name="seed")
        numbers = pd.DataFrame([_numbers(run) for run in alike], index=seeds)
        groups.append(Group(*names, ", ".join(deviations(*names, settings(first))), alike, numbers))
    return sorted((_distinguished(group, groups) for group in groups), key=_order)


def _numbers(run: Any) -> dict[str, float]:
    untrained = {
        name.removesuffix("_label"): evaluation.accuracy(run.predictions["label"], labels)
        for name, labels in analysis.untrained(run).items()
    }
    return quantities.measured(run.results, untrained, run.read_latency())


def _experiment(results: Results) -> str:
    """Returns benchmark, learner and settings as text, the same for the runs of a group."""
    return json.dumps([results.benchmark, results.learner, settings(results)], sort_keys=True)


def _order(group: Group) -> tuple[Any, ...]:
    order, names = [*learners.names(), *BENCHMARKS], (group.learner, group.benchmark)
    ranks = [order.index(name) if name in order else len(order) for name in names]
    return *zip(ranks, names, strict=True), group.title


def _distinguished(group: Group, groups: Sequence[Group]) -> Group:
    """Adds to the title of a group the fields in which groups of the same name differ."""
    compared = [settings(other.results) for other in groups if other.name == group.name]
    fields = pd.DataFrame(compared).astype(str)
    values = settings(group.results)
    differing = [
        f"{field} {str(values.get(field, 'not recorded'))[:40]}"
        for field in fields.columns[fields.nunique() > 1].difference(["encoder.weights"])
    ]
    title = ", ".join(filter(None, [group.title, *differing]))
    return dataclasses.replace(group, title=title)


def analyse(group: Group, sweep: analysis.Sweep | None = None) -> None:
    """Fills `analyses`, their `numbers` and `missing` of a group.

    `sweep` has values of settings of FDC by name, by default the paper's for Cumulative-LoRA.
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
            group.numbers.loc[run.results.seed, name] = number
    group.missing.extend(missing)


def write_summary(group: Group) -> None:
    """Writes `results.json` of all seeds beside the folders of the seeds, if all share a parent."""
    folders = {run.folder.absolute().parent for run in group.runs}
    standard = all(run.folder.name == f"seed_{run.results.seed}" for run in group.runs)
    if not standard or len(folders) > 1 or len(group.runs) < 2:
        return
    fields = ("benchmark", "learner", "class_order_seed", "num_tasks", "num_classes", "versions")
    summary = {name: getattr(group.results, name) for name in fields}
    summary["config"] = group.results.config | {"seed": group.seeds}
    summary |= {"seeds": group.seeds, "settings": group.title}
    summary["numbers"] = {}
    for name in group.numbers:
        row = group.record(name, paper.find(group.benchmark, group.learner, name))._asdict()
        for label in ("benchmark", "learner", "settings"):
            del row[label]
        values = group.numbers[name].dropna()
        row["by_seed"] = {str(seed): value for seed, value in values.items()}
        summary["numbers"][name] = row
    write_json(folders.pop() / "results.json", summary)


# Settings ----------------------------------------------------------------------------------------


def settings(results: Results) -> dict[str, Any]:
    """Returns all settings that change numbers of a `results.json`, except its seed, by field.

    An absent field has the paper's value.
    """
    benchmark, learner = results.benchmark, results.learner
    prefix, options = learners.section(learner), learners.default_options(learner, benchmark)
    values = _EXPECTED | {f"learner.{prefix}.{name}": value for name, value in options.items()}
    # Fields of earlier versions are left out, since they have no effect.
    values |= {
        field: value
        for field, value in results.config.items()
        if field in COMPARED or field.startswith(f"learner.{prefix}.")
    }
    values |= {
        "encoder.sha256": results.encoder and results.encoder.sha256,
        "encoder.weights": results.encoder and results.encoder.weights,
        "data.train_sha256": results.data.train_sha256,
        "data.test_sha256": results.data.test_sha256,
        "split": results.split,
        "num_train_images": results.num_train_images,
        "num_test_images": results.num_test_images,
    }
    return dict(sorted(values.items()))


def deviations(benchmark: str, learner: str, values: dict[str, Any]) -> list[str]:
    """Returns departures from the paper's protocol and from our defaults, as phrases.

    On a benchmark that the paper does not have, only settings of learner and FDC are compared.
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
    if weights and same_size and not any(fnmatch.fnmatch(weights, name) for name in patterns):
        phrases.append(f"weights {weights}")
    return phrases + learners.deviations(learner, values | {"benchmark": benchmark})
