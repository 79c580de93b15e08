"""Configurations: reading, checks, and the comparison of two of them."""

import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import ml_collections
from flax import traverse_util

from fdc_jax import calibration, learners
from fdc_jax.data import sources
from fdc_jax.errors import InputError, did_you_mean, escaped, line, nearest, origin
from fdc_jax.machine.files import named_path, open_regular
from fdc_jax.model import vit
from fdc_jax.run import base, loggers

# An ml_collections.ConfigDict; no type checker knows its fields.
Config: TypeAlias = Any

_PACKAGE = Path(__file__).parents[1]

# Paths and speed of reading. They may differ between the hosts of one run, and a folder that is
# opened says nothing about them: `paths.RunPaths.read_config` drops what is saved there.
OF_A_HOST = frozenset(
    ("cache_dir", "data.dir", "data.source", "encoder.weights", "data.workers", "data.cache_gib")
)
# Results depend on these by rounding alone. Weights are compared by their checksum.
WITHOUT_EFFECT = OF_A_HOST.union(
    ("checkpoint.every_steps", "checkpoint.keep", "data.allow_overlap"),
    ("encoder.attention", "report", "untrained"),
)
# Fields that may differ between runs whose accuracies are compared.
NOT_COMPARED = WITHOUT_EFFECT.union(
    ("seed", "save_features", "evaluation.batch_size", "evaluation.every")
)

# Allowed values, as in `learners.Option`.
_ALLOWED: dict[str, str | tuple[str, ...]] = {
    **dict.fromkeys(("num_tasks", "train.epochs", "data.workers", "data.cache_gib"), "[0, inf)"),
    **dict.fromkeys(("data.train_per_class", "data.test_per_class"), "[0, inf)"),
    **dict.fromkeys(("train.batch_size", "evaluation.every"), "[1, inf)"),
    **dict.fromkeys(("checkpoint.every_steps", "checkpoint.keep"), "[1, inf)"),
    **dict.fromkeys(("encoder.image_size", "encoder.heads"), "[0, 4096]"),
    **dict.fromkeys(("train.increment_learning_rate", "train.head_learning_rate"), "(0, inf)"),
    "class_order_seed": "[-1, 4294967295]",
    "data.input_range": (*vit.INPUT_RANGES, "model"),
    "data.test_share": "[0, 1)",
    "encoder.attention": vit.ATTENTIONS,
    "evaluation.batch_size": "[1, 65536]",
    "learner.preset": ("protocol", "native"),
    "precision": tuple(vit.PRECISIONS),
    "train.rank": "[1, 8192]",
    "train.schedule": ("constant", "cosine", "quarter_cosine"),
}

# Fields that divide classes into tasks; a run may grow by further tasks.
TASKS = frozenset({"class_order", "classes_per_task", "num_tasks"})


def named() -> dict[str, Path]:
    """Returns the files of configurations that come with the package, by name."""
    # In a clone they stand beside the package, elsewhere within it.
    folders = (_PACKAGE.parent / "configs", _PACKAGE / "configs")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.py"))}


def load(name: str) -> Config:
    """Returns the configuration of a file, or of one of the package such as `configs/digits.py`.

    A word after a colon goes to its `get_config`: `digits:slca` is the digits by SLCA.

    Raises:
        InputError: there is no such file, or it fails.
    """
    file, *word = name.split(":", 1)
    path, known = Path(file), named()
    if file in known or not path.is_file():  # A bare name is never a file of the current folder.
        if path.stem not in known or str(path) not in (path.stem, f"configs/{path.stem}.py"):
            text = f"expected a file, or one of {', '.join(known)}; found {file}"
            raise InputError(text + nearest(path.stem, known))
        path = known[path.stem]
    try:
        config: Any = runpy.run_path(str(path))["get_config"](*word)
        config.lock()  # fails if it is no ConfigDict
        missing = flatten(base.fields()).keys() - flatten(config).keys()
    except (Exception, SystemExit) as error:  # whatever a file raises
        raise InputError(f"{path}: {origin(error)}") from error
    if missing:
        raise InputError(f"{path}: expected all fields of base.get_config, found no {min(missing)}")
    return config


def flatten(config: Config) -> dict[str, Any]:
    """Returns `{"train.epochs": 20, ...}` with tuples as lists, as JSON would give them back."""
    flat: Any = traverse_util.flatten_dict(json.loads(config.to_json()), sep=".")
    return dict(sorted(flat.items()))


def of_host(config: Config) -> dict[str, Any]:
    """Returns the fields that tell of this machine, for `open_run` of the configuration's own."""
    return {name: value for name, value in flatten(config).items() if name in OF_A_HOST}


