"""Prepares a benchmark for reading: image folders and archives to TFDS array_record.

    python -m fdc_jax.data.prepare BENCHMARK --source=FOLDER_OR_ARCHIVE --data_dir=DIR

Every image is decoded once; nothing is left that a reader would accept unless all of it is well.
Beside the data, `duplicates.csv` lists images that occur more than once.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import dataclasses
import fcntl
import hashlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from fdc_jax.data import batches, benchmarks, cifar100, dataset, folders, images, tfds_format
from fdc_jax.errors import InputError


def prepare(
    benchmark_name: str,
    source: str | os.PathLike[str] | None = None,
    data_dir: str | os.PathLike[str] = "",
    *,
    workers: int | None = None,
    allow_other_split: bool = False,
    quiet: bool = False,
) -> Path | None:
    """Prepares a benchmark below `data_dir`, once.

    Args:
        benchmark_name: key of `benchmarks.BENCHMARKS`.
        source: folder or archive with the raw data; may be None for CIFAR-100, which is then
            downloaded, for the embedded digits, and for what is prepared already.
        data_dir: folder of prepared data sets, as in `dataset.data_folder`.
        workers: decoding threads; None for one per core.
        allow_other_split: accepts a division into train and test that is not PILOT's, as the
            benchmark "NAME_other".
        quiet: says nothing but errors.

    Returns:
        The folder of the prepared data; None for the embedded digits.

    Raises:
        InputError: the raw data are not there, are damaged, are not what the table says, or are
            others than those that are prepared already.
    """
    benchmark = benchmarks.find(benchmark_name)
    raw = None if source is None else Path(source)
    if raw is not None and not (raw.is_dir() or raw.is_file()):
        found = "neither" if raw.exists() else "nothing"
        raise InputError(f"{raw}: expected a folder or an archive, found {found}")
    workers = batches.default_workers() if workers is None else workers
    if workers < 1:
        raise InputError(f"workers must be at least 1, found {workers}")
    job = _Job(benchmark, dataset.data_folder(data_dir), workers, quiet)
    if benchmark.partition == "embedded":
        job.say(f"{benchmark.name} is embedded: nothing to prepare")
        return None
    if allow_other_split and benchmark.partition not in ("pilot", "other"):
        raise InputError(f"{benchmark.name} has one split only: --allow_other_split does not apply")
    if raw is None and job.is_prepared(benchmark):
        return job.already_prepared(benchmark)
    if raw is None and benchmark.name != "cifar100":
        raise InputError(f"{benchmark.name} needs --source=PATH, where PATH is {benchmark.obtain}")
    try:
        if benchmark.name == "cifar100":
            return _prepare_cifar100(job, raw)
        assert raw is not None
        return _prepare_folder(job, raw, allow_other_split)
    except OSError as error:
        raise InputError(f"cannot prepare {benchmark.name}: {error}") from error


class _Example(NamedTuple):
    """An image to be stored: its record, and the checksum of its pixels."""

    record: dict[str, Any]
    pixels: bytes

    @property
    def fact(self) -> tuple[str, int, bytes]:
        """What makes up its identity: name, label, pixels."""
        name = self.record.get("file_name", self.record.get("id", ""))
        return name, self.record["label"], self.pixels


@dataclasses.dataclass(frozen=True)
class _Job:
    """What all steps of one preparation share."""

    benchmark: benchmarks.Benchmark
    data_dir: Path
    workers: int
    quiet: bool

    def say(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def is_prepared(self, benchmark: benchmarks.Benchmark) -> bool:
        folder = tfds_format.dataset_folder(benchmark, self.data_dir)
        if (folder / "dataset_info.json").is_file():
            return True
        if folder.exists():
            raise InputError(
                f"{folder}: expected a prepared data set or nothing, found a folder without "
                "dataset_info.json; remove it"
            )
        return False

    def already_prepared(self, benchmark: benchmarks.Benchmark) -> Path:
        folder = tfds_format.dataset_folder(benchmark, self.data_dir)
        self.say(f"{benchmark.name} is already prepared in {folder}")
        return folder

    def in_order(self, load: Callable[[Any], Any], items: Sequence[Any], what: str) -> Iterator:
        """Loads items in threads and yields results, or InputErrors, in order, with a bar."""

        def attempt(item: Any) -> Any:
            try:
                return load(item)
            except InputError as error:
                return error
            except OSError as error:
                return InputError(str(error))

        pause = 0.1 if sys.stderr.isatty() else 30.0
        title, at_once = f"{self.benchmark.name} {what}", 32 * self.workers
        with (
            ThreadPoolExecutor(self.workers, thread_name_prefix="prepare") as pool,
            tqdm(
                total=len(items), desc=title, unit="image", disable=self.quiet, mininterval=pause
            ) as bar,
        ):
            for start in range(0, len(items), at_once):
                for result in pool.map(attempt, items[start : start + at_once]):
                    yield result
                    bar.update()

    def write(
        self,
        benchmark: benchmarks.Benchmark,
        scratch: Path,
        features: Any,
        plan: dict[str, tuple[Sequence[Any], int]],
        load: Callable[[Any], _Example],
        metadata: dict[str, Any],
    ) -> Path:
        """Writes all splits and moves the result to its place.

        Args:
            benchmark: what is written.
            scratch: folder on the same disk as the data folder.
            features: of the data set.
            plan: per split its items, in the order of writing, and their size in bytes.
            load: item to example; runs in threads; InputError marks an unreadable image.
            metadata: to be kept beside what is known of the data anyway.
        """
        staged = tfds_format.dataset_folder(benchmark, scratch)
        staged.mkdir(parents=True)
        writer = tfds_format.DatasetWriter(staged, benchmark, features)
        class_names = features["label"].names
        unreadable: list[str] = []
        facts: dict[str, list[tuple[str, int, bytes]]] = {split: [] for split in plan}

        def records(split: str, items: Sequence[Any]) -> Iterator[dict[str, Any]]:
            for result in self.in_order(load, items, split):
                if isinstance(result, InputError):
                    unreadable.append(str(result))
                # After a failure only the remaining names matter.
                elif not unreadable:
                    facts[split].append(result.fact)
                    yield result.record

        for split, (items, num_bytes) in plan.items():
            with contextlib.closing(records(split, items)) as found:
                writer.write_split(split, found, len(items), num_bytes)
        if unreadable:
            total = sum(len(items) for items, _ in plan.values())
            raise InputError(
                f"{benchmark.name}: {len(unreadable)} of {total} images cannot be read: "
                + "; ".join(unreadable)
            )
        repeated = _write_duplicates(staged / "duplicates.csv", facts, class_names)
        checksums = {name: dataset.images_sha256(class_names, facts[name]) for name in plan}
        writer.finish({"partition": benchmark.partition, "images_sha256": checksums, **metadata})
        # Reads everything back, and leaves the index beside the data.
        read = {name: tfds_format.open_prepared(benchmark, name, scratch) for name in plan}
        benchmarks.verify(benchmark, read["train"].labels, read["test"].labels)
        folder = tfds_format.dataset_folder(benchmark, self.data_dir)
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.rename(staged, folder)
        self.say(
            f"{benchmark.name}: "
            + ", ".join(f"{len(read[name])} {name} images" for name in plan)
            + f", partition {benchmark.partition}, in {folder}; SHA-256 "
            + ", ".join(f"{name} {value[:16]}" for name, value in checksums.items())
        )
        if repeated:
            self.say(f"{repeated}, listed in {folder / 'duplicates.csv'}")
        return folder

    @contextlib.contextmanager
    def workplace(self) -> Iterator[Path]:
        """Yields a new folder, removed at the end, for one process at a time.

        Folders that killed processes left are removed; the system drops a dead process's lock.
        """
        name = self.benchmark.tfds_name
        path = self.data_dir / f".{name}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = open(path, "w")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.say(f"waiting for another process that holds {path}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            prefix = f".{name}.incomplete-"
            for stale in self.data_dir.glob(f"{prefix}*"):
                shutil.rmtree(stale, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(dir=self.data_dir, prefix=prefix))
            try:
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)


def _write_duplicates(
    path: Path, facts: dict[str, list[tuple[str, int, bytes]]], class_names: Sequence[str]
) -> str:
    """Lists images with the same pixels, a number to each group; says how many, or nothing."""
    groups: dict[bytes, list[tuple[str, str, str]]] = collections.defaultdict(list)
    for split, images_of_split in facts.items():
        for name, label, pixels in images_of_split:
            groups[pixels].append((split, class_names[label], name))
    repeated = [group for group in groups.values() if len(group) > 1]
    if not repeated:
        return ""
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["group", "split", "class", "image"])
        table.writerows((i, *image) for i, group in enumerate(repeated) for image in group)
    splits = [[split for split, _, _ in group] for group in repeated]
    counts = {
        "within a split": sum(len(set(each)) < len(each) for each in splits),
        "in train and test": sum(len(set(each)) > 1 for each in splits),
        "in several classes": sum(len({name for _, name, _ in group}) > 1 for group in repeated),
    }
    described = ", ".join(f"{count} {where}" for where, count in counts.items() if count)
    return f"{len(repeated)} images occur more than once ({described})"


def _prepare_folder(job: _Job, source: Path, allow_other_split: bool) -> Path:
    metadata = {}
    if source.is_file():
        metadata["archive_md5"] = found = _check_archive(job, source)
        if job.is_prepared(job.benchmark):
            kept = tfds_format.metadata(job.benchmark, job.data_dir).get("archive_md5")
            if kept == found:
                return job.already_prepared(job.benchmark)
    # What is prepared may lie in a folder that is closed to writing.
    compare_only = source.is_dir() and not allow_other_split and job.is_prepared(job.benchmark)
    place = contextlib.nullcontext(source) if compare_only else job.workplace()
    with place as scratch, folders.unpacked(source, scratch) as root:
        if job.benchmark.partition == "random80":
            found, others = folders.list_images(folders.class_root(root))
            plan = dict(zip(dataset.SPLITS, folders.random80(found), strict=True))
        else:
            root = folders.split_root(root)
            plan, others = {}, []
            for split in dataset.SPLITS:
                plan[split], more = folders.list_images(root / split)
                others += more
        if others:
            job.say(
                f"{len(others)} files are no images by their suffix and are left out: "
                + ", ".join(others[:5])
            )
        class_names = sorted({image.class_name for split in plan.values() for image in split})
        benchmark = _choose(job, plan, class_names, allow_other_split)
        # Another process may have done it while this one waited.
        if job.is_prepared(benchmark):
            _compare(job, benchmark, plan, source)
            return job.already_prepared(benchmark)
        label = {name: index for index, name in enumerate(class_names)}

        def load(item: folders.ImageFile) -> _Example:
            encoded = item.path.read_bytes()
            pixels = images.pixels_sha256(images.decode(encoded, str(item.path)))
            record = {"image": encoded, "label": label[item.class_name], "file_name": item.name}
            return _Example(record, pixels)

        sized = {
            split: (items, sum(item.path.stat().st_size for item in items))
            for split, items in plan.items()
        }
        features = tfds_format.folder_features(class_names)
        return job.write(benchmark, scratch, features, sized, load, metadata)


def _check_archive(job: _Job, archive: Path) -> str:
    """Returns the MD5 of an archive; notes whether it is the published one, where one is."""
    with open(archive, "rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    published = job.benchmark.checksums.get("md5")
    if published == found:
        job.say(f"{archive}: MD5 {found}, as published for PILOT's archive")
    elif published is not None:
        job.say(
            f"note: {archive}: MD5 {found}, where {published} is published for PILOT's archive; "
            "what counts are the images in it"
        )
    return found


def _choose(
    job: _Job,
    plan: dict[str, list[folders.ImageFile]],
    class_names: list[str],
    allow_other_split: bool,
) -> benchmarks.Benchmark:
    """Returns the benchmark that the images are: the one asked for, or its "other" split."""
    label = {name: index for index, name in enumerate(class_names)}
    train_labels, test_labels = (
        np.array([label[image.class_name] for image in plan[split]], np.int64)
        for split in dataset.SPLITS
    )
    try:
        missing = sorted(set(class_names) - {image.class_name for image in plan["train"]})
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


def _compare(
    job: _Job,
    benchmark: benchmarks.Benchmark,
    plan: dict[str, list[folders.ImageFile]],
    source: Path,
) -> None:
    """Refuses images that are not those that are prepared: other names, labels or pixels."""
    folder = tfds_format.dataset_folder(benchmark, job.data_dir)
    for split, items in plan.items():
        prepared = tfds_format.open_prepared(benchmark, split, job.data_dir)
        position = {name: index for index, name in enumerate(prepared.ids)}
        differing: Iterable[str] = sorted(position.keys() ^ {item.name for item in items})

        def differs(item: folders.ImageFile, prepared=prepared, position=position) -> str:
            found, kept = item.path.read_bytes(), prepared.read(position[item.name])
            same = found == kept or (
                images.decode(found, str(item.path)) == images.decode(kept, item.name)
            )
            return "" if same else item.name

        if not differing:
            differing = filter(None, job.in_order(differs, items, f"{split}, compared"))
        for name in differing:
            if isinstance(name, InputError):
                raise name
            raise InputError(
                f"{folder} holds other images than {source}, such as {name} of {split}; remove "
                f"that folder to prepare {benchmark.name} anew, or give another --data_dir"
            )


def _prepare_cifar100(job: _Job, source: Path | None) -> Path:
    benchmark = job.benchmark
    archive = source
    if source is not None and source.is_dir():
        archive = source / cifar100.ARCHIVE_NAME
        if not archive.is_file():
            raise InputError(f"{archive}: expected the archive {cifar100.ARCHIVE_NAME}")
    if archive is not None:
        cifar100.check(benchmark, archive)
        if job.is_prepared(benchmark):
            return job.already_prepared(benchmark)
    with job.workplace() as scratch:
        if job.is_prepared(benchmark):
            return job.already_prepared(benchmark)
        if archive is None:
            archive = cifar100.download(benchmark, job.data_dir / "downloads", job.quiet)
        contents = cifar100.read(benchmark, archive)
        labels = {split: found[:, 1].astype(np.int64) for split, found in contents.splits.items()}
        benchmarks.verify(benchmark, labels["train"], labels["test"])

        def load(item: tuple[str, int]) -> _Example:
            split, index = item
            record = contents.splits[split][index]
            image = Image.fromarray(cifar100.image(record))
            file = io.BytesIO()
            image.save(file, "PNG")
            stored = {
                "id": f"{split}_{index:05d}",
                "image": file.getvalue(),
                "label": int(record[1]),
                "coarse_label": int(record[0]),
            }
            return _Example(stored, images.pixels_sha256(image))

        features = tfds_format.cifar100_features(contents.class_names, contents.superclass_names)
        plan: dict[str, tuple[Sequence[Any], int]] = {
            split: ([(split, index) for index in range(len(records))], records.nbytes)
            for split, records in contents.splits.items()
        }
        return job.write(benchmark, scratch, features, plan, load, {})


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
        help="folder of prepared data sets; default: $TFDS_DATA_DIR or ~/tensorflow_datasets",
    )
    parser.add_argument("--workers", type=int, help="decoding threads; default one per core")
    parser.add_argument(
        "--allow_other_split",
        action="store_true",
        help="accept another division into train and test, as benchmark NAME_other",
    )
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    options = vars(parser.parse_args(arguments))
    try:
        prepare(options.pop("benchmark"), options.pop("source"), **options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
