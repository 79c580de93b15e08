"""The JSON files of a run: their fields, types and ranges, checked whenever one is read.

Fields that are not named here are of no use to this version and are ignored.
"""

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from fdc_jax.errors import CONTROL, InputError, escaped

Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Percent = Annotated[float, Meta(ge=0, le=100.001)]  # means of 100 may exceed it by rounding
Measured = Annotated[float, Meta(ge=0, le=1e15)]  # seconds and the like
# Text that a terminal, a table or a page may show.
Name = Annotated[str, Meta(pattern=f"^[^{CONTROL}]*$", max_length=1000)]
Checksum = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Accuracies = dict[Name, Percent]

# In config.json beside the fields of the configuration: the classes that the run knows by name with
# checksums, and the number of classes of each task, both with those that are to come.
CLASSES, PLANNED = "known classes", "classes of planned tasks"

Config = TypedDict(
    "Config",
    {
        "benchmark": Name,
        "learner.name": Name,
        "weights sha256": Checksum,
        "training images sha256": NotRequired[Name],
        "test images sha256": NotRequired[Name],
        "known classes": NotRequired[dict[Name, Name]],
        "classes of planned tasks": Annotated[list[Positive], Meta(min_length=1)],
    },
)


class Timing(TypedDict):
    """Seconds; those of calibrators by name."""

    training_seconds: NotRequired[Measured | None]
    adapted_extraction_seconds: NotRequired[Measured | None]
    pretrained_extraction_seconds: NotRequired[Measured | None]
    fit_seconds: NotRequired[Measured | dict[Name, Measured] | None]


class Point(TypedDict):
    """The evaluation after a task."""

    task: Count
    accuracy: Accuracies
    routing_accuracy: NotRequired[Accuracies | None]
    components: NotRequired[Accuracies | None]
    task_accuracy: NotRequired[dict[Name, list[Percent]] | None]


class Record(Point):
    """The file of the evaluation after a task."""

    test_images: Positive
    decomposition: dict[Name, dict[Name, Measured]]
    calibration_error: NotRequired[Accuracies | None]
    chance_calibration_error: NotRequired[Accuracies | None]
    unlike_learned: NotRequired[Percent | None]
    labels: NotRequired[dict[Name, Name]]
    timing: Timing
    peak_memory: dict[Name, Count | dict[Name, Count | None] | None]


class Architecture(TypedDict):
    """The sizes of an encoder that other files are compared with."""

    width: Positive


class Encoder(TypedDict):
    """The encoder of a run."""

    variant: NotRequired[Name]
    weights: NotRequired[Name]
    sha256: NotRequired[Name]
    input_range: NotRequired[Name]
    architecture: NotRequired[Architecture]


class Results(TypedDict):
    """The content of `results.json`."""

    benchmark: Name
    split: NotRequired[Name]
    learner: Name
    seed: Annotated[int, Meta(ge=0, lt=2**32)]
    class_order_seed: NotRequired[Annotated[int, Meta(ge=-1, lt=2**32)]]
    num_tasks: Positive
    num_classes: NotRequired[Positive]
    class_names: NotRequired[list[Name]]
    num_train_images: NotRequired[Positive]
    num_test_images: NotRequired[Positive]
    accuracy: Accuracies
    routing_accuracy: NotRequired[Accuracies | None]
    average_incremental_accuracy: NotRequired[dict[Name, Percent | None] | None]
    components: NotRequired[Accuracies | None]
    decomposition: NotRequired[dict[Name, dict[Name, Measured]] | None]
    calibration_error: NotRequired[Accuracies | None]
    chance_calibration_error: NotRequired[Accuracies | None]
    unlike_learned: NotRequired[Percent | None]
    curve: Annotated[list[Point], Meta(min_length=1)]
    fdc_storage_bytes: NotRequired[Count | None]
    storage_bytes: NotRequired[dict[Name, Count] | None]
    notes: NotRequired[dict[Name, Name] | None]
    peak_memory_bytes: NotRequired[dict[Name, Count | None] | None]
    timing: NotRequired[Timing | None]
    encoder: NotRequired[Encoder | None]
    data: NotRequired[dict[Name, Name] | None]
    device: NotRequired[Name]
    config: dict[Name, Any]
    versions: NotRequired[dict[Name, Any] | None]


class Contender(TypedDict):
    """The inference cost of one contender."""

    milliseconds: Annotated[list[Measured], Meta(min_length=1)]
    peak_bytes: Count | None


class Latency(TypedDict):
    """The content of `latency.json`."""

    contenders: NotRequired[dict[Name, Contender]]


class Cursor(TypedDict):
    """The point in a run that a checkpoint belongs to."""

    tasks_done: Count
    step: Count
    training_time: dict[Name, Measured] | None
    classes_per_task: Annotated[list[Positive], Meta(min_length=1)]


def check(value: Any, kind: Any) -> None:
    """Raises InputError, which names the field, unless a value read from JSON is of a kind."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InputError(escaped(str(error))[:300]) from error


def check_results(results: Mapping[str, Any]) -> None:
    """Raises InputError if the parts of `results.json` contradict each other."""
    check(results, Results)
    tasks = [point["task"] for point in results["curve"]]
    if tasks != sorted({*tasks}) or tasks[-1] >= results["num_tasks"]:
        raise InputError(f"curve: expected tasks below {results['num_tasks']} in order")
    for point in (results, *results["curve"]):
        components = point.get("components")
        if "raw" not in point["accuracy"]:
            raise InputError("accuracy: expected raw among the calibrators")
        if components and not {"raw", "full", "pac+rlc"} <= components.keys():
            raise InputError("components: expected raw, full and pac+rlc among them")
    names = results.get("class_names")
    if names is not None and len(names) != results.get("num_classes", len(names)):
        raise InputError(f"class_names: expected {results['num_classes']}, found {len(names)}")
