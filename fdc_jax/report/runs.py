"""Run folders: what they hold, which are usable, and which belong together."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fdc_jax import learners
from fdc_jax.errors import InputError
from fdc_jax.files import read_npz
from fdc_jax.report import paper, protocol

_PREDICTIONS = (
    "label",
    "raw_label",
    "fdc_label",
    "oracle_label",
    "task",
    "raw_task",
    "fdc_task",
)


# What a run may lack, and its type.
_OPTIONAL = {
    "split": str,
    "encoder": dict,
    "data": dict,
    "timing": dict,
    "versions": dict,
    "curve": list,
    "whitened": dict,
    "num_tasks": int,
    "num_classes": int,
    "num_train_images": int,
    "num_test_images": int,
}


class RunFolder(NamedTuple):
    """A finished run: one seed of one configuration; `results` is its `results.json`."""

    path: Path
    results: dict[str, Any]

    @property
    def seed(self) -> int:
        """Training seed."""
        return self.results["seed"]

    @property
    def features_path(self) -> Path | None:
        """Folder of saved features that includes the test images, or None."""
        folder = self.path / "features"
        return folder if (folder / "test_adapted.npy").exists() else None

    def predictions(self) -> dict[str, np.ndarray]:
        """Returns the columns of `predictions.npz`, one row per test image; empty without it.

        Raises:
            InputError: the file is damaged or belongs to another run.
        """
        path = self.path / "predictions.npz"
        if not path.exists():
            return {}
        columns = read_npz(path)
        missing = [name for name in _PREDICTIONS if name not in columns]
        if missing:
            raise InputError(f"{path}: expected a column {missing[0]}, found none")
        rows = self.results.get("num_test_images", len(columns["label"]))
        for name in _PREDICTIONS:
            if columns[name].shape != (rows,) or columns[name].dtype.kind not in "iu":
                raise InputError(
                    f"{path}: column {name}: expected {rows} integers, found "
                    f"{columns[name].dtype} of shape {columns[name].shape}"
                )
        return columns

    def value(self, *keys: str) -> float | None:
        """Returns a number of the results by its path, such as ("accuracy", "raw"), or None."""
        found: Any = self.results
        for key in keys:
            if not isinstance(found, dict) or key not in found:
                return None
            found = found[key]
        if isinstance(found, bool) or not isinstance(found, int | float):
            return None
        return float(found) if np.isfinite(found) else None

    def component(self, name: str) -> float | None:
        """Returns the final accuracy of a component combination.

        Without a pretrained view, what is called the adapted view of a combination is all of it.
        """
        value = self.value("components", name)
        if value is None and not self.dual and name.endswith("adapted_view"):
            name = name.removesuffix("adapted_view").removesuffix("_") or "full"
            value = self.value("components", name)
        return value

    def incremental(self, name: str) -> float | None:
        """Returns the average incremental accuracy of a component combination.

        None where not every task was evaluated, or without that combination.
        """
        if self.value("average_incremental_accuracy", "raw") is None:
            return None
        curve = [self._replace(results=point) for point in self.results.get("curve", ())]
        values = [value for point in curve if (value := point.component(name)) is not None]
        return sum(values) / len(values) if values and len(values) == len(curve) else None

    @property
    def dual(self) -> bool:
        """Whether FDC had the pretrained view beside the adapted one."""
        return "pretrained_view" in self.results["components"]

    @property
    def selected(self) -> str:
        """Component combination that the paper selects for the learner."""
        return learners.selected(self.results["learner"])


class Skipped(NamedTuple):
    """A folder that could not be used, and why."""

    path: Path
    reason: str


class Loaded(NamedTuple):
    """What was found in the folders given."""

    runs: list[RunFolder]
    skipped: list[Skipped]


class Group(NamedTuple):
    """Runs that differ in nothing but the seed.

    Attributes:
        benchmark: name of the benchmark.
        learner: name of the learner.
        title: what differs from the paper's protocol, in words; empty when nothing does.
        follows_protocol: whether the paper's numbers are of the same experiment.
        settings: everything that numbers depend on, by field of the configuration.
        runs: by ascending seed.
    """

    benchmark: str
    learner: str
    title: str
    follows_protocol: bool
    settings: dict[str, Any]
    runs: list[RunFolder]

    @property
    def seeds(self) -> list[int]:
        """Training seeds."""
        return [run.seed for run in self.runs]

    @property
    def name(self) -> str:
        """Learner, benchmark and what differs from the protocol, for captions."""
        parts = (paper.learner_title(self.learner), paper.benchmark_title(self.benchmark))
        return ", ".join((*parts, self.title) if self.title else parts)

    def values(self, *keys: str) -> list[float]:
        """Returns a number of the results of every run that has it, by ascending seed."""
        found = (run.value(*keys) for run in self.runs)
        return [value for value in found if value is not None]

    def components(self, name: str) -> list[float]:
        """Returns the accuracy of a component combination of every run that has it."""
        found = (run.component(name) for run in self.runs)
        return [value for value in found if value is not None]

    def gains(self, name: str) -> list[float]:
        """Returns the gain of a component combination over raw, paired within each seed."""
        pairs = ((run.value("accuracy", "raw"), run.component(name)) for run in self.runs)
        return [
            after - before for before, after in pairs if before is not None and after is not None
        ]


# Reading -----------------------------------------------------------------------------------------


def _beyond(run: RunFolder) -> dict[str, Any]:
    """Returns the settings of affinities, which leave the paper's numbers as they are."""
    config = run.results.get("config", {})
    return {name: value for name, value in config.items() if name.startswith("fdc.affinity_")}


