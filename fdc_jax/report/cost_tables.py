"""Tables of what is not an accuracy: data partitions, training-stage and inference costs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fdc_jax.errors import InputError
from fdc_jax.report import blocks, cells, paper
from fdc_jax.report.cells import Cell, Table
from fdc_jax.report.runs import Group, RunFolder

_PARTITION = {
    "classes": "classes",
    "tasks": "tasks",
    "classes_per_task": "classes a task",
    "train": "training images",
    "test": "test images",
}


def partitions(groups: Sequence[Group]) -> Table:
    """Classes, tasks and images of the runs against the paper's (Table training)."""
    letter = blocks.letters(groups)
    rows, records = [], []
    for name in blocks.columns(groups):
        published = paper.partition(name)
        found: dict[tuple, Group] = {}
        for each in groups:
            if each.benchmark == name:
                found.setdefault((*_partition(each.runs[0]).values(), each.title == ""), each)
        lines: list[tuple[str, dict[str, Any], str]] = []
        for each in found.values():
            own = _partition(each.runs[0])
            split = each.runs[0].results.get("split")
            text = blocks.own_label(each.title, letter) + (f", {split} split" if split else "")
            same = "" if not published else "equal" if own == published else "differs"
            lines.append((text, own, same))
            records += [
                {
                    "benchmark": name,
                    "settings": each.title or blocks.PROTOCOL,
                    "split": split,
                    "quantity": key,
                    "value": value,
                    "paper": published.get(key),
                }
                for key, value in own.items()
            ]
        if not found:
            lines.append(("ours", dict.fromkeys(_PARTITION), ""))
            records += [
                {
                    "benchmark": name,
                    "settings": blocks.PROTOCOL,
                    "split": None,
                    "quantity": key,
                    "value": None,
                    "paper": value,
                }
                for key, value in published.items()
            ]
        if published:
            lines.append(("paper", dict(published), ""))
        for index, (text, numbers, same) in enumerate(lines):
            rows.append(
                [
                    cells.words("" if index else paper.benchmark_title(name)),
                    cells.words(text),
                    *(_count(numbers[key]) for key in _PARTITION),
                    cells.words(same),
                ]
            )
    note = (
        "Sizes of the class-disjoint tasks and of the data sets, from the results of the runs. All "
        "runs of a line have the same numbers." + blocks.legend(groups)
    )
    columns = ["benchmark", "numbers", *_PARTITION.values(), "against the paper"]
    return Table("partitions", "Data partitions", note, columns, rows, 2, records)


