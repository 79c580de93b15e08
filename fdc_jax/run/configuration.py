"""Configurations: reading, checks, and the comparison of two of them."""

import itertools
import json
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import ml_collections
import msgspec
from flax import traverse_util
from msgspec import Meta, structs

from fdc_jax import learners
from fdc_jax.data import sources
from fdc_jax.data.task_stream import LearnedClasses
from fdc_jax.errors import InputError, line, nearest, place
from fdc_jax.evaluation import Name
from fdc_jax.machine.conversion import convert
from fdc_jax.machine.files import check_encodable, named_path, open_regular
from fdc_jax.run.config import (
    GROUP,
    HOST,
    RESUME,
    STREAM,
    Config,
    Positive,
    fields,
    marked,
    of_values,
    type_for,
)

_PACKAGE = Path(__file__).parents[1]

# Names in config.json that are no fields of the configuration: checksums of all classes by name,
# and the number of classes of every task. Both include classes of planned tasks.
CLASSES, PLANNED = "known classes", "classes of planned tasks"

OF_A_HOST = marked(HOST)
WITHOUT_EFFECT = marked(HOST, RESUME)
COMPARED = frozenset(name for name, _ in fields()) - marked(HOST, RESUME, GROUP)
TASKS = marked(STREAM)

_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}

Fields: TypeAlias = dict[str, Any]  # values by name, such as `train.rank`


class Content(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "weights_sha256": "weights sha256",
        "train_sha256": "training images sha256",
        "test_sha256": "test images sha256",
        "known_classes": CLASSES,
        "planned": PLANNED,
    },
):
    """The weights, images and classes of a run."""

    weights_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    train_sha256: Name = ""
    test_sha256: Name = ""
    known_classes: dict[Name, Name] = {}  # checksums
    planned: Annotated[tuple[Positive, ...], Meta(min_length=1)]  # number of classes by task

    def __post_init__(self) -> None:
        if self.known_classes and len(self.known_classes) != sum(self.planned):
            raise ValueError(f"{PLANNED}: expected {len(self.known_classes)} classes in all")


class SavedConfig(NamedTuple):
    """The content of `config.json`."""

    config: Config
    content: Content
    options: Fields  # of a learner outside the package

    @property
    def fields(self) -> Fields:
        """Values in the file, by name."""
        return flatten(self.config) | self.options | msgspec.to_builtins(self.content)

    @property
    def known(self) -> LearnedClasses:
        """The classes that the run knows, and the sizes of its tasks."""
        sizes = self.content.planned[: self.config.num_tasks or None]
        return LearnedClasses(self.content.known_classes, sizes)


def named() -> dict[str, Path]:
    """Returns the files of configurations that come with the package, by name."""
    # In a clone they stand beside the package, elsewhere within it.
    paths = itertools.chain(_PACKAGE.parent.glob("configs/*.py"), _PACKAGE.glob("configs/*.py"))
    return {path.stem: path for path in sorted(paths)}


def load(name: str) -> ml_collections.ConfigDict:
    """Returns the configuration of a file, or of one of the package such as `configs/digits.py`.

    A word after a colon goes to its `get_config`: `digits:slca` is the digits by SLCA.

    Raises:
        InputError: there is no such file, or it fails.
    """
    file, *word = name.split(":", 1)
    known = named()
    stem = file.removeprefix("configs/").removesuffix(".py")
    # A bare name is never a file of the current folder.
    path = Path(file) if file not in known and Path(file).is_file() else known.get(stem)
    if path is None:
        text = f"--config: expected a file, or one of {', '.join(known)}; found {file:.100}"
        raise InputError(text + nearest(stem, known))
    try:
        config = runpy.run_path(str(path), run_name="configuration")["get_config"](*word)
        config.lock()  # fails if it is no ConfigDict
        missing = {name for name, _ in fields()} - flatten(config).keys()
    except (Exception, SystemExit) as error:  # whatever a file raises
        text = str(error) if isinstance(error, InputError) else place(error, "configuration")
        raise InputError(f"--config: {path}: {text}") from error
    if missing:
        raise InputError(
            f"--config: {path}: expected all fields of base.get_config, found no {min(missing)}"
        )
    return config


def typed(config: ml_collections.ConfigDict) -> Config:
    """Returns the settings of a command line or of `configs/*.py`, checked.

    The benchmark has a name, and a file of `class_order` is replaced by the names in it.

    Raises:
        InputError: a value is not allowed, as far as no images or weights are needed to tell.
    """
    for name, value in flatten(config).items():
        if isinstance(value, str):
            check_encodable(f"config.{name}", value)
    values = json.loads(config.to_json(), parse_constant=str)
    values["benchmark"] = sources.name_of(values["benchmark"], values["data"]["source"])
    values["class_order"] = _class_names(values["class_order"])
    return of_values(values)