def load(paths: Iterable[str | os.PathLike[str]]) -> Loaded:
    """Reads run folders; a folder of several seeds stands for its `seed_*` folders.

    Folders that cannot be used are named with the reason and do not stop the others. Of two runs
    with the same benchmark, learner, seed and settings the first counts.
    """
    runs: list[RunFolder] = []
    skipped: list[Skipped] = []
    seen: set[Path] = set()
    earlier: dict[str, RunFolder] = {}
    for path in (folder for given in paths for folder in _expand(Path(given))):
        if path.resolve() in seen:
            continue
        seen.add(path.resolve())
        try:
            run = _read(path)
        except InputError as error:
            skipped.append(Skipped(path, str(error)))
            continue
        identity = json.dumps(
            [
                run.results["benchmark"],
                run.results["learner"],
                run.seed,
                protocol.settings(run.results),
            ],
            sort_keys=True,
        )
        if identity in earlier:
            first = earlier[identity]
            reason = f"same benchmark, learner, seed and settings as {first.path}"
            if _beyond(first) != _beyond(run):
                reason += ", but for an affinity beyond the paper"
            skipped.append(Skipped(path, reason))
            continue
        earlier[identity] = run
        runs.append(run)
    return Loaded(runs, skipped)


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
        tasks = "1 task" if done == 1 else f"{done} tasks"
        raise InputError(f"unfinished: no results.json, {tasks} done")
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"results.json: unreadable ({error})") from error
    _check(results)
    run = RunFolder(path, results)
    run.predictions()  # Refuses a damaged file now rather than in the middle of the tables.
    return run


def _check(results: Any) -> None:
    """Refuses what is no `results.json` of a run."""
    if not isinstance(results, dict):
        raise InputError(f"results.json: expected an object, found {type(results).__name__}")
    for name, kind in (
        ("benchmark", str),
        ("learner", str),
        ("seed", int),
        ("accuracy", dict),
        ("components", dict),
        ("config", dict),
    ):
        if name not in results:
            several = " (a summary over seeds has none)" if name == "seed" else ""
            raise InputError(f"results.json: expected a field {name}{several}, found none")
        if not isinstance(results[name], kind) or isinstance(results[name], bool):
            raise InputError(
                f"results.json: {name}: expected {kind.__name__}, found {results[name]!r:.60}"
            )
    for name, kind in _OPTIONAL.items():
        value = results.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise InputError(f"results.json: {name}: expected {kind.__name__}, found {value!r:.60}")
    for point in results.get("curve") or ():
        if not isinstance(point, dict) or not isinstance(point.get("components"), dict):
            raise InputError(
                "results.json: curve: expected accuracies of components after every task, found "
                f"{point!r:.60}"
            )
    run = RunFolder(Path(), results)
    for name in ("raw", "fdc", "oracle"):
        value = run.value("accuracy", name)
        if value is None or not 0 <= value <= 100:
            raise InputError(
                f"results.json: accuracy.{name}: expected percent, found "
                f"{results['accuracy'].get(name)!r:.60}"
            )
    for name in results["components"]:
        if run.value("components", name) is None:
            raise InputError(
                f"results.json: components.{name}: expected percent, found "
                f"{results['components'][name]!r:.60}"
            )


# Grouping ----------------------------------------------------------------------------------------


def group(runs: Sequence[RunFolder]) -> list[Group]:
    """Puts together the runs that differ in nothing but the seed.

    Returns:
        Groups in the paper's order of learners and benchmarks, those of its protocol first.
    """
    members: dict[str, list[RunFolder]] = {}
    for run in runs:
        key = json.dumps(
            [run.results["benchmark"], run.results["learner"], protocol.settings(run.results)],
            sort_keys=True,
        )
        members.setdefault(key, []).append(run)
    groups = []
    for alike in members.values():
        results, settings = alike[0].results, protocol.settings(alike[0].results)
        differing = protocol.deviations(results["benchmark"], results["learner"], settings)
        title = ", ".join(differing)
        groups.append(
            Group(
                results["benchmark"],
                results["learner"],
                title,
                not title and results["benchmark"] in paper.benchmarks(),
                settings,
                sorted(alike, key=lambda run: run.seed),
            )
        )
    return sorted((_told_apart(each, groups) for each in groups), key=_order)


def _order(each: Group) -> tuple[Any, ...]:
    def position(name: str, names: Iterable[str]) -> tuple[int, str]:
        names = list(names)
        return (names.index(name) if name in names else len(names), name)

    return (
        position(each.learner, paper.LEARNER_TITLES),
        position(each.benchmark, paper.BENCHMARK_TITLES),
        not each.follows_protocol,
        each.title,
    )


def _told_apart(each: Group, groups: Sequence[Group]) -> Group:
    """Adds to a title the fields in which groups of the same title differ."""
    alike = [
        other.settings
        for other in groups
        if other[:3] == each[:3] and other.settings is not each.settings
    ]
    fields = sorted({f for other in alike for f in each.settings | other} - {"encoder.weights"})
    differing = [
        f"{field} {str(each.settings.get(field, 'not recorded'))[:16]}"
        for field in fields
        if any(other.get(field) != each.settings.get(field) for other in alike)
    ]
    return each._replace(title=", ".join([each.title] * bool(each.title) + differing))
