"""Features, labels and heads as calibrators accept them: their checks, and blocks of rows.

Arrays come from NumPy (memory maps included), JAX, or any library that offers `__array__` or
`__dlpack__`. Error messages count tasks from 0.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from fdc_jax.calibration.compiled import blocks_of, map_blocks
from fdc_jax.calibration.shapes import row_slices, squared_norm
from fdc_jax.errors import InputError
from fdc_jax.heads import KINDS

# Rows of a block on the host.
BLOCK_ROWS = 1024

VIEWS = ("adapted", "pretrained")

# The process that has used JAX for a calibrator, or none.
_process: dict[str, int] = {}


class NotApplicable(InputError):
    """A calibrator cannot use input of this kind, which is not damaged."""


def input_name(part: str, task: int) -> str:
    """Returns the name of an input of a task, such as "labels", in messages."""
    return f"{part} of task {task} (from 0)"


def missing(part: str, task: int, calibrator: str) -> NotApplicable:
    """Returns the error about an input of a task that a calibrator of a name reads."""
    return NotApplicable(f"{input_name(part, task)}: missing, which {calibrator} reads")


def host_array(value: Any, name: str) -> np.ndarray:
    """Returns an array of any library as a NumPy array, a view if possible; reads no memory map.

    Raises InputError if `value` is no array, has masked values, or is of another process's devices.
    """
    if isinstance(value, np.matrix):
        raise InputError(f"{name}: expected an array, found numpy.matrix; give numpy.asarray of it")
    refuse_masked(value, name)
    if isinstance(value, np.ndarray):
        return value if isinstance(value, np.memmap) else np.asarray(value)
    reason: Exception | str = f"found {type(value).__name__}"
    readers: list[Any] = []
    if hasattr(value, "detach"):  # PyTorch, whose parameters require gradients
        value = value.detach()
    if hasattr(value, "__array__") or isinstance(value, list | tuple):
        readers.append(np.asarray)
    if hasattr(value, "__dlpack__"):  # Unlike NumPy's reader, JAX's knows bfloat16.
        readers.append(lambda array: np.asarray(jnp.from_dlpack(array)))
    if hasattr(value, "cpu"):  # on a device that JAX does not have
        readers.append(lambda array: np.asarray(array.cpu()))
    for read in readers:
        try:
            return read(value)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            reason = error
    raise InputError(f"{name}: cannot be read as an array: {reason}")


def refuse_masked(value: Any, name: str) -> None:
    """Raises InputError if a masked array of NumPy has masked values."""
    if np.ma.is_masked(value):
        count = f"{np.ma.count_masked(value)} of {np.size(value)} values are masked"
        raise InputError(f"{name}: expected an array without a mask, found that {count}")


def refuse_fork() -> None:
    """Raises InputError in a fork of a process that has used JAX, whose threads are not copied."""
    if _process.setdefault("id", os.getpid()) != os.getpid():
        raise InputError(
            "this process was forked from one that has used JAX, and would wait forever; start "
            'processes with multiprocessing.get_context("spawn") or "forkserver"'
        )


def feature_array(value: Any, name: str, width: int | None = None, wait: bool = True) -> Any:
    """Returns features [n, width] after checks, in their number type; JAX arrays stay in place.

    Raises InputError if the array is not two-dimensional, has no columns or another width, does not
    hold real numbers, or has a row that is not finite in float32. Without `wait`, JAX arrays may
    have such rows.
    """
    refuse_fork()
    on_devices = isinstance(value, jax.Array) and value.is_fully_addressable
    array: Any = value if on_devices else host_array(value, name)
    if array.ndim != 2 or array.shape[1] == 0:
        raise InputError(f"{name}: expected shape [samples, width], found {list(array.shape)}")
    check_real(array, name)
    if width is not None and array.shape[1] != width:
        raise InputError(f"{name}: expected width {width}, found {array.shape[1]}")
    if wait or not on_devices:
        check_finite(array, name)
    return array


def check_finite(array: Any, name: str) -> None:
    """Raises InputError if a row of features is not finite in float32."""
    finite = _finite(array)
    if not finite.all():
        row = int(np.argmin(finite))
        raise InputError(f"{name}: row {row} is not finite, or too large for float32")


def _finite(array: Any) -> Bool[np.ndarray, " n"]:
    """Returns True for each row with a squared length that is finite in float32."""
    if isinstance(array, jax.Array):
        return in_blocks(_finite_on_device, None, array)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = [np.einsum("nd,nd->n", block, block) for _, block in blocks(array)]
    return np.isfinite(np.concatenate([np.zeros(0, np.float32), *squares]))


def _finite_on_device(_: None, block: Float[jax.Array, "n d"]) -> Bool[jax.Array, " n"]:
    return jnp.isfinite(squared_norm(block))


def whole_number(value: Any, name: str, least: int, most: float = np.inf) -> int:
    """Returns an integer, of Python or NumPy, from `least` to `most`; raises InputError."""
    is_integer = hasattr(value, "__index__") and not isinstance(value, bool | np.ndarray)
    if not is_integer or not least <= int(value) <= most:
        until = " on" if most == np.inf else f" to {most}"
        text = f"{value!r}"[:80]
        raise InputError(f"{name}: expected a whole number from {least}{until}, found {text}")
    return int(value)


def check_real(array: np.ndarray, name: str) -> None:
    """Raises InputError if an array has objects, text, truth values or complex numbers."""
    # bfloat16 has no kind in NumPy.
    if array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16":
        raise InputError(f"{name}: expected real numbers, found {array.dtype}")


def float32(array: np.ndarray) -> Float[np.ndarray, "..."]:
    """Returns an array in float32; numbers beyond its range become infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(array, dtype=np.float32)