def of_fields(flat: Fields) -> Config:
    """Returns the settings of a saved run from its values by field; raises InputError."""
    return of_values(traverse_util.unflatten_dict(flat, sep="."))


def changed(config: Config, **sections: Fields) -> Config:
    """Returns a configuration with other values: `changed(config, train={"epochs": 5})`."""
    new = {name: structs.replace(getattr(config, name), **sections[name]) for name in sections}
    return structs.replace(config, **new)


def help_lines(config: ml_collections.ConfigDict) -> list[str]:
    """Returns a line for every field, with its flag, value, description and range."""
    values, lines = flatten(config), []
    for name, metas in fields(type_for(learners.find(values["learner.name"]), "")):
        value = values.get(name, "")
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        parts = [meta.description for meta in metas if meta.description]
        for meta in metas:
            for key, sign in _SIGNS.items():
                limit = getattr(meta, key)
                if limit not in (None, 2**53):  # Larger numbers have no exact float.
                    parts.append(f"{sign} {limit}")
        lines.append(f"  --config.{name}={text}  # {'; '.join(parts)}")
    return lines


def flatten(config: Config | ml_collections.ConfigDict) -> Fields:
    """Returns `{"train.epochs": 20, ...}` with tuples as lists, as JSON would give them back."""
    text = msgspec.json.encode(config) if isinstance(config, Config) else config.to_json()
    flat = traverse_util.flatten_dict(json.loads(text), sep=".")
    return dict(sorted(flat.items()))


def of_host(config: Config) -> Fields:
    """Returns the fields that tell of this machine, for `open_run` of the configuration's own."""
    return {name: value for name, value in flatten(config).items() if name in OF_A_HOST}


def replaced(config: Config, new: Fields) -> Config:
    """Returns a configuration with other values of some fields; raises InputError."""
    values = traverse_util.unflatten_dict(flatten(config) | new, sep=".")
    return convert(values, type(config), "config.")


def read(saved: Fields) -> SavedConfig:
    """Returns the content of `config.json`; raises InputError."""
    config, options = completed(saved)
    return SavedConfig(config, convert(saved, Content), options)


def completed(saved: Fields) -> tuple[Config, Fields]:
    """Returns a saved configuration, and the options of a learner outside the package.

    Fields that are missing have their defaults. So do fields that tell of a machine: whoever wrote
    the folder may not choose what this process reads elsewhere. Nothing is read or imported; a bad
    value is an InputError.
    """
    if missing := {"benchmark", "learner.name"} - saved.keys():
        raise InputError(f"expected a field {max(missing)}, found none")
    benchmark = sources.name_of(convert(saved["benchmark"], str, "config.benchmark"), "")
    kind = type_for(learners.Learner, benchmark)
    known = {name for name, _ in fields(kind)}
    flat = {
        name: value
        for name, value in saved.items()
        if name in known - OF_A_HOST and value is not None
    }
    options = {
        name: value
        for name, value in saved.items()
        if name.startswith("learner.") and name not in known and isinstance(value, learners.Value)
    }
    return convert(traverse_util.unflatten_dict(flat, sep="."), kind, "config."), options


def _class_names(order: Sequence[object]) -> list[str]:
    """Returns the names of `class_order`; one that is a file is replaced by the names in it."""
    names = [*map(str, order)]
    if len(names) == 1:
        file = named_path("config.class_order", names[0])
        listed = "," in names[0] and not file.exists()
        try:
            if listed:
                text = names[0].replace(",", "\n")
            else:
                with open_regular(file) as opened:
                    text = opened.read().decode("utf-8-sig")
        except (InputError, OSError, UnicodeDecodeError) as error:
            reason = line(error).removeprefix(f"{file}: ")
            raise InputError(
                f"config.class_order: {file}: expected a file of names in UTF-8: {reason}"
            ) from error
        names = list(filter(None, map(str.strip, text.splitlines())))
    return names


def differences(saved: Mapping[str, object], new: Mapping[str, object]) -> dict[str, str]:
    """Returns phrases such as "train.rank was 10, is 3" by field of `new`, if results differ."""
    return {
        field: f"other {field.removesuffix(' sha256')}"
        if field.endswith(" sha256")
        else f"{field} was {saved.get(field)!r}, is {value!r}"
        for field, value in sorted(new.items())
        if field not in WITHOUT_EFFECT | {CLASSES, PLANNED} and saved.get(field) != value
    }
