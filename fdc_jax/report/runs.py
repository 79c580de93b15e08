"""Run folders: what they hold, which are usable, which belong together, what sets them apart."""

import contextlib
import dataclasses
import fnmatch
import functools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fdc_jax import evaluation, learners
from fdc_jax.calibration.components import COMPONENTS
from fdc_jax.data.benchmarks import BENCHMARKS
from fdc_jax.errors import InputError, counted
from fdc_jax.machine.files import read_npz
from fdc_jax.report import paper
from fdc_jax.run.configuration import WITHOUT_EFFECT


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A finished run: one seed of one configuration.

    Attributes:
        path: the folder.
        results: its `results.json`.
        analyses: by name, what `fdc_jax.report.analysis` computes from the saved features.
        missing: a line for each reason why some analyses are absent.
    """

    path: Path
    results: dict[str, Any]
    analyses: dict[str, Any] = dataclasses.field(default_factory=dict)
    missing: list[str] = dataclasses.field(default_factory=list)

    @property
    def seed(self) -> int:
        """Training seed."""
        return self.results["seed"]

    @property
    def features_path(self) -> Path | None:
        """Folder of saved features that includes the test images, or None."""
        folder = self.path / "features"
        return folder if (folder / "test_adapted.npy").exists() else None

    @functools.cached_property
    def predictions(self) -> dict[str, np.ndarray]:
        """The columns of `predictions.npz`, one row per test image; empty without it.

        Raises:
            InputError: the file is damaged or belongs to another run.
        """
        path = self.path / "predictions.npz"
        if not path.exists():
            return {}
        columns = read_npz(path)
        for name in _PREDICTIONS:
            if name not in columns:
                raise InputError(f"{path}: expected a column {name}, found none")
            rows = self.results.get("num_test_images", len(columns["label"]))
            if columns[name].shape != (rows,) or columns[name].dtype.kind not in "iu":
                raise InputError(
                    f"{path}: column {name}: expected {rows} integers, found "
                    f"{columns[name].dtype} of shape {columns[name].shape}"
                )
        return columns

    @functools.cached_property
    def gain_over_images(self) -> evaluation.Gain | None:
        """Gain of FDC over raw with a bootstrap interval; None without predictions."""
        of = self.predictions
        return (
            evaluation.bootstrap_gain(of["label"], of["raw_label"], of["fdc_label"]) if of else None
        )

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that the numbers depend on but the seed, by field."""
        return settings(self.results)

    @property
    def experiment(self) -> str:
        """What runs of one group have in common."""
        names = [self.results["benchmark"], self.results["learner"]]
        return json.dumps([*names, self.settings], sort_keys=True)

    def value(self, *keys: str) -> float | None:
        """Returns a number of the results by its path, such as ("accuracy", "raw"), or None."""
        found: Any = self.results
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return _number(found)

    def quantity(self, name: str) -> float | None:
        """Returns a number of `QUANTITIES`, or None where the run has not recorded it.

        Without a pretrained view, what is called the adapted view of a combination is all of it.
        """
        if name in _RESULTS:
            return self.value(*_RESULTS[name])
        if name == "logit_standardisation":
            return self.analyses.get(name, {}).get("change")
        kind, _, combination = _LONG.get(name, name).rpartition(":")
        combination = self.selected if combination == "selected" else combination
        if kind == "aia":
            if self.quantity("aia") is None:  # Not every task was evaluated.
                return None
            values = [_component(point, combination) for point in self.results.get("curve") or ()]
            known = [value for value in values if value is not None]
            return sum(known) / len(known) if known and len(known) == len(values) else None
        value = _component(self.results, combination)
        return value if value is None or not kind else value - self.results["accuracy"]["raw"]

    @property
    def selected(self) -> str:
        """Component combination that the paper selects for the learner."""
        return learners.selected(self.results["learner"])


# Quantities that lie in the results as they are: final accuracy in percent, task-routing accuracy,
# average incremental accuracy.
_RESULTS = {
    "raw": ("accuracy", "raw"),
    "fdc": ("accuracy", "fdc"),
    "oracle": ("accuracy", "oracle"),
    "routing_raw": ("routing_accuracy", "raw"),
    "routing_fdc": ("routing_accuracy", "fdc"),
    "aia": ("average_incremental_accuracy", "raw"),
    "aia_fdc": ("average_incremental_accuracy", "fdc"),
}
_LONG = {"gain": "gain:full", "selected_gain": "gain:selected"}
# Of full FDC, of the components that the paper selects for the learner ("selected"), and of a
# combination such as tsf+rlc: accuracy, and gain over raw in points ("gain:tsf+rlc"). "aia:tsf+rlc"
# and "logit_standardisation", a change in points, are asked for by tables alone.
QUANTITIES = (*_RESULTS, "selected", *_LONG)
QUANTITIES += tuple(prefix + name for prefix in ("", "gain:") for name in COMPONENTS)


