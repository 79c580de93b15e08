"""Prepares a benchmark for reading: image folders and archives to TFDS array_record.

    python -m fdc_jax.data.prepare BENCHMARK --source=FOLDER_OR_ARCHIVE --data_dir=DIR

Every image is decoded once; nothing is left that a reader would accept unless all of it is well.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from fdc_jax.data import batches, benchmarks, cifar100, folders, images, tfds_format
from fdc_jax.data.dataset import data_folder
from fdc_jax.errors import InputError


def prepare(
    benchmark_name: str,
    source: str | os.PathLike[str] | None,
    data_dir: str | os.PathLike[str],
    *,
    workers: int | None = None,
    allow_other_split: bool = False,
    quiet: bool = False,
) -> Path | None:
    """Prepares a benchmark below `data_dir`, once.

    Args:
        benchmark_name: key of `benchmarks.BENCHMARKS`.
        source: folder or archive with the raw data; may be None for CIFAR-100, which is then
            downloaded, and for the embedded digits.
        data_dir: folder of prepared data sets.
        workers: decoding threads; None for one per core.
        allow_other_split: accepts a division into train and test that is not PILOT's, as the
            benchmark "NAME_other".
        quiet: says nothing but errors.

    Returns:
        The folder of the prepared data; None for the embedded digits.

    Raises:
        InputError: the raw data are not there, are damaged, or are not what the table says.
    """
    benchmark = benchmarks.find(benchmark_name)
    say = _silent if quiet else _print
    if benchmark.partition == "embedded":
        say(f"{benchmark.name} is embedded: nothing to prepare")
        return None
    if allow_other_split and benchmark.partition not in ("pilot", "other"):
        raise InputError(f"{benchmark.name} has one split only: --allow_other_split does not apply")
    if source is None and benchmark.name != "cifar100":
        raise InputError(f"{benchmark.name} needs --source=PATH, where PATH is {benchmark.obtain}")
    data_dir = data_folder(data_dir)
    workers = batches.default_workers() if workers is None else workers
    if workers < 1:
        raise InputError(f"workers must be at least 1, found {workers}")
    job = _Job(benchmark, data_dir, workers, quiet, say)
    if job.done(benchmark):
        return tfds_format.dataset_folder(benchmark, data_dir)
    with _locked(job.data_dir / f".{benchmark.tfds_name}.lock", say):
        # Another process may have done it while this one waited.
        if job.done(benchmark):
            return tfds_format.dataset_folder(benchmark, data_dir)
        try:
            with _scratch(job.data_dir, benchmark.tfds_name) as scratch:
                if benchmark.name == "cifar100":
                    return _prepare_cifar100(job, None if source is None else Path(source), scratch)
                return _prepare_folder(job, Path(str(source)), scratch, allow_other_split)
        except OSError as error:
            raise InputError(f"cannot prepare {benchmark.name}: {error}") from error


class _Job:
    """What all steps of one preparation share."""

    def __init__(
        self,
        benchmark: benchmarks.Benchmark,
        data_dir: Path,
        workers: int,
        quiet: bool,
        say: Callable[[str], None],
    ):
        self.benchmark = benchmark
        self.data_dir = data_dir
        self.workers = workers
        self.quiet = quiet
        self.say = say

    def done(self, benchmark: benchmarks.Benchmark) -> bool:
        folder = tfds_format.dataset_folder(benchmark, self.data_dir)
        if (folder / "dataset_info.json").is_file():
            self.say(f"{benchmark.name} is already prepared in {folder}")
            return True
        if folder.exists():
            raise InputError(
                f"{folder}: expected a prepared data set or nothing, found a folder without "
                "dataset_info.json; remove it"
            )
        return False

    def write(
        self,
        benchmark: benchmarks.Benchmark,
        scratch: Path,
        features: Any,
        plan: dict[str, tuple[Sequence[Any], int]],
        load: Callable[[Any], dict[str, Any]],
    ) -> Path:
        """Writes all splits and moves the result to its place.

        Args:
            benchmark: what is written.
            scratch: folder on the same disk as the data folder.
            features: of the data set.
            plan: per split its items, in the order of writing, and their size in bytes.
            load: item to example; runs in threads; InputError marks an unreadable image.
        """
        staged = tfds_format.dataset_folder(benchmark, scratch)
        staged.mkdir(parents=True)
        writer = tfds_format.DatasetWriter(staged, benchmark, features)
        unreadable: list[str] = []
        digest = hashlib.sha256()

        def good(results: Iterable[dict[str, Any] | InputError]) -> Iterator[dict[str, Any]]:
            for result in results:
                if isinstance(result, InputError):
                    unreadable.append(str(result))
                    continue
                name = result.get("file_name", result.get("id"))
                content = hashlib.sha256(result["image"]).hexdigest()
                digest.update(f"{name}\t{result['label']}\t{content}\n".encode())
                # After a failure only the remaining names matter.
                if not unreadable:
                    yield result

        for split, (items, num_bytes) in plan.items():
            digest.update(f"{split}\n".encode())
            results = _in_order(load, items, self.workers)
            with _progress(results, len(items), f"{benchmark.name} {split}", self.quiet) as shown:
                writer.write_split(split, good(shown), len(items), num_bytes)
        if unreadable:
            total = sum(len(items) for items, _ in plan.values())
            raise InputError(
                f"{benchmark.name}: {len(unreadable)} of {total} images cannot be read: "
                + "; ".join(unreadable)
            )
        writer.finish({"partition": benchmark.partition, "images_sha256": digest.hexdigest()})
        # Reads everything back, and leaves index and checksum beside the data.
        read = {name: tfds_format.open_prepared(benchmark, name, scratch) for name in plan}
        benchmarks.verify(benchmark, read["train"].labels, read["test"].labels)
        checksums = {name: found.checksum for name, found in read.items()}
        folder = tfds_format.dataset_folder(benchmark, self.data_dir)
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.rename(staged, folder)
        self.say(
            f"{benchmark.name}: "
            + ", ".join(f"{len(read[name])} {name} images" for name in plan)
            + f", partition {benchmark.partition}, in {folder}; SHA-256 "
            + ", ".join(f"{name} {value[:16]}" for name, value in checksums.items())
        )
        return folder


def _prepare_folder(job: _Job, source: Path, scratch: Path, allow_other_split: bool) -> Path:
    with folders.unpacked(source, scratch) as root:
        if job.benchmark.partition == "random80":
            found, others = folders.list_images(folders.class_root(root))
            train, test = folders.random80(found)
        else:
            root = folders.split_root(root)
            train, others = folders.list_images(root / "train")
            test, more = folders.list_images(root / "test")
            others += more
        if others:
            job.say(
                f"{len(others)} files are no images by their suffix and are left out: "
                + ", ".join(others[:5])
            )
        class_names = sorted({image.class_name for image in [*train, *test]})
        benchmark = _choose(job, train, test, class_names, allow_other_split)
        if benchmark is not job.benchmark and job.done(benchmark):
            return tfds_format.dataset_folder(benchmark, job.data_dir)
        label = {name: index for index, name in enumerate(class_names)}

        def load(item: folders.ImageFile) -> dict[str, Any]:
            encoded = item.path.read_bytes()
            images.decode(encoded, str(item.path))
            return {
                "image": encoded,
                "label": label[item.class_name],
                "file_name": item.name,
            }

        plan: dict[str, tuple[Sequence[Any], int]] = {
            split: (items, sum(item.path.stat().st_size for item in items))
            for split, items in [("train", train), ("test", test)]
        }
        return job.write(benchmark, scratch, tfds_format.folder_features(class_names), plan, load)


def _choose(
    job: _Job,
    train: list[folders.ImageFile],
    test: list[folders.ImageFile],
    class_names: list[str],
    allow_other_split: bool,
) -> benchmarks.Benchmark:
    """Returns the benchmark that the images are: the one asked for, or its "other" split."""
    label = {name: index for index, name in enumerate(class_names)}
    train_labels, test_labels = (
        np.array([label[image.class_name] for image in split], np.int64) for split in (train, test)
    )
    try:
        missing = sorted(set(class_names) - {image.class_name for image in train})
        if missing:
            raise InputError(
                f"{job.benchmark.name}: expected training images of every class, found none of "
                + ", ".join(missing[:10])
            )
        benchmarks.verify(job.benchmark, train_labels, test_labels)
        return job.benchmark
    except InputError as error:
        other = benchmarks.BENCHMARKS.get(f"{job.benchmark.name}_other")
        if other is None:
            raise
        if not allow_other_split:
            raise InputError(
                f"{error}; --allow_other_split prepares it as benchmark {other.name} all the same"
            ) from error
        benchmarks.verify(other, train_labels, test_labels)
        job.say(f"{error}; preparing it as benchmark {other.name}")
        return other


def _prepare_cifar100(job: _Job, source: Path | None, scratch: Path) -> Path:
    benchmark = job.benchmark
    if source is None:
        archive = cifar100.download(benchmark, job.data_dir / "downloads", job.quiet)
    else:
        archive = source / cifar100.ARCHIVE_NAME if source.is_dir() else source
        if not archive.is_file():
            raise InputError(f"{archive}: expected the archive {cifar100.ARCHIVE_NAME}")
        cifar100.check(benchmark, archive)
    contents = cifar100.read(benchmark, archive)
    labels = {split: records[:, 1].astype(np.int64) for split, records in contents.splits.items()}
    benchmarks.verify(benchmark, labels["train"], labels["test"])

    def load(item: tuple[str, int]) -> dict[str, Any]:
        split, index = item
        record = contents.splits[split][index]
        file = io.BytesIO()
        Image.fromarray(cifar100.image(record)).save(file, "PNG")
        return {
            "id": f"{split}_{index:05d}",
            "image": file.getvalue(),
            "label": int(record[1]),
            "coarse_label": int(record[0]),
        }

    features = tfds_format.cifar100_features(contents.class_names, contents.superclass_names)
    plan: dict[str, tuple[Sequence[Any], int]] = {
        split: ([(split, index) for index in range(len(records))], records.nbytes)
        for split, records in contents.splits.items()
    }
    return job.write(benchmark, scratch, features, plan, load)


def _in_order(
    load: Callable[[Any], dict[str, Any]], items: Sequence[Any], workers: int
) -> Iterator[dict[str, Any] | InputError]:
    """Loads items in threads, a bounded number ahead, and yields results or errors in order."""

    def attempt(item: Any) -> dict[str, Any] | InputError:
        try:
            return load(item)
        except InputError as error:
            return error
        except OSError as error:
            return InputError(str(error))

    pending: collections.deque = collections.deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="prepare")
    try:
        for item in items:
            pending.append(pool.submit(attempt, item))
            if len(pending) >= 8 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _progress(
    results: Iterator[Any], total: int, title: str, quiet: bool
) -> Iterator[Iterator[Any]]:
    """Shows progress: a bar on a terminal, a line at every tenth elsewhere, nothing if quiet."""
    if quiet:
        yield results
    elif sys.stderr.isatty():
        with tqdm(results, total=total, desc=title, unit="image") as bar:
            yield iter(bar)
    else:
        yield _counted(results, total, title)


def _counted(results: Iterator[Any], total: int, title: str) -> Iterator[Any]:
    start = time.monotonic()
    for done, result in enumerate(results, 1):
        yield result
        if done * 10 // total > (done - 1) * 10 // total:
            rate = done / max(time.monotonic() - start, 1e-9)
            _print(f"{title}: {done} of {total} images, {rate:.0f} a second")


@contextlib.contextmanager
def _scratch(data_dir: Path, name: str) -> Iterator[Path]:
    """Yields a new folder, removed at the end, and removes those that killed runs left."""
    prefix = f".{name}.incomplete-"
    for stale in data_dir.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=data_dir, prefix=prefix))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Lets one process at a time prepare a data set; the system drops a dead process's lock."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m fdc_jax.data.prepare",
        description="Prepares a benchmark: images are checked and stored as TFDS array_record.",
        epilog="benchmarks and where their data are: "
        + " | ".join(f"{item.name}: {item.obtain}" for item in benchmarks.BENCHMARKS.values()),
    )
    parser.add_argument("benchmark", help="one of " + ", ".join(benchmarks.BENCHMARKS))
    parser.add_argument("--source", help="folder or archive with the raw data")
    parser.add_argument(
        "--data_dir",
        default="",
        help="folder of prepared data sets; default $TFDS_DATA_DIR or ~/tensorflow_datasets",
    )
    parser.add_argument("--workers", type=int, help="decoding threads; default one per core")
    parser.add_argument(
        "--allow_other_split",
        action="store_true",
        help="accept another division into train and test, as benchmark NAME_other",
    )
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    options = parser.parse_args(arguments)
    try:
        prepare(
            options.benchmark,
            options.source,
            options.data_dir,
            workers=options.workers,
            allow_other_split=options.allow_other_split,
            quiet=options.quiet,
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
