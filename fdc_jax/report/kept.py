"""Results of saved features, kept in the user's cache folder: a second report takes seconds."""

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import joblib

import fdc_jax
from fdc_jax.machine.files import user_cache

_Function = TypeVar("_Function", bound=Callable[..., Any])


@functools.cache
def _code() -> str:
    """Returns a digest of the code that results depend on."""
    package = Path(inspect.getfile(fdc_jax)).parent
    files = sorted(
        f for part in ("calibration", "features", "report") for f in (package / part).rglob("*.py")
    )
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def kept(function: _Function) -> _Function:
    """Keeps the results of a function of a folder of saved features and of further arguments.

    They are computed again if the features or the code have changed.
    """

    def keyed(folder: Path, changed: int, code: str, *arguments: Any) -> Any:
        return function(folder, *arguments)

    keyed.__name__ = keyed.__qualname__ = function.__name__

    @functools.wraps(function)
    def call(folder: Path, *arguments: Any) -> Any:
        test = folder / "test_adapted.npy"
        changed = test.stat().st_mtime_ns if test.exists() else 0
        memory = joblib.Memory(user_cache() / "report", verbose=0)
        return memory.cache(keyed)(folder.absolute(), changed, _code(), *arguments)

    return cast(_Function, call)
