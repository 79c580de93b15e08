"""Class-incremental learners, one file each: what a method is called, its options, five questions.

A learner is a module that declares its `TITLE` and, where it has them, its `OPTIONS` (a dictionary
of `Option`), the components of FDC that the paper enables for it (`SELECTED`, a key of
`results.json`'s `components`; everything on by default), its row in the paper's tables
(`PAPER_ROW`), other learners whose options it reads (`READS`), by benchmark the fields, or own
options, of the authors' runs that no preset sets (`AUTHORS_RUNS`), and what in the learning of a
task depends on how many there will be (`TASK_COUNT`, words for a notice). It answers five
questions; what it leaves out it answers as Cumulative-LoRA does:

1. What does it keep between tasks?
   `initial_state(setup) -> state`
2. What does it compute before a task, in closed form?
   `before_task(setup, backbone, state, task, images) -> state`
3. What does it train, with what loss and what update?
   `start(setup, backbone, state, task, key) -> (frozen, trained)`,
   `loss(setup, backbone, frozen, trained, batch) -> scalar`, `update(setup) -> training.Update`
4. What does it do when the task ends?
   `after_task(setup, backbone, state, task, frozen, trained, images) -> state`
5. Which encoder and which heads does it offer for inference?
   `encoder(setup, backbone, state, num_tasks) -> kernels`,
   `heads(setup, state, num_tasks) -> list of heads`
   A state after t tasks is asked for E_0 and E_t; a learner that keeps no others refuses them with
   `InputError`.

`state`, `frozen` and `trained` are pytrees of arrays whose shapes never depend on the task, so
that one compilation serves all tasks. `state` is what a checkpoint holds; `frozen` must follow from
`state`, `task` and `key`, which itself follows from seed and task; `backbone` is the pretrained
parameter tree and never changes. A leaf of `state` that is a NumPy array stays on the host, where
large things belong that no training step reads; everything else is put on the devices. `images`
gives the task's training images again: `images.augmented()`, as the first epoch of the task has
them, and `images.plain()`, in evaluation preprocessing, iterate over batches, labels counted within
the task.

Option X of a learner in file N is `config.learner.N.X`, on the command line
`--config.learner.N.X=VALUE`, in a learner `setup.config.learner.N.X`. That is all: flags, checks
and the report's labels follow from the declaration.
"""

import dataclasses
import functools
import importlib
import pkgutil
import re
import sys
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fdc_jax.errors import InputError

_QUESTIONS = ("initial_state", "before_task", "start", "loss", "after_task", "encoder", "heads")
_LIBRARIES = re.compile(rf"site-packages|<frozen|^{re.escape(str(Path(__file__).parents[1]))}")
_INTERVAL = re.compile(r"([\[(])([-+.\w]+), ([-+.\w]+)([\])])")


@dataclasses.dataclass(frozen=True)
class Option:
    """What a learner lets its user choose.

    Attributes:
        default: the value under the paper's protocol, whose type all values have.
        allowed: an interval such as "(0, 1]", whose ends are numbers or other options of the
            learner; or the words to choose from. Empty: no limit.
        comment: what it is.
        on: the default on some benchmarks.
    """

    default: bool | int | float | str
    allowed: str | tuple[str, ...] = ""
    comment: str = ""
    on: Mapping[str, bool | int | float | str] = dataclasses.field(default_factory=dict)

    def default_on(self, benchmark: str) -> bool | int | float | str:
        """Returns the default on a benchmark, the same for all splits of its images."""
        return self.on.get(benchmark.removesuffix("_random80"), self.default)


def expected(
    allowed: str | tuple[str, ...], value: Any, others: Mapping[str, Any] | None = None
) -> str | None:
    """Returns what was expected where a value is not allowed, in words, or else None.

    `others` holds values by name, for intervals that end at one of them.
    """
    if isinstance(allowed, tuple):
        return None if value in allowed else " or ".join(allowed)
    if not allowed:
        return None
    try:
        opening, *ends, closing = _INTERVAL.fullmatch(allowed).groups()  # pyright: ignore
        low, high = ((others or {}).get(end, end) for end in ends)
        least, most = float(low), float(high)
    except (AttributeError, ValueError) as error:
        raise InputError(f"expected an interval such as '(0, 1]', found {allowed!r}") from error
    above = least < value or (opening == "[" and least == value)
    below = value < most or (closing == "]" and value == most)
    if above and below:
        return None
    kind = "a whole number" if isinstance(value, int) else "a number"
    return f"{kind} in {opening}{low}, {high}{closing}"


# Which learners there are ------------------------------------------------------------------------


def names() -> tuple[str, ...]:
    """Returns the learners of the package: files of this folder, in the order of the paper."""
    return tuple(_own())


@functools.cache
def _own() -> dict[str, types.ModuleType]:
    files = [each.name for each in pkgutil.iter_modules(__path__) if each.name[0] != "_"]
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in sorted(files)}
    found = {name: module for name, module in modules.items() if hasattr(module, "TITLE")}
    rows = {name: getattr(module, "PAPER_ROW", len(found)) for name, module in found.items()}
    for module in found.values():
        _complete(module)
    return dict(sorted(found.items(), key=lambda item: rows[item[0]]))


