"""Records: one JSON file per method, calibrator and seed, with predictions that prove its numbers.

`fields.json` lists the fields. `check` computes accuracy, curve, routing accuracy and recall of a
record from its predictions again.
"""

import base64
import json
import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from jsonschema import Draft202012Validator, exceptions, validators

from fdc_jax import evaluation
from fdc_jax.calibration import METHODS
from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_json, read_object, write_text

_FIELDS = read_json(Path(__file__).with_name("fields.json"))
FACTS, OPTIONAL, PROTOCOL = (tuple(_FIELDS[part]) for part in ("facts", "optional", "protocol"))
NUMBERS = tuple(_FIELDS["numbers"])
_SCHEMAS = {name: schema for part in _FIELDS.values() for name, schema in part.items()}
# Numbers that `check` computes again.
_COMPUTED = ("accuracy", "curve", "routing_accuracy", "task_recall")
RECALL = (1, 2, 3, 5)

# 5.0 is no whole number, and NaN is no number.
_types = Draft202012Validator.TYPE_CHECKER.redefine_many(
    {
        "integer": lambda _, value: type(value) is int,
        "number": lambda _, value: type(value) in (int, float) and math.isfinite(value),
    }
)
_Validator = validators.extend(Draft202012Validator, type_checker=_types)


def require(
    value: Any, place: str, needed: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    """Raises InputError if a value from JSON is no object of these fields."""
    schema = {
        "type": "object",
        "properties": {name: _SCHEMAS[name] for name in (*needed, *optional)},
        "required": needed,
        "additionalProperties": False,
        "description": "an object",
    }
    error = exceptions.best_match(_Validator(schema).iter_errors(value))
    if error is None:
        return
    path = ".".join(map(str, error.absolute_path))
    if error.validator in ("required", "additionalProperties"):
        text = error.message
    else:
        known = _SCHEMAS.get(str(next(iter(error.absolute_path), "")), schema)
        text = f"expected {error.schema.get('description') or known['description']}"
        text += f", found {json.dumps(error.instance)[:40]}"
    raise InputError(": ".join(filter(None, (place, path, text))))


def truth(record: Mapping[str, Any]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " c"]]:
    """Returns the class of each test image and the task of each class, as classes arrive."""
    counts, sizes = record["test_images"], record["classes_per_task"]
    if not len(counts) == len(record["class_order"]) == sum(sizes):
        raise InputError("class_order, classes_per_task and test_images: not of as many classes")
    return np.repeat(np.arange(len(counts)), counts), np.repeat(np.arange(len(sizes)), sizes)


