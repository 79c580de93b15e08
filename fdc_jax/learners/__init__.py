"""Class-incremental learners, one file each. `learner.py` says what a learner is and answers.

A file of this folder, or a module that Python imports from anywhere, holds one learner. It goes by
the name of its file, outside the package by the dotted name of the module.
"""

import dataclasses
import functools
import importlib
import pkgutil
import sys
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fdc_jax.errors import InputError, nearest, place
from fdc_jax.learners.learner import Learner, Option, Replaced, expected, option
from fdc_jax.learners.training import Setup

__all__ = ["Learner", "Option", "Replaced", "expected", "option"]


# Which learners there are ------------------------------------------------------------------------


def names() -> tuple[str, ...]:
    """Returns the learners of the package: files of this folder, in the order of the paper."""
    return tuple(_own())


@functools.cache
def _own() -> dict[str, type[Learner]]:
    files = sorted(each.name for each in pkgutil.iter_modules(__path__))
    found = {name: _defined_in(importlib.import_module(f"{__name__}.{name}")) for name in files}
    known = {name: each for name, each in found.items() if each is not None}
    return dict(sorted(known.items(), key=lambda item: item[1].paper_row))


def _defined_in(module: types.ModuleType) -> type[Learner] | None:
    """Returns the learner of a file: the last class derived from `Learner` that it defines."""
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    own = [each for each in classes if each.__module__ == module.__name__ and each is not Learner]
    return next((each for each in reversed(own) if issubclass(each, Learner)), None)


def find(name: str) -> type[Learner]:
    """Returns a learner by its name, or by the dotted name of a module outside the package.

    Raises:
        InputError: no such learner, or an error in its file.
    """
    return _own().get(name.removeprefix(f"{__name__}.")) or _outside(name)


def make(setup: Setup) -> Learner:
    """Returns the learner that a run's configuration names, with its options there.

    Raises:
        InputError: of `find`, or by the learner, whose options contradict each other.
    """
    return find(setup.config.learner.name).configured(setup)


def _outside(name: str) -> type[Learner]:
    """Imports a learner that is no file of this folder."""
    try:
        module = importlib.import_module(name)
    except InputError:
        raise
    except Exception as error:
        if isinstance(error, ImportError | ValueError) and getattr(error, "name", name) == name:
            raise InputError(
                f"learner.name: expected one of {', '.join(names())} or an importable module, "
                f"found {name!r} ({error}){nearest(name, names())}"
            ) from error
        raise InputError(f"learner.name: {name}: {place(error)}") from error
    learner = _defined_in(module)
    if learner is None:
        raise InputError(f"learner.name: module {name!r} defines no class derived from Learner")
    if section(name) in (*names(), "name", "preset"):
        raise InputError(f"learner.name: {name}: {section(name)} is taken; call the file otherwise")
    if any(isinstance(each, dataclasses.Field) for each in vars(learner).values()):
        raise InputError(
            f"learner.name: {name}: {learner.__name__} has options and so must be decorated with "
            "@dataclasses.dataclass(frozen=True)"
        )
    return learner


def _at_hand(name: str) -> type[Learner]:
    """Returns a learner by its name, the base in place of one that was not imported."""
    module = sys.modules.get(name)
    return _own().get(name) or (module and _defined_in(module)) or Learner


# What they declare -------------------------------------------------------------------------------


def title(name: str) -> str:
    """Returns how tables call a learner; one that is not at hand is called by its name."""
    return _at_hand(name).title or name


def selected(name: str) -> str:
    """Returns the components that the paper enables for a learner, a key of `components`."""
    return _at_hand(name).selected


def section(name: str) -> str:
    """Returns where a learner's own options stand in `config.learner`: the name of its file."""
    return name.rpartition(".")[2]


def options(name: str) -> dict[str, Option]:
    """Returns the options of a learner by their field, such as `learner.inflora.lamb`."""
    return {
        f"learner.{section(name)}.{field}": each for field, each in _at_hand(name).options().items()
    }


def of_another(field: str, name: str) -> bool:
    """Returns whether a field is an option of another learner than `name`, at hand or not."""
    own = f"learner.{section(name)}."
    return field.startswith("learner.") and field.count(".") > 1 and not field.startswith(own)


def defaults(benchmark: str, outside: str = "") -> dict[str, dict[str, Any]]:
    """Returns the options on a benchmark by learner: what `config.learner` begins with.

    Raises:
        InputError: there is no learner `outside` of the package.
    """
    known = _own() | ({section(outside): find(outside)} if outside else {})
    return {
        name: {field: each.default_on(benchmark) for field, each in learner.options().items()}
        for name, learner in known.items()
        if learner.options()
    }


def check_options(name: str, flat: Mapping[str, Any]) -> None:
    """Checks the options of a learner, and of all learners of the package.

    Raises:
        InputError: names the field, what was expected and what was found.
    """
    for learner in dict.fromkeys((*names(), name)):
        for field, each in options(learner).items():
            wanted = expected(each.allowed, flat[field])
            if wanted is not None:
                raise InputError(f"config.{field}: expected {wanted}, found {flat[field]!r}")


def deviations(name: str, flat: Mapping[str, Any]) -> list[str]:
    """Says in words which options of a learner depart from the paper's protocol.

    `flat` has values by field, as `config` in `results.json`; a missing one had its default.
    """
    phrases = []
    for field, each in options(name).items():
        default = each.default_on(str(flat.get("benchmark", "")))
        value = flat.get(field, default)
        if value != default:
            words = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
            words = f"{words:g}" if isinstance(words, float) else words
            phrases.append(f"{field.rpartition('.')[2].replace('_', ' ')} {words}")
    return phrases


def check_state(name: str, question: str, before: Any, after: Any) -> None:
    """Checks that a learner's answer to a question has the old state's arrays, in shape and type.

    Raises:
        InputError: names the first array that is another.
    """
    old, new = (
        {
            jax.tree_util.keystr(path): f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (before, after)
    )
    for where in [*old, *new]:
        if old.get(where) != new.get(where):
            raise InputError(
                f"learner.name: {name}: {question} must return a state like that of initial_state; "
                f"expected {old.get(where, 'nothing')} at {where or 'its place'}, found "
                f"{new.get(where, 'nothing')}"
            )