def _number(found: Any) -> float | None:
    good = isinstance(found, int | float) and not isinstance(found, bool) and np.isfinite(found)
    return float(found) if good else None


def _component(of: dict[str, Any], name: str) -> float | None:
    """The accuracy of a combination in results, or in a point of their curve."""
    found = of["components"]
    if name not in found and "pretrained_view" not in found and name.endswith("adapted_view"):
        name = name.removesuffix("adapted_view").removesuffix("_") or "full"
    return _number(found.get(name))


class Group(NamedTuple):
    """Runs that differ in nothing but the seed.

    Attributes:
        benchmark: name of the benchmark.
        learner: name of the learner.
        title: what differs from the paper's protocol, in words; empty when nothing does. Of a
            benchmark that the paper does not have, differences of the method alone.
        follows_protocol: whether the paper's numbers are of the same experiment.
        runs: by ascending seed.
    """

    benchmark: str
    learner: str
    title: str
    follows_protocol: bool
    runs: list[RunFolder]

    @property
    def seeds(self) -> list[int]:
        """Training seeds."""
        return [run.seed for run in self.runs]

    @property
    def name(self) -> str:
        """Learner, benchmark and what differs from the protocol, for captions."""
        parts = (learners.title(self.learner), paper.benchmark_title(self.benchmark))
        return ", ".join((*parts, self.title) if self.title else parts)

    def values(self, name: str) -> list[float]:
        """Returns a quantity of every run that has it."""
        return [value for run in self.runs if (value := run.quantity(name)) is not None]

    def analyses(self, name: str) -> list[dict[str, Any]]:
        """Returns an analysis of every run that has it."""
        return [run.analyses[name] for run in self.runs if name in run.analyses]


class Skipped(NamedTuple):
    """A folder that could not be used, and why."""

    path: Path
    reason: str


class Loaded(NamedTuple):
    """What was found: groups, in the paper's order and of its protocol first; unusable folders."""

    groups: list[Group]
    skipped: list[Skipped]


_PREDICTIONS = (
    "label", "raw_label", "fdc_label", "oracle_label", "task", "raw_task", "fdc_task"
)  # fmt: skip

_REQUIRED = {"benchmark": str, "learner": str, "seed": int}
_REQUIRED |= dict.fromkeys(("accuracy", "components", "config"), dict)
_OPTIONAL = {"split": str, "curve": list}
_OPTIONAL |= dict.fromkeys(("encoder", "data", "timing", "versions"), dict)
_OPTIONAL |= dict.fromkeys(("num_tasks", "num_classes", "num_train_images", "num_test_images"), int)


def load(paths: Iterable[str | os.PathLike[str]]) -> Loaded:
    """Reads run folders; a folder of several seeds stands for its `seed_*` folders.

    Folders that cannot be used are named with the reason and do not stop the others. Of two runs
    with the same benchmark, learner, seed and settings the first counts.
    """
    skipped: list[Skipped] = []
    runs: dict[tuple[str, int], RunFolder] = {}
    folders = {each.resolve(): each for path in paths for each in _expand(Path(path))}
    for path in folders.values():
        try:
            run = _read(path)
        except InputError as error:
            skipped.append(Skipped(path, str(error)))
            continue
        first = runs.setdefault((run.experiment, run.seed), run)
        if first is not run:
            reason = f"same benchmark, learner, seed and settings as {first.path}"
            skipped.append(Skipped(path, f"{reason}, but for what moves no number of the paper's"))
    return Loaded(group(list(runs.values())), skipped)


def _expand(path: Path) -> list[Path]:
    if (path / "results.json").exists() or not path.is_dir():
        return [path]
    children = [child for child in path.glob("seed_*") if child.is_dir()]
    return sorted(children, key=lambda child: (len(child.name), child.name)) or [path]


