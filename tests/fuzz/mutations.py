"""Damage of every kind, drawn by a generator, so that a number tells what was done."""

import contextlib
import copy
import json

import numpy as np

# What no field expects: wrong kinds, odd words, numbers without end.
VALUES = (
    *(None, True, False, -1, 0, 1, 2**31, 10**9, 10**18, 10**400, 0.5, -1e308, 1e308),
    *(float("nan"), float("inf"), "", "x", "1", "é\n", "\0", "a\0b", "../..", "/dev/zero"),
    "9" * 5000,
    *([], {}, [[]], [None], [0], ["x"], {"x": {}}, [{}], {"": 0}, [-1, 2, 2]),
)  # fmt: skip


def damaged(rng, content):
    """Returns bytes of a file with one to four faults, or cut off, or replaced by others."""
    content = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        place = int(rng.integers(0, max(len(content), 1)))
        match rng.integers(0, 8):
            case 0 | 1 | 2 if content:
                content[place] ^= 1 << int(rng.integers(0, 8))
            case 3:
                del content[place:]
            case 4:
                del content[place : place + int(rng.integers(1, 60))]
            case 5:
                content[place:place] = rng.bytes(int(rng.integers(1, 20)))
            case 6:
                content[place : place + 8] = b"\xff" * 8
            case 7:
                content[place : place + 64] = content[: min(64, len(content))]
    return bytes(content)


def altered(rng, value, depth=0):
    """Returns a JSON value with another kind, key, nesting or number somewhere in it."""
    value = copy.copy(value)
    inner = list(value) if isinstance(value, dict) else range(len(value)) if _is_list(value) else ()
    if not len(inner) or rng.random() < (0.02 if depth == 0 else 0.3):
        match rng.integers(0, 6):
            case 0:
                return [value]
            case 1:
                return {"x": value}
            case 2:
                return nested(int(rng.choice([5, 5000])))
            case _:
                return VALUES[rng.integers(len(VALUES))]
    key = inner[rng.integers(len(inner))]
    match rng.integers(0, 10):
        case 0:
            del value[key]
        case 1 if isinstance(value, dict):
            value[f"{key}x"] = value.pop(key)
        case 1:
            value.insert(key, value[key])
        case _:
            value[key] = altered(rng, value[key], depth + 1)
    return value


def nested(depth):
    """Returns a list in a list, and so on; JSON text of it where no parser would go so deep."""
    found = []
    for _ in range(depth):
        found = [found]
    return found


def altered_json(rng, content):
    """Returns the bytes of a JSON file that is whole and says something else."""
    value = altered(rng, json.loads(content))
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 5000 + b"]" * 5000


def altered_lines(rng, content):
    """Returns the bytes of a text with a line lost, twice, cut or with another value."""
    lines = content.decode().splitlines(keepends=True)
    place = int(rng.integers(len(lines)))
    value = VALUES[rng.integers(len(VALUES) - 12)]
    match rng.integers(0, 5):
        case 0:
            del lines[place]
        case 1:
            lines.insert(place, lines[rng.integers(len(lines))])
        case 2:
            lines[place] = lines[place][: rng.integers(len(lines[place]))] + "\n"
        case _:
            head, sign, _ = lines[place].partition(" = ")
            head, sign, _ = (head, sign, "") if sign else lines[place].partition("return ")
            if sign:
                lines[place] = f"{head}{sign}{value!r}\n".replace("nan", "float('nan')")
    return "".join(lines).encode()


def altered_arrays(rng, arrays):
    """Returns named arrays of which one has another type, shape, name, or odd numbers."""
    arrays = dict(arrays)
    name = sorted(arrays)[rng.integers(len(arrays))]
    array = np.array(arrays[name])
    match rng.integers(0, 9):
        case 0:
            del arrays[name]
            return arrays
        case 1:
            arrays[f"{name}{rng.integers(12)}"] = arrays.pop(name)
            return arrays
        case 2 | 3:
            kinds = "f2 >f4 f8 i1 i8 >i8 u8 ?  c8 U3 S3 M8[s]".split()
            with np.errstate(all="ignore"), contextlib.suppress(ValueError, TypeError):
                array = array.astype(kinds[rng.integers(len(kinds))])
        case 4:
            rows = np.atleast_1d(array)
            shapes = (array[None], array.T, array[..., None], array.ravel(), rows[:0], rows[:1])
            array = shapes[rng.integers(len(shapes))]
        case 5:
            array = np.concatenate([array, array[:1]]) if array.ndim else array
        case _:
            odd = [np.nan, np.inf, -np.inf, 1e38, 1e300, -1, 2**62, 0, 1e-40]
            if array.ndim and array.dtype.kind in "iuf" and array.size:
                array = array.astype(np.float64 if rng.random() < 0.5 else array.dtype)
                place = rng.integers(array.size, size=1 + int(rng.integers(4)))
                with np.errstate(all="ignore"):
                    array.flat[place] = np.array(odd[rng.integers(len(odd))]).astype(array.dtype)
    arrays[name] = array
    return arrays


def _is_list(value):
    return isinstance(value, list)