def blocks(features: np.ndarray) -> Iterator[tuple[slice, Float[np.ndarray, "block d"]]]:
    """Yields slices of rows, and the features of these rows in float32."""
    for rows in row_slices(len(features), BLOCK_ROWS):
        yield rows, float32(features[rows])


def in_blocks(kernel: Callable[..., Any], fitted: Any, *views: Float[Any, "n _"]) -> Any:
    """Returns a tree of arrays [n, ...]: `kernel(fitted, *views)`, computed in blocks of rows."""
    columns = blocks_of(views)
    function = partial(jax.jit(kernel), jax.device_put(fitted))
    return columns[0].gather(map_blocks(function, *columns))


def evenly_spaced(values: np.ndarray, most: int) -> np.ndarray:
    """Returns at most `most` of the values, evenly spaced."""
    return values[np.linspace(0, len(values) - 1, min(len(values), most)).astype(int)]


def same_length(
    array: np.ndarray, other: np.ndarray, name: str, other_name: str = "the adapted features"
) -> None:
    """Raises InputError unless an array has as many rows as another one."""
    if len(array) != len(other):
        expected = f"{len(other)} rows like {other_name}"
        raise InputError(f"{name}: expected {expected}, found {len(array)}")


def label_array(value: Any, name: str) -> Int[np.ndarray, " n"]:
    """Returns labels as int64 [n]; raises InputError unless they are integers in one dimension."""
    array = host_array(value, name)
    if array.ndim != 1:
        raise InputError(f"{name}: expected shape [samples], found {list(array.shape)}")
    if array.size and array.dtype.kind not in "iu":
        raise InputError(f"{name}: expected integers, found {array.dtype}")
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise InputError(f"{name}: {array.max()} does not fit a signed 64-bit integer")
    return array.astype(np.int64)


def checked_views(
    adapted: Any, pretrained: Any, names: Sequence[str], widths: Sequence[Any], wait: bool
) -> list[Any]:
    """Returns features by view after the checks of `feature_array`, with as many rows."""
    given = [adapted] if pretrained is None else [adapted, pretrained]
    triples = zip(given, names, widths, strict=False)
    views = [feature_array(*triple, wait) for triple in triples]
    same_length(views[-1], views[0], names[-1])
    return views


def score_views(
    adapted: Any,
    pretrained: Any,
    widths: Sequence[int],
    needs_pretrained: bool,
    wait: bool = True,
) -> list[Any]:
    """Returns the features of a batch by view after the checks of `feature_array`.

    `widths` are those of the fitted views.
    """
    fitted_pretrained = len(widths) == 2
    if pretrained is None and fitted_pretrained and needs_pretrained:
        raise InputError(
            "pretrained features: expected, since the tasks were fitted with them; omit them only "
            "if that view has no weight"
        )
    if pretrained is not None and not fitted_pretrained:
        raise InputError("pretrained features: the tasks were fitted without a pretrained view")
    names = [f"{view} features" for view in VIEWS]
    return checked_views(adapted, pretrained, names, widths, wait)


# A task ------------------------------------------------------------------------------------------


class TaskInput(NamedTuple):
    """The checked input of `Calibrator.fit_task`."""

    task: int  # index, from 0
    views: list[Any]  # adapted features and, if given, pretrained ones
    rows: Int[np.ndarray, " n"]  # index of each sample's label in `classes`
    classes: Int[np.ndarray, " c"]  # label of each head row
    counts: Int[np.ndarray, " c"]  # samples of each class
    head: Any = None
    previous: Any = None  # unchecked

    def check_finite(self) -> None:
        """Raises InputError if a row of features is not finite in float32."""
        for name, view in zip(VIEWS, self.views, strict=False):
            check_finite(view, input_name(f"{name} features", self.task))

    def check_neighbours(self, neighbours: int) -> None:
        """Raises InputError if fewer classes have samples than there are neighbours."""
        present = int((self.counts > 0).sum())
        if present < neighbours:
            expected = f"{neighbours} neighbours need as many classes with samples"
            raise InputError(f"{input_name('labels', self.task)}: {expected}, found {present}")