def calibrators(config: Config) -> tuple[str, ...]:
    """Returns the names of the calibrators of a run, with `raw` unless one has it as component."""
    names = tuple(dict.fromkeys(name.strip() for name in config.calibrators.split(",")))
    others = tuple(name for name in names if name and name != "raw")
    known = (calibration.METHODS.get(name) for name in others)
    return others if any(method and method.has_components for method in known) else ("raw", *others)


def validate(config: Config) -> None:
    """Raises InputError for a value that is not allowed, as far as no data or weights are needed.

    Adds the options of a learner outside the package.
    """
    config.benchmark = sources.name_of(config.benchmark, config.data.source)
    learners.find(config.learner.name)
    with config.unlocked():
        for section, options in learners.defaults(config.benchmark, config.learner.name).items():
            if section not in config.learner:
                config.learner[section] = ml_collections.ConfigDict(options)
    _read_class_order(config)
    _check_values(config)


def completed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a saved configuration, those that it lacks with their defaults.

    Fields that tell of a machine have their defaults, too: whoever wrote the folder may not choose
    what this process reads elsewhere. Nothing is read or imported; a bad value is an InputError.
    """
    if not isinstance(benchmark := saved["benchmark"], str):
        raise InputError(f"config.benchmark: expected a name, found {type(benchmark).__name__}")
    config: Any = base.get_config(sources.name_of(benchmark, ""))
    fields, others = flatten(config), {}
    for field, value in saved.items():
        if field in fields.keys() - OF_A_HOST and value is not None:
            try:
                if isinstance(value, dict):
                    raise TypeError("expected a value, found an object")
                plain = tuple(value) if isinstance(value, list) else value
                config.update_from_flattened_dict({field: plain})
            except (TypeError, ValueError) as error:
                raise InputError(f"config.{field}: {escaped(line(error))}") from error
        elif field.startswith("learner.") and isinstance(value, bool | int | float | str):
            others[field] = value  # an option of a learner outside the package
    _check_values(config, others)
    return flatten(config) | others


def _check_values(config: Config, others: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Raises InputError if a value is not allowed; `others` are further options of a learner."""
    flat = {**flatten(config), **others}

    def refuse(field: str, expected: str) -> None:
        raise InputError(f"config.{field}: expected {expected}, found {flat[field]!r}")

    sizes = flat["classes_per_task"]
    several = isinstance(sizes, list) and len(sizes) > 0
    if not all(type(n) is int and n >= several for n in (sizes if several else [sizes])):
        refuse("classes_per_task", "a whole number, or a list of them such as 10,5,5")
    if flat["class_order"] and flat["class_order_seed"] != -1:
        refuse("class_order_seed", "-1 together with config.class_order")

    seeds = flat["seed"]
    whole = isinstance(seeds, list) and all(type(n) is int and 0 <= n < 2**32 for n in seeds)
    if not whole or not seeds or len({*seeds}) < len(seeds):
        refuse("seed", "different whole numbers from 0 to 4294967295, such as 1,2,3")
    scale = flat["data.crop_scale"]
    numbers = isinstance(scale, list) and all(type(share) in (int, float) for share in scale)
    if not numbers or len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
        refuse("data.crop_scale", "two ascending shares of at most 1, such as 0.05,1.0")
    allowed = dict(_ALLOWED)
    for name in (*learners.names(), config.learner.name):
        allowed |= {field: option.allowed for field, option in learners.options(name).items()}
    for field, values in allowed.items():
        if field in flat and (wanted := learners.expected(values, flat[field])) is not None:
            refuse(field, wanted)
    for name in calibrators(config):
        if name not in calibration.METHODS:
            raise InputError(did_you_mean("config.calibrators", name, calibration.METHODS))
    for name in filter(None, config.log.split(",")):
        if name not in loggers.KINDS:
            raise InputError(did_you_mean("config.log", name, loggers.KINDS))
    try:
        calibration.make("fdc", **config.fdc.to_dict())
    except InputError as error:
        raise InputError(f"config.fdc.{error}") from error


def _read_class_order(config: Config) -> None:
    """Replaces the file of `class_order` by the names in it, to which the run is tied."""
    names = tuple(map(str, config.class_order))
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
        names = tuple(filter(None, map(str.strip, text.splitlines())))
    if names:
        config.class_order = names


def differences(saved: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Returns phrases such as "train.rank was 10, is 3" by field of `new`, if results differ."""
    return {
        field: f"other {field.removesuffix(' sha256')}"
        if field.endswith(" sha256")
        else f"{field} was {saved.get(field)!r}, is {value!r}"
        for field, value in sorted(new.items())
        if field not in WITHOUT_EFFECT and saved.get(field) != value
    }
