"""Sources of images: a folder or an archive, data prepared by TFDS, CIFAR-100, the digits."""

import os
from pathlib import Path

from fdc_jax.data import archive, benchmarks, cifar100, folder
from fdc_jax.data.dataset import Dataset, Skipped
from fdc_jax.errors import InputError
from fdc_jax.machine.files import locked, named_path


def name_of(benchmark: str, source: str) -> str:
    """Returns the name of a configuration's data: `benchmark`, or else the name of its source.

    Raises:
        InputError: both are empty, or the name cannot be shown.
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


def fields_of(name: str, path: str | os.PathLike[str]) -> dict[str, str]:
    """Returns configuration fields that select a folder or archive of images, or a TFDS folder."""
    folder = named_path("images", path)
    if _prepared_version(name, folder):
        return {"data.dir": str(folder), "data.source": ""}
    return {"data.source": str(folder)}


def is_to_download(name: str, cache: Path, source: str, data_dir: str) -> bool:
    """Returns True if `open_splits` with these arguments would download images."""
    present = source or (cache / "data" / cifar100.ARCHIVE_NAME).exists()
    return name == "cifar100" and not (present or _prepared_version(name, _prepared(data_dir)))


def _prepared(data_dir: str) -> Path:
    """Returns the folder of data that TFDS prepared."""
    default = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return named_path("config.data.dir", data_dir or default)


def _prepared_version(name: str, folder: Path) -> Path | None:
    """Returns the folder of the newest version of data that TFDS prepared, or None."""
    if not (folder / name).is_dir():
        return None
    from fdc_jax.data import tfds_format  # The import takes seconds.

    return tfds_format.newest_version(name, folder)


def open_splits(
    name: str,  # of a benchmark, or any other
    cache: Path,  # folder of downloads, unpacked archives and hashes of images
    *,
    source: str = "",  # folder or archive; if empty, the name decides
    data_dir: str = "",  # of TFDS; if empty, `$TFDS_DATA_DIR` or `~/tensorflow_datasets`
    test_share: float = 0.0,  # as in `folder.open_folder`, like the next three
    allow_overlap: bool = False,  # True for every benchmark
    grey_bits: int = 0,
    workers: int = 0,
    quiet: bool = True,
) -> tuple[Dataset, Dataset]:
    """Returns the training and the test images of `source`, or the data that `name` stands for.

    Without a source, the name is `digits`, `cifar100` (downloaded), or that of data in `data_dir`.

    Raises:
        InputError: the data do not exist, or are damaged.
    """
    benchmark = benchmarks.BENCHMARKS.get(name)
    cache = cache.absolute() / "data"
    if name == "digits":
        if source:
            raise InputError(f"config.data.source: expected none, digits are embedded: {source}")
        from fdc_jax.data import digits  # The import takes a second.

        return digits.open_digits()
    lock = cache / f".{name[:50]}.lock"  # other processes wait until the data are unpacked
    upright = benchmark is None  # The paper's protocol ignores the EXIF orientation.
    if source:
        path = named_path("config.data.source", source)
        if not path.exists():
            raise InputError(
                f"config.data.source: {path}: expected a folder or an archive, found nothing"
            )
        with locked(lock, wait=True):
            if name == "cifar100" and path.is_file():
                return cifar100.open_cifar100(cache, path)
            existing = {path, *cache.iterdir()}
            root = path if path.is_dir() else archive.unpack(path, cache)
            skipped = Skipped() if path.is_dir() else archive.skipped(root)
            try:
                return folder.open_folder(
                    root,
                    name,
                    cache,
                    partition=benchmark.partition if benchmark else "given",
                    test_share=test_share,
                    allow_overlap=allow_overlap or benchmark is not None,
                    upright=upright,
                    grey_bits=grey_bits,
                    workers=workers,
                    quiet=quiet,
                    skipped=skipped,
                )
            except InputError as error:
                if root not in existing:  # Only this call reads the folder; it may be large.
                    archive.remove(root)
                raise InputError(str(error).replace(str(root), str(path))) from error
    prepared = _prepared(data_dir)
    if version := _prepared_version(name, prepared):
        from fdc_jax.data import tfds_format

        partition = benchmark.partition if benchmark else "tfds"
        return tfds_format.open_prepared(version, name, cache, partition, upright, grey_bits)
    if name in benchmarks.ARCHIVES:  # TFDS has other divisions of these, or none.
        file, page = benchmarks.ARCHIVES[name]
        raise InputError(
            f"config.data.source: expected PILOT's archive {file} ({page}) or the folder of its "
            "contents, found none"
        )
    if data_dir:
        subfolders = sorted(path.name for path in prepared.glob("*/"))[:10]
        raise InputError(
            f"config.data.dir: {prepared}: expected the folder {name} that TFDS prepared, found "
            + (", ".join(subfolders) or "no folder")
        )
    if name == "cifar100":
        with locked(lock, wait=True):
            return cifar100.open_cifar100(cache, quiet=quiet)
    raise InputError(
        "config.data.source: expected a folder or an archive of images; found none, nor "
        f"{name} prepared by TFDS in {prepared}"
    )