def task_views(
    adapted: Any,
    labels: Any,
    pretrained: Any,
    task: int,
    widths: Sequence[int],
    wait: bool = True,
) -> tuple[list[Any], Int[np.ndarray, " n"]]:
    """Returns features by view, and labels of a task, after the checks of `feature_array`.

    `widths` are those of earlier tasks.
    """
    names = [input_name(f"{view} features", task) for view in VIEWS]
    if widths and (len(widths) == 1) != (pretrained is None):
        had, has = ("some", "none") if pretrained is None else ("none", "some")
        expected = "give them for all tasks or for none"
        raise InputError(f"{names[1]}: earlier tasks had {had}, this one has {has}; {expected}")
    views = checked_views(adapted, pretrained, names, widths or (None, None), wait)
    name = input_name("labels", task)
    labels = label_array(labels, name)
    same_length(labels, views[0], name)
    if not len(labels):
        raise InputError(f"{name}: expected at least one sample, found none")
    return views, labels


def task_classes(
    labels: Int[np.ndarray, " n"],
    task: int,
    num_rows: int | None,
    named: Any,
    earlier: Sequence[Int[np.ndarray, " _"]],
) -> tuple[Int[np.ndarray, " c"], Int[np.ndarray, " n"]]:
    """Returns the label of each head row, and the row of each sample.

    If `named` is None, the rows have the labels of the samples in ascending order. Without a head
    `num_rows` is None. Raises InputError if `named` or the head does not fit the labels.
    """
    name = input_name("classes", task)
    labels_name = input_name("labels", task)
    present = np.unique(labels)
    classes = present if named is None else label_array(named, name)
    if len(np.unique(classes)) < len(classes):
        raise InputError(f"{name}: a label is named twice")
    if num_rows not in (None, len(classes)):
        rest = f"found {len(classes)}"
        if named is None:
            hint = "if a class has no sample, name the labels"
            rest = f"the samples have {len(classes)}; {hint}"
        raise InputError(f"{name}: expected {num_rows} labels, one per row of the head, {rest}")
    check_new(classes, labels_name, earlier)
    known = np.isin(labels, classes)
    if not known.all():
        row = int(np.argmin(known))
        wrong = f"label {labels[row]} at row {row}"
        raise InputError(f"{labels_name}: {wrong} is none of the head's classes")
    order = np.argsort(classes)
    return classes, order[np.searchsorted(classes, labels, sorter=order)]


def check_new(
    classes: Int[np.ndarray, " c"], name: str, earlier: Sequence[Int[np.ndarray, " _"]]
) -> None:
    """Raises InputError if a label belongs to an earlier task; `name` is that of the labels."""
    for task, labels in enumerate(earlier):
        if again := set(classes.tolist()) & set(labels.tolist()):
            raise InputError(f"{name}: label {min(again)} already belongs to task {task} (from 0)")


def checked_head(head: Any, part: str, task: int, width: int, like: Any) -> Any:
    """Returns a head of `heads.KINDS` for features of a width, with float32 arrays; a bias is [c].

    `part` is its name in messages. Raises InputError if the head is of another kind than the head
    `like`, or an array has another shape, other than real numbers, or a row that is not finite.
    """
    name = input_name(part, task)
    if type(head) not in KINDS:
        raise InputError(
            f"{name}: expected one of {', '.join(kind.__name__ for kind in KINDS)} "
            f"(fdc_jax.heads), found {type(head).__name__}"
        )
    if type(head) is not type(like):
        raise InputError(
            f"{name}: expected a {KINDS[type(like)]} head like task 0, found {KINDS[type(head)]}"
        )
    parts: dict[str, np.ndarray] = {}
    count = None
    for field, value in head._asdict().items():
        name = input_name(f"{part} {field}", task)
        number = isinstance(value, int | float)
        array = host_array(np.asarray(value) if number else value, name)
        check_real(array, name)
        array = float32(array).copy()  # The caller may train the head further.
        expected = "a number"
        if count is None:  # the rows
            expected = f"shape [classes, {width}]"
            fits = array.ndim == 2 and len(array) > 0 and array.shape[1] == width
            count = len(array) if fits else 0
        elif field == "bias":
            array = np.full(count, array) if array.ndim == 0 else array
            expected = f"shape [{count}]"
            fits = array.shape == (count,)
        else:
            fits = array.ndim == 0
        if not fits:
            raise InputError(f"{name}: expected {expected}, found {[*array.shape]}")
        check_finite(array.reshape(len(array) if array.ndim else 1, -1), name)
        parts[field] = array
    return type(head)(**parts)