def measure(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a record, in percent, computed from its predictions.

    Without labels after each task, the curve has only the accuracy after the last task.

    Raises:
        InputError: predictions are damaged, or are not of the test images of the record.
    """
    label, task_of = truth(record)
    task, predictions = task_of[label], record["predictions"]
    num_classes, num_tasks = len(task_of), len(record["classes_per_task"])
    predicted = unpack(predictions["label"], len(label), num_classes, "predictions.label")
    after = predictions.get("label_after") or []
    if len(after) not in (0, num_tasks):
        raise InputError(f"predictions.label_after: expected {num_tasks}, found {len(after)}")
    if after and after[-1] != predictions["label"]:
        raise InputError("predictions.label: expected the last of label_after")
    curve = []
    for t, text in enumerate(after):
        seen, known = label[task <= t], int(np.sum(task_of <= t))
        then = unpack(text, len(seen), known, f"predictions.label_after.{t}")
        curve.append(evaluation.accuracy(seen, then))
    accuracy = evaluation.accuracy(label, predicted)
    numbers = {
        "accuracy": accuracy,
        "curve": curve or [accuracy],
        "routing_accuracy": evaluation.accuracy(task, task_of[predicted]),
    }
    if text := predictions.get("task_rank"):
        rank = unpack(text, len(label), num_tasks, "predictions.task_rank")
        numbers["task_recall"] = {str(k): 100.0 * float(np.mean(rank < k)) for k in RECALL}
    return numbers


def unpack(text: str, size: int, limit: int, place: str) -> Int[np.ndarray, " n"]:
    """Reads what `evaluation.pack` wrote; InputError unless `size` numbers below `limit`."""
    try:
        packed = base64.b64decode(text, validate=True)
        stream = zlib.decompressobj()
        content = stream.decompress(packed, 2 * size + 1)
        if not stream.eof or stream.unused_data:
            raise ValueError("another length")
        numbers = np.frombuffer(content, "<u2").astype(np.int64)
    except (zlib.error, ValueError) as error:
        raise InputError(f"{place}: not packed numbers ({error})") from error
    if len(numbers) != size or numbers.max(initial=0) >= limit:
        raise InputError(f"{place}: expected {size} numbers below {limit}")
    return numbers


def check(record: Any, place: str) -> None:
    """Raises InputError if fields are wrong, or a number is not that of the predictions."""
    require(record, place, (*FACTS, *PROTOCOL, *NUMBERS), (*OPTIONAL, "task_recall"))
    if record["calibrator"] not in METHODS:
        raise InputError(f"{place}: calibrator: expected one of {', '.join(METHODS)}")
    rate, rates, seconds = (record.get(name) for name in ("rate", "rates", "search_seconds"))
    if (rate or rates or seconds) and (seconds is None or rate not in (rates or {})):
        raise InputError(f"{place}: rates: expected search_seconds, too, and among them the rate")
    if rates and rates[rate] < max(rates.values()):
        raise InputError(f"{place}: rate: expected the best of rates, found {rate}")
    try:
        computed = measure(record)
    except InputError as error:
        raise InputError(f"{place}: {error}") from error
    if len(record["curve"]) != len(record["classes_per_task"]):
        raise InputError(f"{place}: curve: expected a number for each task")
    stated = {name: record.get(name) for name in _COMPUTED}
    stated["curve"] = stated["curve"][-len(computed["curve"]) :]
    for name, value in stated.items():
        if (of := _rounded(value)) != (by := _rounded(computed.get(name))):
            raise InputError(f"{place}: {name}: expected {by} by its predictions, found {of}")


def _rounded(value: Any) -> Any:
    """Rounds every number in a value to six places."""
    if isinstance(value, dict):
        return {key: round(number, 6) for key, number in value.items()}
    return value and np.round(value, 6).tolist()


def read(folder: str | Path) -> dict[Path, dict[str, Any]]:
    """Returns the records of a folder by path.

    Raises:
        InputError: there are none, one is wrong, two have the same code, method, calibrator and
            seed, or they are of different protocols.
    """
    records = {path: read_json(path) for path in sorted(Path(folder).glob("*.json"))}
    if not records:
        raise InputError(f"{folder}: expected records, found none")
    first: dict[tuple[Any, ...], Path] = {}
    for path, record in records.items():
        check(record, str(path))
        row = tuple(record[name] for name in ("code", "method", "calibrator", "seed"))
        if first.setdefault(row, path) != path:
            raise InputError(f"{path}: code, method, calibrator and seed are those of {first[row]}")
        _check_same(record, str(path), *next(iter(records.items())))
    return records


def _check_same(record: dict[str, Any], place: str, path: Path, other: Any) -> None:
    """Raises InputError if a record has another protocol than the one of a path."""
    require({name: other.get(name) for name in PROTOCOL}, str(path), PROTOCOL)
    if differ := [name for name in PROTOCOL if other[name] != record[name]]:
        raise InputError(f"{place}: {differ[0]}: not as in {path}")


def write(record: dict[str, Any], folder: str | Path) -> Path:
    """Checks a record, writes it with one line per field, and returns its path."""
    check(record, "the record")
    code = [record["code"]] * (record["code"] != "fdc_jax")
    parts = (record["method"], record["calibrator"], *code, str(record["seed"]))
    name = "-".join(re.sub(r"\W+", "_", word).lower() for word in parts)
    path = Path(folder) / f"{name}.json"
    if other := min(Path(folder).glob("*.json"), default=None):
        _check_same(record, "the record", other, read_object(other))
    if path.exists() and read_json(path) != json.loads(json.dumps(record)):
        raise InputError(f"{path}: is another record of this method and seed; remove it first")
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path
