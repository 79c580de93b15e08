"""The settings of a run: one field each, with type, range, description and default.

Defaults are the paper's, and our choices where it has none (docs/choices.md). Flags, `--help`,
errors, `config.json` and the comparison of two configurations follow from these types.
"""

import functools
from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta, Struct

from fdc_jax import calibration, learners
from fdc_jax.errors import InputError, did_you_mean
from fdc_jax.machine.conversion import convert
from fdc_jax.run import loggers

Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Pixels = Annotated[int, Meta(ge=0, le=4096)]
Batch = Annotated[int, Meta(ge=1, le=65_536)]
Rate = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Seed = Annotated[int, Meta(ge=0, lt=2**32)]

# Marks of fields that may differ. Paths and speed of reading: between the hosts of one run. A
# folder that is opened says nothing about them.
HOST = Meta(extra={"may_differ": "between hosts"})
# Results depend on the field by rounding alone. Weights are compared by their checksum.
RESUME = Meta(extra={"may_differ": "when a run resumes"})
GROUP = Meta(extra={"may_differ": "between runs whose accuracies are compared"})
# Divides classes into tasks; a run may grow by further tasks.
STREAM = Meta(extra={"may_differ": "when a run grows"})


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """Fields of a configuration."""


class EncoderSettings(Section, frozen=True):
    """The pretrained encoder E_0."""

    variant: Annotated[
        str, Meta(description="Ti/16, S/16, B/16 or L/16 of augreg; a file states its own")
    ] = "B/16"
    weights: Annotated[
        str, HOST, Meta(description="augreg (public), digits, or a file, see docs/encoders.md")
    ] = "augreg"
    image_size: Annotated[
        Pixels, Meta(description="0: the file's; test images are first resized to 8/7")
    ] = 224
    heads: Annotated[
        Pixels, Meta(description="attention heads of a timm file without config.json, else stated")
    ] = 0
    attention: Annotated[
        Literal["auto", "xla", "cudnn"],
        RESUME,
        Meta(description="xla, or cudnn (fused, NVIDIA GPUs, precision=fast)"),
    ] = "auto"


class Data(Section, frozen=True):
    """The images."""

    source: Annotated[
        str, HOST, Meta(description="a folder or an archive of images, see docs/data.md")
    ] = ""
    test_share: Annotated[
        float,
        Meta(ge=0, lt=1, description="to hold out of each class if the source has no test images"),
    ] = 0.0
    allow_overlap: Annotated[
        bool, RESUME, Meta(description="accept test images that are also training images")
    ] = False
    dir: Annotated[
        str,
        HOST,
        Meta(description="data that TFDS prepared; empty: $TFDS_DATA_DIR or ~/tensorflow_datasets"),
    ] = ""
    input_range: Annotated[
        Literal["pilot01", "augreg", "model"],
        Meta(description="pixels in [0, 1]; augreg: in [-1, 1]; model: the file's"),
    ] = "pilot01"
    grey_bits: Annotated[
        Literal[0, 8, 9, 10, 11, 12, 13, 14, 15, 16],
        Meta(description="of grey images of 16 bits; 0: those of their largest value"),
    ] = 0
    train_per_class: Annotated[Count, Meta(description="images of each class, 0: all")] = 0
    test_per_class: Annotated[Count, Meta(description="test images of each class, 0: all")] = 0
    validation_share: Annotated[
        float,
        Meta(ge=0, lt=1, description="of each class, not learned; to choose FDC's settings"),
    ] = 0.0
    crop_scale: Annotated[
        tuple[Share, Share], Meta(description="share of the image that a training crop covers")
    ] = (0.05, 1.0)
    flip: Annotated[bool, Meta(description="mirror half of the training images")] = True
    workers: Annotated[Count, HOST, Meta(description="decoding threads, 0: one per core")] = 0
    cache_gib: Annotated[
        float,
        HOST,
        Meta(
            ge=0,
            le=1e6,
            description="memory for decoded training images of a task, and for test images",
        ),
    ] = 4.0


class LearnerSettings(Section, frozen=True):
    """The learner; `type_for` adds a section for the options of each learner."""

    name: Annotated[str, Meta(description="see the README, or the module of your own")] = (
        "cumulative_lora"
    )
    preset: Annotated[
        Literal["protocol", "native"],
        Meta(description="protocol: as in config.train; native: the method's own"),
    ] = "protocol"


class Train(Section, frozen=True):
    """The training of a task."""

    epochs: Annotated[
        Count, Meta(description="0: chosen by the number of images of the first task")
    ] = 20
    batch_size: Annotated[Batch, Meta(description="images per step")] = 64
    increment_learning_rate: Annotated[Rate, Meta(description="of increments")] = 5e-4
    head_learning_rate: Annotated[Rate, Meta(description="of the task's head")] = 5e-3
    schedule: Annotated[
        Literal["constant", "cosine", "quarter_cosine"],
        Meta(description="unstated; or cosine, or quarter_cosine (InfLoRA)"),
    ] = "constant"
    rank: Annotated[int, Meta(ge=1, le=8192, description="of the key and value increments")] = 10


class Evaluation(Section, frozen=True):
    """The evaluation after tasks."""

    batch_size: Annotated[
        Batch, RESUME, Meta(description="images per forward pass without gradients")
    ] = 256
    every: Annotated[
        Positive,
        GROUP,
        Meta(description="tasks between evaluations; the last task is always evaluated"),
    ] = 1


