"""Conversion of plain values, such as JSON, to types; an error names field, range and value."""

import re
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from fdc_jax.errors import InputError, escaped, nearest

T = TypeVar("T")
# Words for the user by msgspec's names of types.
NOUNS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "an object",
    "str": "text",
}
_NAME = re.compile(r"[^.\[\]]+")
_NOUN = re.compile(rf"\b({'|'.join(NOUNS)})\b")


def convert(value: object, kind: type[T], prefix: str = "") -> T:
    """Converts a plain value to a type and checks the ranges that the type declares.

    NumPy numbers are accepted as values of the outermost mapping.

    Raises:
        InputError: a part of the value is wrong: "FIELD: expected a whole number >= 0, found -1".
            FIELD is the path of the part, after `prefix`.
    """
    if isinstance(value, Mapping):
        numbers = {k: v.item() for k, v in value.items() if isinstance(v, np.number)}
        value = {**value, **numbers}
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if error.__cause__ is not None:  # of a `__post_init__`
            raise InputError(str(error.__cause__)) from None
        reason, _, path = str(error).replace("`", "").partition(" - at $")
    field = f"{prefix}{path.removeprefix('.')}".removesuffix(".")
    text = _reason(reason, path, value, kind)
    raise InputError(escaped(f"{field}: {text}" if field else text)[:300])


def _reason(reason: str, path: str, value: Any, kind: Any) -> str:
    """Returns a reason of msgspec in plain words, with the value at a path."""
    # The keys of a saved configuration contain dots, such as `train.rank`.
    key = path.removeprefix(".")
    names = [key] if isinstance(value, dict) and key in value else re.findall(_NAME, path)
    for name in names:
        kind = typing.get_type_hints(kind).get(name) if isinstance(kind, type) else None
        try:
            value = value[int(name) if name.isdecimal() else name]
        except (LookupError, TypeError):  # msgspec's paths omit the keys of mappings.
            break
    if missing := re.fullmatch("Object missing required field (.*)", reason):
        return f"expected a field {missing[1]}, found none"
    if unknown := re.fullmatch("Object contains unknown field (.*)", reason):
        return f"no field {unknown[1]}{nearest(unknown[1], typing.get_type_hints(kind))}"
    expected = reason.removeprefix("Expected ").partition(", got")[0].replace(" | ", " or ")
    expected = re.sub(" matching regex .*", " of accepted characters", expected)
    if reason.startswith("Invalid enum value"):
        expected = " or ".join(typing.get_args(kind))
    expected = _NOUN.sub(lambda match: NOUNS[match[0]], expected)
    return f"expected {expected}, found {value!r:.100}"
