"""Groups of finished runs that differ in the seed alone, and their settings."""

# The stubs of pandas take columns for arrays, scalars or series.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false

import dataclasses
import fnmatch
import functools
import itertools
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
from fdc_jax.errors import InputError
from fdc_jax.machine.files import named_path, write_json
from fdc_jax.report import analysis, paper, quantities, rows
from fdc_jax.run.configuration import COMPARED
from fdc_jax.run.records import Results
from fdc_jax.run.saved import open_run

# Settings of the paper, and defaults of settings that it leaves open, by field.
_EXPECTED: dict[str, Any] = (
    paper.NUMBERS["protocol"]["fields"] | paper.NUMBERS["protocol"]["unstated"]
)


@dataclasses.dataclass(frozen=True)
class Group:
    """Finished runs that differ in nothing but the seed."""

    benchmark: str
    learner: str
    # Departures from the paper's protocol in words, or "". On a benchmark that the paper does not
    # have, departures of learner and FDC alone.
    title: str
    runs: list[Any]  # by ascending seed, as `fdc_jax.open_run` returns them
    numbers: pd.DataFrame  # see `rows`
    # Results of `report.analysis` by name, one for every seed with suitable features.
    analyses: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    missing: list[str] = dataclasses.field(default_factory=list)  # reasons for missing analyses

    @property
    def results(self) -> Results:
        """`results.json` of the first seed."""
        return self.runs[0].results

    @property
    def has_images(self) -> bool:
        """False if the numbers come from features (`fdc posthoc`)."""
        return self.results.encoder is not None

    @property
    def seeds(self) -> list[int]:
        """Training seeds."""
        return [run.results.seed for run in self.runs]

    @property
    def methods(self) -> list[str]:
        """Names of `raw` and of the calibrators, FDC first."""
        names = [*itertools.chain.from_iterable(run.results.accuracy for run in self.runs)]
        first = [name for name in ("raw", FDC.name) if name in names]
        return [name for name in dict.fromkeys(first + names) if name != "oracle"]

    @property
    def name(self) -> str:
        """Learner, benchmark and departures from the protocol, for captions."""
        parts = learners.title(self.learner), paper.benchmark_title(self.benchmark), self.title
        return ", ".join(filter(None, parts))

    @functools.cached_property
    def rows(self) -> pd.DataFrame:
        """Rows of `rows.with_published` beside the paper's, by calibrator and quantity."""
        compared = rows.with_published(self.summary, self.numbers, paper.published()).reset_index()
        return compared.set_index(["calibrator", "quantity"], drop=False)

    @functools.cached_property
    def summary(self) -> pd.DataFrame:
        """Means over seeds with intervals, see `rows.summarise`.

        Accuracies and gains without an interval over seeds have that of `gain`.
        """
        table = rows.summarise(self.numbers)
        for key in table.index[table["low"].isna()]:
            calibrator, quantity = key[2:4]
            if quantity == "accuracy" or (quantity == "gain" and calibrator != "raw"):
                over = "raw" if quantity == "gain" else None
                if interval := self._gain_over_images(calibrator, over):
                    table.loc[key, ["low", "high"]] = interval.low, interval.high
        return table

    def has(self, calibrator: str, quantity: str = "accuracy") -> bool:
        """Returns True if a seed has the quantity."""
        return (calibrator, quantity) in self.rows.index

    def row(self, calibrator: str, quantity: str = "accuracy") -> Any:
        """Returns a row of `rows`."""
        return self.rows.loc[calibrator, quantity]

    @functools.cached_property
    def _by_seed(self) -> dict[Any, pd.Series]:
        """The numbers by calibrator and quantity, each by seed."""
        names = ["calibrator", "quantity"]
        return dict([*self.numbers.set_index("seed").groupby(names)["value"]])

    def values(self, calibrator: str, quantity: str = "accuracy") -> pd.Series:
        """Returns a quantity by seed, of the seeds that have it."""
        return self._by_seed.get((calibrator, quantity), pd.Series(dtype=float))

    @property
    def best(self) -> str:
        """Name of the most accurate calibrator on trained features, or `raw` if it beats all."""
        return self.leading[0]

    @functools.cached_property
    def leading(self) -> list[str]:
        """Names of the most accurate methods on trained features, several if they are equal."""
        names = [name for name in self.methods if not name.endswith("-pretrained")]
        accuracies = {name: self.row(name)["mean"] for name in names if self.has(name)}
        highest = max(accuracies.values(), default=0.0)
        leading = [name for name in accuracies if accuracies[name] == highest]
        # Equal to raw logits, a calibrator answers.
        return sorted(leading, key=lambda name: name == "raw") or self.methods[:1]

    @property
    def known(self) -> bool:
        """True for the paper's benchmarks and the digits, whose reports begin as the paper does."""
        return self.benchmark in BENCHMARKS

    @property
    def headline(self) -> str:
        """Name of the method that a report begins with: FDC, or the best one on other images."""
        return FDC.name if self.known and FDC.name in self.methods else self.best

    @property
    def untrained(self) -> str | None:
        """Name of the most accurate calibrator on frozen features, None if there is none."""
        frozen = {name for name in self.methods if name.endswith("-pretrained")}
        names = filter(self.has, sorted(frozen.union(analysis.UNTRAINED)))
        return max(names, key=lambda name: self.row(name)["mean"], default=None)

    def gain(self, method: str, over: str = "raw") -> evaluation.Gain | None:
        """Returns the gain of a method over another one.

        The interval is Student's t over seeds, paired by seed. If all seeds have the same gain, it
        is over the test images of the first seed, or None if that seed has no predictions.
        """
        gains = (self.values(method) - self.values(over)).dropna()
        if gains.nunique() > 1:
            return evaluation.student(gains, -100.0, 100.0)
        return self._gain_over_images(method, over)

    def _gain_over_images(self, method: str, over: str | None) -> evaluation.Gain | None:
        """Returns the gain on the test images of the first seed, or the accuracy without `over`."""
        columns = predictions(self.runs[0])
        if not {f"{name}_label" for name in (method, over or method)} <= columns.keys():
            return None
        label = columns["label"]
        predicted = columns[f"{method}_label"]
        if over is None:
            return evaluation.share_of(predicted == label)
        return evaluation.sample_gain(label, columns[f"{over}_label"], predicted)


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
    listed = itertools.chain.from_iterable(_runs_in(path) or [path] for path in named)
    return [*{os.path.realpath(folder): folder for folder in listed}.values()]