class Checkpoint(Section, frozen=True):
    """The checkpoints."""

    every_steps: Annotated[
        Positive,
        RESUME,
        Meta(description="steps between checkpoints; a task's end always has one"),
    ] = 500
    keep: Annotated[Positive, RESUME, Meta(description="newest checkpoints that stay")] = 2


class Config(Section, frozen=True):
    """The settings of a run."""

    benchmark: Annotated[
        str, Meta(description="a name of docs/data.md or your own; empty: the data's")
    ] = "cifar100"
    seed: Annotated[
        tuple[Seed, ...],
        GROUP,
        Meta(min_length=1, description="training seeds, one run each: --config.seed=1,2,3"),
    ] = (1,)
    class_order_seed: Annotated[
        int,
        Meta(
            ge=-1,
            lt=2**32,
            description="of PILOT's permutation of the classes; -1: the given order",
        ),
    ] = 1993
    class_order: Annotated[
        tuple[str, ...],
        STREAM,
        Meta(description="with seed -1: all class names, or a file with a name per line"),
    ] = ()
    classes_per_task: Annotated[
        Count | Annotated[tuple[Positive, ...], Meta(min_length=1)],
        STREAM,
        Meta(
            description="a number, or a list such as 10,5,5; 0: the paper's number, of own data "
            "a fifth of the classes"
        ),
    ] = 0
    num_tasks: Annotated[
        Count,
        STREAM,
        Meta(description="stop after this many tasks; a larger number resumes; 0: all"),
    ] = 0
    precision: Annotated[
        Literal["parity", "fast"],
        Meta(description="parity: float32, exact products; fast: bfloat16 activations"),
    ] = "parity"
    cache_dir: Annotated[
        str,
        HOST,
        Meta(description="downloads, compiled programs, E_0 features; empty: the user's cache"),
    ] = ""
    save_features: Annotated[
        bool,
        GROUP,
        Meta(description="keep features under the work directory, for refits and sweeps"),
    ] = True
    log: Annotated[
        str,
        Meta(description="also send events to these, if they are installed: tensorboard,wandb"),
    ] = ""
    untrained: Annotated[
        bool,
        RESUME,
        Meta(description="predict before training, from frozen features; folder untrained"),
    ] = False
    report: Annotated[
        bool,
        RESUME,
        Meta(description="write tables, figures and a page into the work directory at the end"),
    ] = True
    encoder: EncoderSettings = EncoderSettings()
    data: Data = Data()
    learner: LearnerSettings = LearnerSettings()
    train: Train = Train()
    calibrators: Annotated[
        str, Meta(description="fitted and evaluated after every task; names as in `fdc posthoc`")
    ] = "fdc,gaussians"
    fdc: calibration.Settings = calibration.Settings()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()

    def __post_init__(self):
        if len({*self.seed}) < len(self.seed):
            raise InputError(f"config.seed: expected different numbers, found {self.seed}")
        scale = self.data.crop_scale
        if scale[0] > scale[1]:
            raise InputError(f"config.data.crop_scale: expected ascending shares, found {scale}")
        if self.class_order and self.class_order_seed != -1:
            raise InputError(
                "config.class_order_seed: expected -1 together with config.class_order, found "
                f"{self.class_order_seed}"
            )
        for field, names, known in (
            ("calibrators", self.calibrator_names, calibration.METHODS),
            ("log", filter(None, self.log.split(",")), loggers.KINDS),
        ):
            for name in names:
                if name not in known:
                    raise InputError(did_you_mean(f"config.{field}", name, known))

    @property
    def calibrator_names(self) -> tuple[str, ...]:
        """Names of the calibrators, with `raw` unless one of them has it as a component."""
        names = [name.strip() for name in self.calibrators.split(",")]
        others = tuple(dict.fromkeys(name for name in names if name not in ("", "raw")))
        methods = [calibration.METHODS[name] for name in others if name in calibration.METHODS]
        has_raw = any(method.has_components for method in methods)
        return others if has_raw else ("raw", *others)


@functools.cache
def type_for(learner: type[learners.Learner], benchmark: str) -> type[Config]:
    """Returns the type of settings with the options of a learner and of the package's learners."""
    sections = learners.option_types(learner, benchmark)
    options = [(name, section, section()) for name, section in sections.items()]
    chosen = msgspec.defstruct("Learner", options, bases=(LearnerSettings,))
    fields = [("learner", chosen, chosen())]
    # Pickled as plain values, for other processes.
    pickled = {"__reduce__": lambda config: (of_values, (msgspec.to_builtins(config),))}
    kind = msgspec.defstruct("Config", fields, bases=(Config,), namespace=pickled)
    return cast(type[Config], kind)


def of_values(values: dict[str, Any]) -> Config:
    """Returns settings from plain values by section; those that are missing have their defaults.

    Raises:
        InputError: a value is not allowed, or there is no such learner.
    """
    learner = learners.find(values["learner"]["name"])
    return convert(values, type_for(learner, values["benchmark"]), "config.")


def fields(kind: type[Struct] = Config, prefix: str = "") -> Iterator[tuple[str, list[Meta]]]:
    """Yields the name of every field, such as `train.rank`, with its ranges, marks and text."""
    for field in msgspec.structs.fields(kind):
        name = prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, Struct):
            yield from fields(field.type, f"{name}.")
        else:
            yield name, [*getattr(field.type, "__metadata__", ())]


def marked(*marks: Meta) -> frozenset[str]:
    """Returns the names of the fields that have one of some marks."""
    names = []
    for mark in marks:
        names.extend(name for name, metas in fields() if mark in metas)
    return frozenset(names)