def _partition(run: RunFolder) -> dict[str, int | None]:
    results = run.results
    classes, tasks = results.get("num_classes"), results.get("num_tasks")
    return {
        "classes": classes,
        "tasks": tasks,
        "classes_per_task": -(-classes // tasks) if classes and tasks else None,
        "train": results.get("num_train_images"),
        "test": results.get("num_test_images"),
    }


def _count(value: float | None) -> Cell:
    return cells.gap() if value is None else Cell(f"{value:,.0f}", float(value))


# Training stage -----------------------------------------------------------------------------------

_COSTS = {
    "training_minutes": "training, min",
    "fdc_minutes": "FDC, min",
    "peak_memory_gib": "peak memory, GiB",
    "fdc_peak_memory_gib": "FDC peak memory, GiB",
    "storage_mib": "FDC storage, MiB",
}


def cost(groups: Sequence[Group]) -> Table:
    """Time of training and of FDC's statistics, and their storage (Table app-cost)."""
    letter = blocks.letters(groups)
    rows: list[list[Cell]] = []
    records: list[dict[str, Any]] = []
    for each in groups:
        devices = sorted({str(run.results.get("device", "unknown")) for run in each.runs})
        own = {
            "training_minutes": _numbers(each, _training_minutes),
            "fdc_minutes": _numbers(each, _fdc_minutes),
            "peak_memory_gib": _numbers(each, _memory("training")),
            "fdc_peak_memory_gib": _numbers(each, _memory("fdc_and_evaluation")),
            "storage_mib": [bytes_ / 2**20 for bytes_ in each.values("fdc_storage_bytes")],
        }
        shown = {name: cells.ours(values) for name, values in own.items()}
        numbers = blocks.own_label(each.title, letter)
        rows.append(_cost_row(each.learner, each.benchmark, numbers, ", ".join(devices), shown))
        records += _cost_records(each, shown, ", ".join(devices))
    device = paper.numbers()["tables"]["cost"]["device"]
    for name in paper.benchmarks():
        shown = {key: cells.number(value) for key, value in paper.cost(name).items()}
        rows.append(_cost_row("cumulative_lora", name, "paper", device, shown))
        if not any((each.learner, each.benchmark) == ("cumulative_lora", name) for each in groups):
            records += [
                {
                    "learner": paper.learner_title("cumulative_lora"),
                    "benchmark": name,
                    "settings": blocks.PROTOCOL,
                    "device": None,
                    "quantity": key,
                    "mean": None,
                    "std": None,
                    "n": 0,
                    "paper": value,
                }
                for key, value in paper.cost(name).items()
            ]
    note = (
        "Training: optimisation of all tasks including waiting for images, without compilation and "
        "evaluation. FDC: extraction of the training features in both views and fitting; left out "
        "are runs that found features of the pretrained encoder in the cache, or do not say. "
        "Storage: bases, prototypes, means and scalars. Peak memory is that of the device; a CPU "
        "has none. Mean ± sample standard deviation over seeds, in brackets how many; the paper "
        "measured seed 1 of Cumulative-LoRA, and devices differ, so that times are shown side by "
        "side only." + blocks.legend(groups)
    )
    columns = ["learner", "benchmark", "numbers", "device", *_COSTS.values()]
    return Table("cost", "Training-stage time and storage", note, columns, rows, 4, records)


def _memory(part: str):
    def of(run: RunFolder) -> float | None:
        value = (run.results.get("peak_memory_bytes") or {}).get(part)
        return None if value is None else value / 2**30

    return of


def _numbers(each: Group, of) -> list[float]:
    found = (of(run) for run in each.runs)
    return [value for value in found if value is not None]


def _training_minutes(run: RunFolder) -> float | None:
    seconds = run.value("timing", "training_seconds")
    return None if seconds is None else seconds / 60


def _fdc_minutes(run: RunFolder) -> float | None:
    names = ("adapted_extraction_seconds", "pretrained_extraction_seconds", "fit_seconds")
    parts = [run.value("timing", name) for name in names]
    # Without the record it is not known whether the cache had them.
    if None in parts or run.value("timing", "pretrained_from_cache") != 0:
        return None
    return sum(part for part in parts if part is not None) / 60


def _cost_row(
    learner: str, benchmark: str, numbers: str, device: str, shown: dict[str, Cell]
) -> list[Cell]:
    names = (paper.learner_title(learner), paper.benchmark_title(benchmark), numbers, device)
    return [*(cells.words(name) for name in names), *(shown[key] for key in _COSTS)]


def _cost_records(each: Group, shown: dict[str, Cell], device: str) -> list[dict[str, Any]]:
    published = paper.cost(each.benchmark) if each.learner == "cumulative_lora" else {}
    return [
        {
            "learner": paper.learner_title(each.learner),
            "benchmark": each.benchmark,
            "settings": each.title or blocks.PROTOCOL,
            "device": device,
            "quantity": name,
            "mean": cell.mean,
            "std": cell.std,
            "n": cell.count or 0,
            "paper": published.get(name),
        }
        for name, cell in shown.items()
    ]


# Inference ----------------------------------------------------------------------------------------

VIEWS = ("raw", "single", "dual")


def read_latency(path: str) -> dict[str, Any]:
    """Reads what `benchmarks/latency.py` wrote.

    Raises:
        InputError: unreadable, or a field is missing.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: unreadable JSON ({error})") from error
    if not isinstance(found, dict) or not isinstance(found.get("views"), dict):
        raise InputError(f"{path}: expected an object with a field views, as latency.py writes it")
    for view in VIEWS:
        if view != "raw" and view not in found["views"]:
            continue  # A calibrator of one view has no second.
        entry = found["views"].get(view)
        repeats = entry.get("milliseconds") if isinstance(entry, dict) else None
        if (
            not isinstance(repeats, list)
            or not repeats
            or not all(isinstance(each, int | float) and each > 0 for each in repeats)
        ):
            raise InputError(
                f"{path}: views.{view}.milliseconds: expected positive numbers, found {repeats!r}"
            )
    return found


def latency(files: Sequence[str]) -> Table:
    """Time and memory of a batch without FDC, with one view and with two (Table app-latency)."""
    rows: list[list[Cell]] = []
    records: list[dict[str, Any]] = []
    for path in files:
        found = read_latency(path)
        label = str(found.get("encoder", "unknown encoder"))
        device = str(found.get("device", "unknown"))
        benchmark = str(found.get("benchmark") or "random weights")
        label += _protocol(found)
        rows += _latency_rows(benchmark, f"ours, {label}", device, found["views"])
        records += [
            {
                "benchmark": benchmark,
                "encoder": label,
                "device": device,
                "view": view,
                "milliseconds": cells.ours(found["views"][view]["milliseconds"]).mean,
                "milliseconds_std": cells.ours(found["views"][view]["milliseconds"]).std,
                "memory_mib": _mib(found["views"][view]),
            }
            for view in found["views"]
        ]
    if not files:
        rows += _latency_rows("", "ours", "", {})
    device = paper.numbers()["tables"]["latency"]["device"]
    for name in paper.benchmarks():
        of = paper.latency(name)
        records += [
            {
                "benchmark": name,
                "encoder": "paper",
                "device": device,
                "view": view,
                "milliseconds": of[f"{view}_ms"],
                "milliseconds_std": None,
                "memory_mib": of["raw_mib"] + (of[f"{view}_mib"] if view != "raw" else 0.0),
            }
            for view in VIEWS
        ]
        rows.append(
            [
                *(cells.words(text) for text in (paper.benchmark_title(name), "paper", device)),
                cells.number(of["raw_ms"], 1),
                *(
                    _increased(of[f"{view}_ms"], of[f"{view}_increase_percent"])
                    for view in VIEWS[1:]
                ),
                cells.number(of["raw_mib"], 1),
                *(cells.number(of[f"{view}_mib"], 1, signed=True) for view in VIEWS[1:]),
            ]
        )
    note = (
        "Milliseconds for a batch, image loading excluded: the paper's is of 64 images, mean of 3 "
        "repeats of 20 batches after 10 for warming up; in brackets the increase over the "
        "baseline. Memory: peak in MiB, for ours as the compiler plans it, and increases over the "
        "baseline. Single: adapted view; dual: a second "
        "forward pass for the pretrained view. The paper's are of Cumulative-LoRA on an A100 in "
        "float32; devices differ, so that they stand side by side only."
    )
    columns = ["benchmark", "numbers", "device", "baseline, ms", "single, ms", "dual, ms"]
    columns += ["baseline, MiB", "single, MiB", "dual, MiB"]
    return Table("latency", "Inference time and memory", note, columns, rows, 3, records)


def _protocol(found: dict[str, Any]) -> str:
    """How a file's times were taken, where it says so."""
    batches, warm_up, size = (
        found.get(name) for name in ("batches", "warm_up_batches", "batch_size")
    )
    if batches is None or warm_up is None or size is None:
        return ""
    repeats = len(found["views"]["raw"]["milliseconds"])
    return f", {repeats} × {batches} batches of {size} after {warm_up}"


def _mib(entry: dict[str, Any]) -> float | None:
    value = entry.get("peak_memory_bytes")
    return value / 2**20 if isinstance(value, int | float) else None


def _latency_rows(
    benchmark: str, numbers: str, device: str, views: dict[str, Any]
) -> list[list[Cell]]:
    title = paper.benchmark_title(benchmark)
    labels = [cells.words(text) for text in (title, numbers, device)]
    if not views:
        return [[*labels, *(cells.gap() for _ in range(6))]]
    entries = [views.get(view, {}) for view in VIEWS]
    means = [cells.ours(entry.get("milliseconds", [])).mean for entry in entries]
    memory = [_mib(entry) for entry in entries]
    extra = [
        None if value is None or memory[0] is None else value - memory[0] for value in memory[1:]
    ]
    return [
        [
            *labels,
            cells.number(means[0], 1),
            *(_with_increase(mean, means[0]) for mean in means[1:]),
            cells.number(memory[0], 1),
            *(cells.number(value, 1, signed=True) for value in extra),
        ]
    ]


def _with_increase(value: float | None, base: float | None) -> Cell:
    if value is None or base is None:
        return cells.gap()
    return _increased(value, 100 * (value / base - 1))


def _increased(value: float, percent: float) -> Cell:
    return Cell(f"{value:.1f} ({percent:+.1f} %)", value)