def _complete(module: Any) -> None:
    """Gives a learner Cumulative-LoRA's answers to the questions that it leaves out."""
    if not hasattr(module, "TASK_COUNT"):
        module.TASK_COUNT = ""
    default, training = (
        importlib.import_module(f"{__name__}.{name}") for name in ("cumulative_lora", "training")
    )
    if not hasattr(module, "update"):
        module.update = lambda setup: training.gradient_update(setup, module.loss)
    for question in _QUESTIONS:
        if not hasattr(module, question):
            setattr(module, question, getattr(default, question))


def find(name: str) -> Any:
    """Returns a learner by its name, or by the dotted name of a module outside the package.

    Raises:
        InputError: no such learner, or an error in its file.
    """
    return _own().get(name.removeprefix(f"{__name__}.")) or _outside(name)


def _outside(name: str) -> types.ModuleType:
    """Imports a learner that is no file of this folder."""
    try:
        module = importlib.import_module(name)
    except InputError:
        raise
    except Exception as error:
        if isinstance(error, ImportError | ValueError) and getattr(error, "name", name) == name:
            raise InputError(
                f"learner.name: expected one of {', '.join(names())} or an importable module, "
                f"found {name!r} ({error})"
            ) from error
        raise InputError(f"learner.name: {name}: {place(error)}") from error
    if not hasattr(module, "TITLE"):
        raise InputError(f"learner.name: module {name!r} is no learner: it declares no TITLE")
    if section(name) in (*names(), "name", "preset"):
        raise InputError(f"learner.name: {name}: {section(name)} is taken; call the file otherwise")
    for option, value in getattr(module, "OPTIONS", {}).items():
        if not isinstance(value, Option):
            raise InputError(
                f"learner.name: {name}: OPTIONS: {option}: expected Option(default, allowed, "
                f"comment), found {value!r}"
            )
    _complete(module)
    return module


def place(error: BaseException) -> str:
    """Returns an error in one line, with the file and the line that it comes from."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost line of the user's own; libraries below it were only told something wrong.
    own = [each for each in frames if not _LIBRARIES.search(each.filename)]
    last, said = (own or frames)[-1], str(error).strip().partition("\n")[0]
    return f"{last.filename}, line {last.lineno}: {type(error).__name__}: {said}"


def _declared(name: str) -> types.ModuleType | None:
    """Returns the module of a learner; None of one that is not at hand, such as another user's."""
    module = _own().get(name) or sys.modules.get(name)
    return module if hasattr(module, "TITLE") else None


# What they declare -------------------------------------------------------------------------------


def title(name: str) -> str:
    """Returns how tables call a learner; one that is not at hand is called by its name."""
    return getattr(_declared(name), "TITLE", name)


def summary(name: str) -> str:
    """Returns in a few words what a learner of the package is: the first line of its file."""
    return (_own()[name].__doc__ or "").partition("\n")[0].partition(": ")[2].rstrip(".")


def selected(name: str) -> str:
    """Returns the components that the paper enables for a learner, a key of `components`."""
    return getattr(_declared(name), "SELECTED", "full")


def section(name: str) -> str:
    """Returns where a learner's own options stand in `config.learner`: the name of its file."""
    return name.rpartition(".")[2]


def options(name: str) -> dict[str, Option]:
    """Returns the options that a learner reads, by their field, such as `learner.inflora.lamb`."""
    module = _declared(name)
    found = {}
    for each in (*getattr(module, "READS", ()), name):
        own = getattr(_declared(each), "OPTIONS", {})
        found |= {f"learner.{section(each)}.{option}": value for option, value in own.items()}
    return found


def defaults(benchmark: str, outside: str = "") -> dict[str, dict[str, Any]]:
    """Returns the options on a benchmark by learner: what `config.learner` begins with.

    Raises:
        InputError: there is no learner `outside` of the package.
    """
    modules = _own() | ({section(outside): find(outside)} if outside else {})
    declared = {name: getattr(module, "OPTIONS", {}) for name, module in modules.items()}
    return {
        name: {option: value.default_on(benchmark) for option, value in own.items()}
        for name, own in declared.items()
        if own
    }


def check_options(name: str, flat: Mapping[str, Any]) -> None:
    """Checks the options of a learner, and of all learners of the package.

    Raises:
        InputError: names the field, what was expected and what was found.
    """
    for learner in dict.fromkeys((*names(), name)):
        known = options(learner)
        values = {field.rpartition(".")[2]: flat[field] for field in known}
        for field, option in known.items():
            wanted = expected(option.allowed, flat[field], values)
            if wanted is not None:
                raise InputError(f"config.{field}: expected {wanted}, found {flat[field]!r}")


def deviations(name: str, flat: Mapping[str, Any]) -> list[str]:
    """Says in words which options of a learner depart from the paper's protocol.

    `flat` has values by field, as `config` in `results.json`; a missing one had its default.
    """
    phrases = []
    for field, option in options(name).items():
        default = option.default_on(str(flat.get("benchmark", "")))
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