def _runs_in(path: Path) -> list[Path]:
    """Returns the run folders at any depth below a folder, which may be one itself."""
    if (path / "config.json").exists():
        return [path]
    children = [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []
    children.sort(key=lambda child: (len(child.name), child.name))
    return [*itertools.chain.from_iterable(map(_runs_in, children))]


def predictions(run: Any) -> dict[str, Int[np.ndarray, " n"]]:
    """Returns labels and tasks of `predictions.npz`, and labels of `analysis.untrained_labels`."""
    columns = analysis.untrained_labels(run) | (
        run.predictions if run.predictions_file.exists() else {}
    )
    return {name: rows for name, rows in columns.items() if name.endswith(("label", "task"))}


def accuracy_matrices(group: Group, method: str) -> dict[int, pd.DataFrame]:
    """Returns by seed the accuracy in percent after a task (row) on every task (column), from 1."""
    matrices = {}
    for run in group.runs:
        points = run.results.curve
        rows = [
            dict(enumerate(point.task_accuracy[method], 1)) if method in point.task_accuracy else {}
            for point in points
        ]
        after = pd.DataFrame(rows, [point.task + 1 for point in points], dtype=float)
        matrices[run.results.seed] = after.rename_axis(index="after", columns="task")
    return matrices


def transfer(matrix: pd.DataFrame) -> dict[str, float]:
    """Returns forgetting and backward transfer in points; empty unless all tasks were evaluated.

    Both are means over all tasks except the last. Forgetting is the best earlier accuracy minus the
    final one (Chaudhry et al., "Riemannian Walk for Incremental Learning", 2018); backward transfer
    the final accuracy minus the one right after the task (Lopez-Paz and Ranzato, "Gradient Episodic
    Memory for Continual Learning", 2017).
    """
    count = len(matrix)
    if count < 2 or matrix.shape != (count, count):
        return {}
    values = matrix.to_numpy()[:, :-1]
    best = np.fmax.reduce(values[:-1])
    gained = values[-1] - np.diag(values)
    return {
        "Forgetting": float(np.nanmean(best - values[-1])),
        "Backward transfer": float(np.nanmean(gained)),
    }


# Groups ------------------------------------------------------------------------------------------


def group(runs: Sequence[Any]) -> list[Group]:
    """Groups opened runs that differ in the seed alone, in the order of `load`."""
    members: dict[str, list[Any]] = {}
    for run in sorted(runs, key=lambda run: run.results.seed):
        members.setdefault(_experiment(run.results), []).append(run)
    groups = []
    for alike in members.values():
        first = alike[0].results
        title = ", ".join(deviations(first.benchmark, first.learner, settings(first)))
        numbers = pd.concat([_numbers(run) for run in alike], ignore_index=True)
        groups.append(Group(first.benchmark, first.learner, title, alike, numbers))
    return sorted((_distinguished(group, groups) for group in groups), key=_order)


def _numbers(run: Any) -> pd.DataFrame:
    untrained = {
        name.removesuffix("_label"): evaluation.accuracy(run.predictions["label"], labels)
        for name, labels in analysis.untrained_labels(run).items()
    }
    numbers = quantities.measured(run.results, untrained, run.read_latency())
    return _of_run(numbers, run.results)


def _of_run(numbers: pd.DataFrame, results: Results) -> pd.DataFrame:
    """Adds the columns that the numbers of a run have in common, except `settings`."""
    names = {"benchmark": results.benchmark, "learner": results.learner, "seed": results.seed}
    return numbers.assign(**names)


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
    return dataclasses.replace(group, title=title, numbers=group.numbers.assign(settings=title))


def analyse(group: Group, sweep: analysis.Sweep | None = None) -> Group:
    """Returns a group with `analyses`, their `numbers`, and `missing`.

    `sweep` has values of settings of FDC by name, by default the paper's for Cumulative-LoRA.
    """
    if sweep is None:
        sweep = analysis.VALUES if group.learner == "cumulative_lora" else {}
    missing: dict[str, None] = {}
    analyses: dict[str, list[Any]] = {}
    added = []
    for run in group.runs:
        try:
            results, numbers = analysis.of_run(run, sweep, run is group.runs[0])
        except InputError as error:
            missing[f"no diagnostics or sweeps: {error}"] = None
            continue
        if "similarity" not in results:
            missing["no similarity: a single task"] = None
        for name, result in results.items():
            analyses.setdefault(name, []).append(result)
        added.append(_of_run(numbers, run.results).assign(settings=group.title))
    numbers = pd.concat([group.numbers, *added], ignore_index=True)
    return dataclasses.replace(group, numbers=numbers, analyses=analyses, missing=[*missing])


def write_summary(group: Group) -> None:
    """Writes `results.json` of all seeds beside the folders of the seeds, if all share a parent."""
    folders = {run.folder.absolute().parent for run in group.runs}
    standard = all(run.folder.name == f"seed_{run.results.seed}" for run in group.runs)
    if standard and len(folders) == 1 and len(group.runs) > 1:
        write_json(folders.pop() / "results.json", summary(group))


def summary(group: Group) -> dict[str, Any]:
    """Returns names and versions of a group, and every number by its name, also by seed."""
    fields = ("benchmark", "learner", "class_order_seed", "num_tasks", "num_classes", "versions")
    summary = {name: getattr(group.results, name) for name in fields}
    summary["config"] = group.results.config | {"seed": group.seeds}
    summary |= {"seeds": group.seeds, "settings": group.title}
    summary["numbers"] = numbers = {}
    known = group.rows.drop(columns=["benchmark", "learner", "settings", "paper_n"])
    listed: Any = known.astype(object).iterrows()
    for (calibrator, quantity), row in listed:
        of = row.where(row.notna(), None).to_dict()
        of["by_seed"] = group.values(calibrator, quantity).rename(str).to_dict()
        numbers[quantities.column_name(calibrator, quantity)] = of
    return summary


# Settings ----------------------------------------------------------------------------------------


def settings(results: Results) -> dict[str, Any]:
    """Returns all settings that change numbers of a `results.json`, except its seed, by field.

    An absent field has the paper's value.
    """
    benchmark, learner = results.benchmark, results.learner
    prefix = learners.section(learner)
    options = learners.default_options(learner, benchmark)
    values = _EXPECTED | {f"learner.{prefix}.{name}": value for name, value in options.items()}
    # Fields of earlier versions are left out, since they have no effect.
    values |= {
        field: value
        for field, value in results.config.items()
        if field in COMPARED or field.startswith(f"learner.{prefix}.")
    }
    encoder, data = results.encoder, results.data
    values |= {
        "encoder.sha256": encoder and encoder.sha256,
        "encoder.weights": encoder and encoder.weights,
        "data.train_sha256": data.train_sha256,
        "data.test_sha256": data.test_sha256,
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
    for part, word, fields in (
        ("train", "training", ("data.train_per_class", "data.validation_share")),
        ("test", "test", ("data.test_per_class",)),
    ):
        count = values[f"num_{part}_images"]
        limited = any(values[field] for field in fields)
        if sizes and not limited and count not in (None, sizes[part]):
            phrases.append(f"{count:,} of {sizes[part]:,} {word} images")
    weights = values["encoder.weights"]
    patterns = paper.NUMBERS["protocol"]["weights"]
    same_size = values["encoder.variant"] == expected.get("encoder.variant")
    if weights and same_size and not any(fnmatch.fnmatch(weights, name) for name in patterns):
        phrases.append(f"weights {weights}")
    return phrases + learners.deviations(learner, values | {"benchmark": benchmark})
