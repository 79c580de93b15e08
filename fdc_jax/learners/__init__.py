"""Class-incremental learners, one file each; `learner.py` defines their interface.

A learner's name is that of its file. Outside this folder it is the dotted name of an importable
module, or of a file below the current directory: `probes.linear` is `probes/linear.py`.
"""

import functools
import importlib
import importlib.util
import os
import pkgutil
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import msgspec
from msgspec import structs

from fdc_jax.errors import InputError, escaped, line, nearest, place
from fdc_jax.learners.learner import Learner, Replaced, noted
from fdc_jax.machine.conversion import convert

__all__ = ["Learner", "Replaced", "noted"]

Value: TypeAlias = bool | int | float | str  # of an option


# Discovery ---------------------------------------------------------------------------------------


def names(trained: bool = False) -> tuple[str, ...]:
    """Returns the names of the package's learners, or of those that train, in the paper's order."""
    return tuple(name for name, learner in _packaged().items() if learner.trains or not trained)


@functools.cache
def _packaged() -> dict[str, type[Learner]]:
    """Returns the learners in files of this folder, by name."""
    files = sorted(module.name for module in pkgutil.iter_modules(__path__))
    classes = {name: _defined_in(importlib.import_module(f"{__name__}.{name}")) for name in files}
    learners = [(name, learner) for name, learner in classes.items() if learner is not None]
    return dict(sorted(learners, key=lambda item: item[1].paper_row))


def _defined_in(module: types.ModuleType) -> type[Learner] | None:
    """Returns the last class derived from `Learner` that a module defines, or None."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    defined = [c for c in classes if issubclass(c, Learner) and c.__module__ == module.__name__]
    return defined[-1] if defined and defined[-1] is not Learner else None


def find(name: str, field: str = "config.learner.name") -> type[Learner]:
    """Returns the class of a learner, by its name or the dotted name of an outside module.

    Errors begin with `field`, which named the learner.

    Raises:
        InputError: the learner does not exist, or its file has an error.
    """
    return _packaged().get(name.removeprefix(f"{__name__}.")) or _import(name, field)


def _import(name: str, field: str) -> type[Learner]:
    """Returns the learner of a module outside the package."""
    dotted = name.removesuffix(".py").replace("/", ".")
    file = Path(*dotted.split(".")).absolute().with_suffix(".py")
    module = None
    try:
        if name == dotted and all(map(str.isidentifier, name.split("."))):
            module = _importable(name) or _read(name, file)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{field}: {name}: {place(error, name)}") from error
    if module is None:
        known = names() if name == dotted else (dotted,)
        raise InputError(
            f"{field}: expected one of {', '.join(names())}, an importable module, or one of the "
            f"current folder ({file}), found {name!r}{nearest(name, known)}"
        )
    source = getattr(module, "__file__", None) or ""
    if file.is_file() and os.path.realpath(source) != os.path.realpath(file):
        raise InputError(f"{field}: {name}: expected one file, found {source} and {file}")
    learner, field = _defined_in(module), f"{field}: {name}:"
    if learner is None:
        raise InputError(f"{field} expected a class derived from Learner, found none")
    if section(name) in (*names(), "name", "preset"):
        raise InputError(f"{field} expected a file with a name of its own, found {section(name)}")
    try:
        options = learner.options()
        convert(msgspec.to_builtins(options()), options, f"{field} ")
    except (NameError, TypeError) as error:
        raise InputError(f"{field} options: {line(error)}") from error
    return learner


def _importable(name: str) -> types.ModuleType | None:
    """Returns a module of the search path, on which no command has the current folder, or None."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _read(name: str, file: Path) -> types.ModuleType | None:
    """Returns a module from its file alone, not from bytecode beside it; None if missing."""
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None:
        return None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(compile(file.read_bytes(), file, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def imported(name: str) -> type[Learner]:
    """Returns the class of a learner, or `Learner` if its module was not imported."""
    module = sys.modules.get(name)
    return _packaged().get(name) or (module and _defined_in(module)) or Learner


# Declarations ------------------------------------------------------------------------------------


def title(name: str) -> str:
    """Returns the name of a learner in tables; `name` if its module was not imported."""
    return imported(name).title or name


def selected(name: str) -> str:
    """Returns the components that the paper enables for a learner, a key of `components`, or ""."""
    return imported(name).selected if name in names(trained=True) else ""


def section(name: str) -> str:
    """Returns the name of a learner's options in `config.learner`, which is that of its file."""
    return name.rpartition(".")[2]


def default_options(name: str, benchmark: str) -> dict[str, Value]:
    """Returns the defaults of a learner's options on a benchmark, by option."""
    return structs.asdict(imported(name).options(benchmark)())


def option_types(learner: type[Learner], benchmark: str) -> dict[str, type[msgspec.Struct]]:
    """Returns the types of the options of the package's learners and of `learner`, by section."""
    classes = (*_packaged().values(), learner)
    types = {other.section(): other.options(benchmark) for other in classes}
    return {name: kind for name, kind in types.items() if kind.__struct_fields__}


def deviations(name: str, flat: Mapping[str, Any]) -> list[str]:
    """Returns a phrase, such as "lamb 0.9", for each option that departs from the protocol.

    `flat` has values by field, as `config` in `results.json`; a missing field has its default.
    """
    phrases = []
    for option, default in default_options(name, str(flat.get("benchmark", ""))).items():
        value = flat.get(f"learner.{section(name)}.{option}", default)
        if value != default:
            text = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
            text = f"{text:g}" if isinstance(text, float) else text
            phrases.append(f"{option.replace('_', ' ')} {text}")
    return phrases


def check_state(name: str, method: str, before: Any, after: Any) -> None:
    """Checks that the state of a learner after a method has the arrays of the state before.

    Raises:
        InputError: an array is missing, new, or of another shape or dtype.
    """
    if different := difference(before, after):
        raise InputError(
            f"config.learner.name: {name}: {method} must return a state like that of "
            f"initial_state; {different}"
        )


def difference(expected: Any, actual: Any) -> str:
    """Returns a phrase about the first leaf whose shape or dtype differs in two trees, or ""."""

    def kinds(tree: Any) -> dict[str, str]:
        leaves, keystr = jax.tree_util.tree_leaves_with_path(tree), jax.tree_util.keystr
        return {
            keystr(path, simple=True, separator="/"): f"{jnp.result_type(x)}{[*jnp.shape(x)]}"
            for path, x in leaves
        }

    trees = kinds(expected), kinds(actual)
    for path in [*trees[0], *trees[1]]:
        before, now = (tree.get(path, "nothing") for tree in trees)
        if before != now:
            return f"{escaped(path)[:80] or 'the root'}: expected {before}, found {now}"
    return ""
