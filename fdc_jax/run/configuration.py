"""Configurations: reading, checks, and the comparison of two of them."""

import json
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import ml_collections
import msgspec
from flax import traverse_util
from msgspec import structs

from fdc_jax import learners
from fdc_jax.data import sources
from fdc_jax.errors import InputError, line, nearest, place
from fdc_jax.machine.conversion import convert
from fdc_jax.machine.files import named_path, open_regular
from fdc_jax.run.config import (
    GROUP,
    HOST,
    RESUME,
    STREAM,
    Config,
    fields,
    marked,
    of_values,
    type_for,
)

_PACKAGE = Path(__file__).parents[1]

OF_A_HOST = marked(HOST)
WITHOUT_EFFECT = marked(HOST, RESUME)
COMPARED = frozenset(name for name, _ in fields()) - marked(HOST, RESUME, GROUP)
TASKS = marked(STREAM)

Fields: TypeAlias = dict[str, Any]  # values by name, such as `train.rank`


def named() -> dict[str, Path]:
    """Returns the files of configurations that come with the package, by name."""
    # In a clone they stand beside the package, elsewhere within it.
    folders = (_PACKAGE.parent / "configs", _PACKAGE / "configs")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.py"))}


def load(name: str) -> ml_collections.ConfigDict:
    """Returns the configuration of a file, or of one of the package such as `configs/digits.py`.

    A word after a colon goes to its `get_config`: `digits:slca` is the digits by SLCA.

    Raises:
        InputError: there is no such file, or it fails.
    """
    file, *word = name.split(":", 1)
    known, stem = named(), file.removeprefix("configs/").removesuffix(".py")
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


def describe(config: ml_collections.ConfigDict) -> list[str]:
    """Returns a line for every field, with its flag, value and description."""
    values, lines = flatten(config), []
    for name, metas in fields(type_for(learners.find(values["learner.name"]), "")):
        value = values.get(name, "")
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        description = "".join(meta.description or "" for meta in metas)
        lines.append(f"  --config.{name}={text}  # {description}")
    return lines


def flatten(config: Config | ml_collections.ConfigDict) -> Fields:
    """Returns `{"train.epochs": 20, ...}` with tuples as lists, as JSON would give them back."""
    text = msgspec.json.encode(config) if isinstance(config, Config) else config.to_json()
    flat = traverse_util.flatten_dict(json.loads(text), sep=".")
    return dict(sorted(flat.items()))


def of_host(config: Config) -> Fields:
    """Returns the fields that tell of this machine, for `open_run` of the configuration's own."""
    return {name: value for name, value in flatten(config).items() if name in OF_A_HOST}


def completed(saved: Fields) -> Fields:
    """Returns the fields of a saved configuration, those that it lacks with their defaults.

    Fields that tell of a machine have their defaults, too: whoever wrote the folder may not choose
    what this process reads elsewhere. Nothing is read or imported; a bad value is an InputError.
    """
    benchmark = sources.name_of(convert(saved["benchmark"], str, "config.benchmark"), "")
    kind = type_for(learners.Learner, benchmark)
    known = {name for name, _ in fields(kind)}
    flat = {
        name: value
        for name, value in saved.items()
        if name in known - OF_A_HOST and value is not None
    }
    config = convert(traverse_util.unflatten_dict(flat, sep="."), kind, "config.")
    others = {  # options of a learner outside the package
        name: value
        for name, value in saved.items()
        if name.startswith("learner.") and name not in known and isinstance(value, learners.Value)
    }
    return flatten(config) | others


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
        if field not in WITHOUT_EFFECT and saved.get(field) != value
    }
