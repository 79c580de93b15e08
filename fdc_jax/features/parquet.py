"""Feature files of Parquet: `train_0.parquet`, ..., `test.parquet` in a folder, beside its `.npy`.

Columns are `adapted`, `pretrained` and `previous`, lists of d numbers, and `labels`.
"""

from pathlib import Path
from typing import Any

import numpy as np

from fdc_jax.errors import InputError


class Vectors:
    """A column of vectors [n, d], which is read anew whenever it is asked for."""

    ndim = 2

    def __init__(self, file: Any, path: Path, name: str) -> None:
        kind, self.path, self.name = file.schema_arrow.field(name).type, path, name
        first = next(file.iter_batches(1, columns=[name]))[name]
        self.shape = file.metadata.num_rows, len(first.flatten())
        self.dtype = np.dtype(kind.value_type.to_pandas_dtype())
        self.nbytes = self.shape[0] * self.shape[1] * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        from pyarrow import parquet

        column = parquet.read_table(self.path, columns=[self.name])[self.name].combine_chunks()
        found = column.flatten().to_numpy(zero_copy_only=False)
        if found.size != self.shape[0] * self.shape[1]:
            raise InputError(f"{self.path}: {self.name}: expected as many numbers in each row")
        return found.reshape(self.shape).astype(dtype or self.dtype, copy=False)


def read(folder: Path) -> dict[str, Any]:
    """Returns the arrays of a folder's Parquet files by their names in a feature file.

    Raises:
        InputError: there are some, but pyarrow is not installed, or one cannot be read.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.parquet")):
        try:
            from pyarrow import parquet

            file = parquet.ParquetFile(path)
            stem, _, task = path.stem.partition("_")
            for name in file.schema_arrow.names:
                given = file.read([name])[name].to_numpy() if name == "labels" else None
                array = Vectors(file, path, name) if given is None else given
                found["_".join((stem, name, task)).rstrip("_")] = array
        except (ImportError, OSError, ValueError, AttributeError, StopIteration) as error:
            raise InputError(f"{path}: cannot be read as Parquet of vectors: {error}") from error
    return found
