"""The JSON files of a run as types, which are filled to write a file and returned by `read`.

`read` checks types and ranges. It ignores other fields, and defaults stand for fields that earlier
versions did not write.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from fdc_jax.errors import InputError
from fdc_jax.evaluation import Accuracies, Count, Decomposition, Measures, Name, Percent
from fdc_jax.machine.conversion import convert
from fdc_jax.machine.files import read_json

Kind = TypeVar("Kind")
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Measured = Annotated[float, Meta(ge=0, le=1e15)]  # seconds and the like
Packed = Annotated[str, Meta(pattern="^[A-Za-z0-9+/=]*$")]  # of `evaluation.pack`, of any length


class TaskTiming(msgspec.Struct, kw_only=True):
    """Seconds of the stages of a task, None if unknown; of calibrators by name."""

    adapted_extraction_seconds: Measured | None = None
    compile_seconds: Measured | None = None  # of training, apart from its other seconds
    extraction_compile_seconds: Measured | None = None
    fit_compile_seconds: dict[Name, Measured] = {}
    fit_seconds: dict[Name, Measured] = {}
    input_wait_seconds: Measured | None = None
    pretrained_extraction_seconds: Measured | None = None
    pretrained_from_cache: Measured | None = None  # number of tasks
    previous_extraction_seconds: Measured | None = None
    score_seconds: dict[Name, Measured] = {}
    test_extraction_images: Measured | None = None
    test_extraction_seconds: Measured | None = None
    training_images: Measured | None = None
    training_seconds: Measured | None = None
    processor_seconds: Measured | None = None


class Timing(TaskTiming, kw_only=True):
    """The sums over all tasks, and the speed of training."""

    training_images_per_second: Measured | None = None
    input_wait_fraction: Measured | None = None


class Memory(msgspec.Struct, kw_only=True):
    """The peak of a task's training in bytes, and the rises above it; None if not measured."""

    training: Count | None = None
    extraction: Count | None = None
    fit: dict[Name, Count | None] = {}


class Point(msgspec.Struct, kw_only=True):
    """The accuracies after a task in percent, by calibrator."""

    task: Count
    accuracy: Accuracies
    routing_accuracy: Accuracies = {}
    components: Accuracies = {}
    task_accuracy: dict[Name, list[Percent | None]] = {}


class Record(Measures, kw_only=True):
    """The file of the evaluation after a task."""

    task: Count
    test_images: Positive
    labels: dict[Name, Packed] = msgspec.field(default_factory=dict)
    unlike_learned: Percent | None = None
    components: Accuracies = msgspec.field(default_factory=dict)
    validation: Accuracies = msgspec.field(default_factory=dict)
    timing: TaskTiming = msgspec.field(default_factory=TaskTiming)
    peak_memory: Memory = msgspec.field(default_factory=Memory)


class EncoderRecord(msgspec.Struct, kw_only=True):
    """The encoder of a run."""

    variant: Name = ""
    weights: Name = ""
    sha256: Name = ""
    input_range: Name = ""
    skipped: list[Name] = []  # arrays of the weights file that are not used
    resized_positions: bool = False
    architecture: dict[Name, Any] = {}  # fields of `vit.Variant`

    @property
    def width(self) -> int | None:
        """Width of the features, None if it is not known."""
        width = self.architecture["width"] if "width" in self.architecture else None
        return width if isinstance(width, int) else None


class Images(msgspec.Struct, kw_only=True):
    """The checksums of the images of a run."""

    train_sha256: Name | None = None
    test_sha256: Name | None = None


class Selected(msgspec.Struct, kw_only=True):
    """The components of FDC that the paper selects for a learner."""

    components: Name
    accuracy: Percent | None = None


class Results(msgspec.Struct, kw_only=True):
    """The content of `results.json`; accuracies in percent by calibrator."""

    benchmark: Name
    split: Name | None = None
    learner: Name
    seed: Annotated[int, Meta(ge=0, lt=2**32)]
    class_order_seed: Annotated[int, Meta(ge=-1, lt=2**32)] | None = None
    num_tasks: Positive
    num_classes: Positive
    class_names: list[Name] | None = None
    num_train_images: Positive | None = None
    num_test_images: Positive
    accuracy: Accuracies
    routing_accuracy: Accuracies = {}
    # None if a task was not evaluated.
    average_incremental_accuracy: dict[Name, Percent | None] = {}
    components: Accuracies = {}
    validation: Accuracies = {}  # of the last task, by calibrator and component of FDC
    selected: Selected | None = None
    decomposition: dict[Name, Decomposition] = {}
    calibration_error: Accuracies = {}
    chance_calibration_error: Accuracies = {}
    unlike_learned: Percent | None = None
    curve: Annotated[list[Point], Meta(min_length=1)]
    fdc_storage_bytes: Count | None = None
    storage_bytes: dict[Name, Count] = {}
    notes: dict[Name, Name] = {}
    peak_memory_bytes: dict[Name, Count | None] = {}  # of `training`, and what calibrators added
    timing: Timing | None = None  # None if a task was not evaluated
    encoder: EncoderRecord | None = None  # None for a run of `fdc posthoc`, from features
    data: Images = msgspec.field(default_factory=Images)
    skipped: dict[Name, str] = {}  # paths of images by reason
    device: Name = ""
    config: dict[Name, Any]
    versions: dict[Name, Any] = {}

    def __post_init__(self) -> None:
        tasks = [point.task for point in self.curve]
        if tasks != sorted({*tasks}) or tasks[-1] >= self.num_tasks:
            raise ValueError(f"curve: expected tasks below {self.num_tasks} in order")
        for point in (self, *self.curve):
            names, components = point.accuracy.keys(), point.components
            if not names or ("oracle" in names and "raw" not in names):
                raise ValueError("accuracy: expected raw among the calibrators")
            if components and not {"raw", "full", "pac+rlc"} <= components.keys():
                raise ValueError("components: expected raw, full and pac+rlc among them")
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            count = len(self.class_names)
            raise ValueError(f"class_names: expected {self.num_classes}, found {count}")


class Contender(msgspec.Struct, kw_only=True):
    """The inference cost of `baseline`, `single` or `dual` (`fdc_jax.latency`)."""

    milliseconds: Annotated[list[Measured], Meta(min_length=1)]  # per batch, by repeat
    peak_bytes: Count | None  # of the device so far, None on a CPU


class Latency(msgspec.Struct, kw_only=True):
    """The content of `latency.json`."""

    images: Positive | None = None  # per batch
    device: Name = ""
    versions: dict[Name, Any] = {}
    precision: Name = ""
    contenders: dict[Name, Contender] = {}


def read(path: Path, kind: type[Kind], remedy: str) -> Kind:
    """Returns the content of a JSON file; raises InputError with the field and a remedy."""
    with remedied(path, remedy):
        return convert(read_json(path), kind)


@contextlib.contextmanager
def remedied(path: Path, remedy: str) -> Iterator[None]:
    """Adds the name of a file and a remedy to an InputError."""
    try:
        yield
    except InputError as error:
        text = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise InputError(f"{text}; {remedy}") from error