def _read(path: Path) -> RunFolder:
    if not path.is_dir():
        raise InputError("expected a run folder, found " + ("a file" if path.exists() else "none"))
    file = path / "results.json"
    if not file.exists():
        if not (path / "config.json").exists():
            raise InputError("not a run folder: no results.json, config.json or seed_* folders")
        done = len(list((path / "tasks").glob("task_*.json")))
        raise InputError(f"unfinished: no results.json, {counted(done, 'task')} done")
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        _check(results)
    except InputError as error:
        raise InputError(f"results.json: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"results.json: unreadable ({error})") from error
    run = RunFolder(path, results)
    _ = run.predictions  # A damaged file is refused now rather than in the middle of the tables.
    with contextlib.suppress(InputError):  # A learner of the user's own may not be at hand.
        learners.find(results["learner"])
    return run


def _check(results: Any) -> None:
    """Refuses what is no `results.json` of a run."""
    if not isinstance(results, dict):
        raise InputError(f"expected an object, found {type(results).__name__}")
    for name, kind in (_REQUIRED | _OPTIONAL).items():
        value = results.get(name)
        if name in _OPTIONAL and value is None:
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(f"{name}: expected {kind.__name__}, found {value!r:.60}")
    for point in results.get("curve") or ():
        if not isinstance(point, dict) or not isinstance(point.get("components"), dict):
            raise InputError(
                f"curve: expected accuracies of components after every task, found {point!r:.60}"
            )
    for section, names in (("accuracy", ("raw", "fdc", "oracle")), ("components", None)):
        for name in names or results[section]:
            value = _number(found := results[section].get(name))
            if value is None or not 0 <= value <= 100:
                raise InputError(f"{section}.{name}: expected percent, found {found!r:.60}")


def group(runs: Sequence[RunFolder]) -> list[Group]:
    """Puts together the runs that differ in nothing but the seed, in the order of `Loaded`."""
    members: dict[str, list[RunFolder]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        members.setdefault(run.experiment, []).append(run)
    groups = []
    for alike in members.values():
        benchmark, learner = (alike[0].results[name] for name in ("benchmark", "learner"))
        title = ", ".join(deviations(benchmark, learner, alike[0].settings))
        follows = not title and benchmark in paper.benchmarks()
        groups.append(Group(benchmark, learner, title, follows, alike))
    return sorted((_told_apart(each, groups) for each in groups), key=_order)


def _order(each: Group) -> tuple[Any, ...]:
    def place(name: str, known: Iterable[str]) -> tuple[Any, ...]:
        names = list(known)
        return names.index(name) if name in names else len(names), name

    learner, benchmark = place(each.learner, learners.names()), place(each.benchmark, BENCHMARKS)
    return *learner, *benchmark, not each.follows_protocol, each.title


def _told_apart(each: Group, groups: Sequence[Group]) -> Group:
    """Adds to a title the fields in which groups of the same title differ."""
    alike = [other.runs[0].settings for other in groups if other[:3] == each[:3]]
    mine = each.runs[0].settings
    fields = sorted({field for other in alike for field in other} - {"encoder.weights"})
    differing = [
        f"{field} {str(mine.get(field, 'not recorded'))[:16]}"
        for field in fields
        if any(other.get(field) != mine.get(field) for other in alike)
    ]
    return each._replace(title=", ".join([each.title] * bool(each.title) + differing))


# Fields of a configuration that no accuracy of the paper's FDC depends on: of today, of earlier
# versions, and of the whitened affinity, which stands beside the paper's numbers.
_IGNORED = WITHOUT_EFFECT | {
    *("seed", "report", "save_features", "evaluation.batch_size", "evaluation.every_task"),
    *("data.augment_on_device", "train.seeds_together", "fdc.transport"),
    *(f"fdc.affinity_{name}" for name in ("metric", "evidence", "scope", "shrinkage")),
}


def settings(results: dict[str, Any]) -> dict[str, Any]:
    """Returns everything that the numbers of a `results.json` depend on but its seed, by field.

    Options of other learners are left out; a field that an older run does not know has the value
    that it had then, the paper's.
    """
    benchmark, learner = results["benchmark"], results["learner"]
    options = learners.options(learner)
    found = _expected() | {name: each.default_on(benchmark) for name, each in options.items()}
    own = f"learner.{learners.section(learner)}."  # Also of one that is not at hand.
    for field, value in results["config"].items():
        of_another = field.startswith("learner.") and field.count(".") > 1 and field not in options
        if field not in _IGNORED and (not of_another or field.startswith(own)):
            found[field] = value
    if found["fdc.affinity_reference"] == "pooled":  # Of the whitened affinity alone.
        found["fdc.affinity_reference"] = "own"
    for section, names in (("encoder", ("sha256", "weights")), ("data", _CHECKSUMS)):
        of_section = results.get(section) or {}
        found |= {f"{section}.{name}": of_section.get(name) for name in names}
    found |= {name: results.get(name) for name in ("split", "num_train_images", "num_test_images")}
    return dict(sorted(found.items()))


_CHECKSUMS = ("train_sha256", "test_sha256")


def deviations(benchmark: str, learner: str, found: dict[str, Any]) -> list[str]:
    """Says in words what departs from the paper's protocol, and from what it leaves open.

    Of a benchmark that the paper does not have, only settings of learner and FDC are compared.
    """
    expected, sizes = _expected(), paper.columns("partitions", benchmark)
    if not sizes:
        method = ("learner.preset", "fdc.")
        expected = {name: value for name, value in expected.items() if name.startswith(method)}
    # Where the name of the field and the value do not do; with a noun where a number is counted.
    phrases, known = [], paper.numbers()["protocol"]["words"]
    for field, value in expected.items():
        if found[field] != value:
            phrase = known.get(field, field.split(".")[-1].replace("_", " ") + " {}")
            noun, phrase = (None, phrase) if isinstance(phrase, str) else phrase
            values = found[field] if isinstance(found[field], list) else [found[field]]
            counts = [*map(str, values[:-1]), counted(values[-1], noun)] if noun else []
            words = ", ".join(counts) or _words(found[field])
            phrases.append(phrase.format(words))
    for part, word in (("train", "training"), ("test", "test")):
        count = found[f"num_{part}_images"]
        if sizes and not found[f"data.{part}_per_class"] and count not in (None, sizes[part]):
            phrases.append(f"{count:,} of {sizes[part]:,} {word} images")
    weights, patterns = found["encoder.weights"], paper.numbers()["protocol"]["weights"]
    same_size = found["encoder.variant"] == expected.get("encoder.variant")
    if weights and same_size and not any(fnmatch.fnmatch(weights, each) for each in patterns):
        phrases.append(f"weights {weights}")
    return phrases + learners.deviations(learner, found | {"benchmark": benchmark})


def _expected() -> dict[str, Any]:
    """The paper's settings by field, and what it leaves open by default."""
    known = paper.numbers()["protocol"]
    return known["fields"] | known["unstated"]


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " to ".join(_words(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def provenance(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Returns where the numbers of each group come from, ready for JSON and for a page.

    Returns:
        For each group `group`, its name, and `parts`: by title a dict of fields. Where the runs of
        a group differ, as in device or commit, a field is a dict by seed.
    """
    found = []
    for group in groups:
        of_seeds = {f"seed {run.seed}": _origin(run) for run in group.runs}
        parts: dict[str, dict[str, Any]] = {}
        for title, fields in _origin(group.runs[0]).items():
            values = {
                name: {seed: of[title].get(name) for seed, of in of_seeds.items()}
                for name in fields
            }
            parts[title] = {
                name: fields[name] if all(one == fields[name] for one in each.values()) else each
                for name, each in values.items()
            }
        alike = (
            "the paper's protocol" if group.follows_protocol else "the paper's of learner and FDC"
        )
        parts["runs"] |= {"settings": group.title or alike, "seeds": group.seeds}
        if absent := {f"seed {run.seed}": run.missing for run in group.runs if run.missing}:
            parts["not computed"] = absent
        found.append({"group": group.name, "parts": parts})
    return found


def _origin(run: RunFolder) -> dict[str, dict[str, Any]]:
    results = run.results
    whole = ("benchmark", "learner", "class_order_seed", "split", "device")
    # The end of the path alone: a page that is passed on should not tell of a machine.
    folder = "/".join(run.path.absolute().parts[-2:])
    parts = {"weights": "encoder", "data": "data", "versions": "versions"}
    return {
        "runs": {name: results.get(name) for name in whole} | {"folder": folder},
        **{title: results.get(section) or {} for title, section in parts.items()},
        # Where things lie on a machine is nobody's business and moves no number.
        "configuration": {
            name: results["config"][name]
            for name in sorted(results["config"].keys() - WITHOUT_EFFECT - {"seed"})
        },
    }
