"""The JSON files of a run: their fields, types and ranges, checked whenever a file is read.

Other fields are ignored.
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
Packed = Annotated[str, Meta(pattern="^[A-Za-z0-9+/=]*$")]  # of `evaluation.pack`, of any length
Checksum = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Accuracies = dict[Name, Percent]

# Names in config.json that are no fields of the configuration: checksums of all classes by name,
# and the number of classes of every task. Both include classes of planned tasks.
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


class Timing(TypedDict, total=False):
    """Seconds of the stages of a run; of calibrators by their names."""

    training_seconds: Measured | None
    adapted_extraction_seconds: Measured | None
    pretrained_extraction_seconds: Measured | None
    fit_seconds: dict[Name, Measured] | None


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
    labels: NotRequired[dict[Name, Packed]]
    timing: Timing
    peak_memory: dict[Name, Count | dict[Name, Count | None] | None]


class Architecture(TypedDict):
    """The sizes of an encoder that other files are compared with."""

    width: Positive


class Encoder(TypedDict, total=False):
    """The encoder of a run."""

    variant: Name
    weights: Name
    sha256: Name
    input_range: Name
    architecture: Architecture


class _Parts(TypedDict, total=False):
    """Parts of `results.json` that may be missing."""

    split: Name
    class_order_seed: Annotated[int, Meta(ge=-1, lt=2**32)]
    num_classes: Positive
    class_names: list[Name]
    num_train_images: Positive
    num_test_images: Positive
    routing_accuracy: Accuracies | None
    average_incremental_accuracy: dict[Name, Percent | None] | None
    components: Accuracies | None
    decomposition: dict[Name, dict[Name, Measured]] | None
    calibration_error: Accuracies | None
    chance_calibration_error: Accuracies | None
    unlike_learned: Percent | None
    fdc_storage_bytes: Count | None
    storage_bytes: dict[Name, Count] | None
    notes: dict[Name, Name] | None
    peak_memory_bytes: dict[Name, Count | None] | None
    timing: Timing | None
    encoder: Encoder | None
    data: dict[Name, Name] | None
    skipped: dict[Name, str]
    device: Name
    versions: dict[Name, Any] | None


class Results(_Parts):
    """The content of `results.json`."""

    benchmark: Name
    learner: Name
    seed: Annotated[int, Meta(ge=0, lt=2**32)]
    num_tasks: Positive
    accuracy: Accuracies
    curve: Annotated[list[Point], Meta(min_length=1)]
    config: dict[Name, Any]


class Contender(TypedDict):
    """The inference cost of `baseline`, `single` or `dual` (`fdc_jax.latency`)."""

    milliseconds: Annotated[list[Measured], Meta(min_length=1)]
    peak_bytes: Count | None


class Latency(TypedDict, total=False):
    """The content of `latency.json`."""

    contenders: dict[Name, Contender]


class Cursor(TypedDict):
    """The point in a run that a checkpoint belongs to."""

    tasks_done: Count
    step: Count
    training_time: dict[Name, Measured] | None
    classes_per_task: Annotated[list[Positive], Meta(min_length=1)]


def check(value: Any, kind: Any) -> Any:
    """Returns a value read from JSON; raises InputError with the field if its type is wrong."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InputError(escaped(str(error))[:300]) from error
    return value


def check_results(results: Mapping[str, Any]) -> None:
    """Raises InputError if the parts of `results.json` contradict each other."""
    tasks = [point["task"] for point in results["curve"]]
    if tasks != sorted({*tasks}) or tasks[-1] >= results["num_tasks"]:
        raise InputError(f"curve: expected tasks below {results['num_tasks']} in order")
    for point in (results, *results["curve"]):
        components, names = point.get("components"), point["accuracy"].keys()
        if not names or ("oracle" in names and "raw" not in names):
            raise InputError("accuracy: expected raw among the calibrators")
        if components and not {"raw", "full", "pac+rlc"} <= components.keys():
            raise InputError("components: expected raw, full and pac+rlc among them")
    classes = results.get("class_names")
    if classes is not None and len(classes) != results.get("num_classes", len(classes)):
        raise InputError(f"class_names: expected {results['num_classes']}, found {len(classes)}")
