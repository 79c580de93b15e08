"""Where images come from: a folder or an archive, what TFDS prepared, CIFAR-100, the digits."""

from __future__ import annotations

import os
from pathlib import Path

from fdc_jax.data import archive, benchmarks, cifar100, folder
from fdc_jax.data.dataset import Dataset
from fdc_jax.errors import InputError


def name_of(benchmark: str, source: str) -> str:
    """Returns the name of a configuration's data: the one that it says, or that of their source.

    Raises:
        InputError: there is neither, or no name to be shown.
    """
    if not source and not benchmark:
        raise InputError(
            "config.data.source: expected a folder or an archive of images, train/CLASS/IMAGE and "
            "test/CLASS/IMAGE or CLASS/IMAGE; found none"
        )
    field = "config.benchmark" if benchmark else "config.data.source"
    name = benchmark or archive.stem(Path(os.path.abspath(os.path.expanduser(source))).name)
    if not name or name.startswith(".") or "/" in name or not name.isprintable():
        raise InputError(f"{field}: expected a name for the data, found {name!r}")
    return name


def open_splits(
    name: str,
    cache: Path,
    *,
    source: str = "",
    data_dir: str = "",
    test_share: float = 0.0,
    workers: int = 0,
    quiet: bool = True,
) -> tuple[Dataset, Dataset]:
    """Opens the training and the test images of a data set.

    Args:
        name: a benchmark's, or any other.
        cache: folder where downloads, unpacked archives and what was found in images are kept.
        source: a folder or an archive, see `folder.open_folder`; empty for the digits, for what
            TFDS has prepared and for CIFAR-100, which is then downloaded.
        data_dir: where TFDS has prepared data; empty for `$TFDS_DATA_DIR`, or
            `~/tensorflow_datasets`.
        test_share: of the images of each class, where a folder is not divided.
        workers: decoding threads, 0 for one per core.
        quiet: show no progress.

    Raises:
        InputError: there are no such data, or they are damaged.
    """
    benchmark, place = benchmarks.BENCHMARKS.get(name), cache / "data"
    if name == "digits":
        if source:
            raise InputError(f"config.data.source: expected none, digits are embedded: {source}")
        from fdc_jax.data import digits  # takes a second, which other data do without

        return digits.open_digits()
    path = Path(source).expanduser()
    upright = benchmark is None  # Benchmarks keep the paper's protocol.
    if source:
        if not path.exists():
            raise InputError(
                f"config.data.source: {path}: expected a folder or an archive, found nothing"
            )
        with archive.alone(place, name):
            if name == "cifar100" and path.is_file():
                return cifar100.open_cifar100(place, path)
            root = path if path.is_dir() else archive.unpacked(path, place)
            return folder.open_folder(
                root,
                name,
                place,
                given=benchmark.partition if benchmark else "given",
                test_share=test_share,
                upright=upright,
                workers=workers,
                quiet=quiet,
            )
    default = os.environ.get("TFDS_DATA_DIR") or os.path.join("~", "tensorflow_datasets")
    prepared = Path(data_dir or default).expanduser()
    if (prepared / name).is_dir():
        from fdc_jax.data import tfds_format  # takes seconds, too

        if found := tfds_format.find(name, prepared):
            partition = benchmark.partition if benchmark else "tfds"
            return tfds_format.open_prepared(found, name, place, partition, upright)
    if name == "cifar100":
        with archive.alone(place, name):
            return cifar100.open_cifar100(place, quiet=quiet)
    wanted = benchmarks.PILOT if benchmark else "a folder or an archive of images"
    raise InputError(
        f"config.data.source: expected {wanted}; found none, nor {name} prepared by TFDS in "
        f"{prepared}"
    )
