"""Prepares a benchmark for reading: image folders and archives to TFDS array_record.

    python -m fdc_jax.data.prepare BENCHMARK --source=FOLDER_OR_ARCHIVE --data_dir=DIR

Every image is decoded once; nothing is left that a reader would accept unless all of it is well.
Beside the data, `duplicates.csv` lists images that occur more than once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from fdc_jax.data import benchmarks, cifar100, dataset, folders, images, tfds_format
from fdc_jax.errors import InputError, Program
from fdc_jax.files import write_json


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
        data_dir: as in `dataset.data_folder`.
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
    workers = dataset.default_workers() if workers is None else workers
    if workers < 1:
        raise InputError(f"workers must be at least 1, found {workers}")
    job = _Job(benchmark, dataset.data_folder(data_dir), workers, quiet)
    if benchmark.partition == "embedded":
        job.say(f"{benchmark.name} is embedded: nothing to prepare")
        return None
    if allow_other_split and benchmark.partition not in ("pilot", "other"):
        raise InputError(f"{benchmark.name} has one split only: --allow_other_split does not apply")
    folder = job.prepared(benchmark)
    if raw is None and folder is not None:
        return job.keep(benchmark, folder)
    if raw is None and benchmark.name != "cifar100":
        raise InputError(f"{benchmark.name} needs --source=PATH, where PATH is {benchmark.obtain}")
    try:
        with job.workplace() as scratch, contextlib.ExitStack() as stack:
            if benchmark.name == "cifar100":
                archive = (
                    cifar100.download(benchmark, job.data_dir / "downloads", quiet)
                    if raw is None
                    else cifar100.find(benchmark, raw)
                )
                data = cifar100.read(archive)
            else:
                assert raw is not None
                if raw.is_file() and not quiet:
                    job.note_checksum(raw)
                root = stack.enter_context(folders.unpacked(raw, scratch))
                data, notes = folders.read(root, split=benchmark.partition != "random80")
                for note in notes:
                    job.say(note)
            benchmark = job.choose(data, allow_other_split)
            if folder := job.prepared(benchmark):
                job.compare(benchmark, data, folder, raw)
                return job.keep(benchmark, folder)
            return job.write(benchmark, data, scratch)
    except OSError as error:
        raise InputError(f"cannot prepare {benchmark.name}: {error}") from error


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

    def prepared(self, benchmark: benchmarks.Benchmark) -> Path | None:
        """Returns where a benchmark is prepared already, if it is."""
        folder = tfds_format.dataset_folder(benchmark, self.data_dir)
        if (folder / "dataset_info.json").is_file():
            return folder
        if folder.exists():
            raise InputError(
                f"{folder}: expected a prepared data set or nothing, found a folder without "
                "dataset_info.json; remove it"
            )
        return None

    def keep(self, benchmark: benchmarks.Benchmark, folder: Path) -> Path:
        self.say(f"{benchmark.name} is already prepared in {folder}")
        return folder

    def note_checksum(self, archive: Path) -> None:
        """Notes whether an archive is the published one, where one is."""
        published = self.benchmark.checksums.get("md5")
        if published is not None:
            with open(archive, "rb") as file:
                found = hashlib.file_digest(file, "md5").hexdigest()
            same = found == published
            told = "is that published" if same else f"differs from {published}, published"
            self.say(
                f"note: MD5 {found} of {archive} {told} for PILOT's archive; the images decide"
            )

    def choose(self, raw: dataset.RawData, allow_other_split: bool) -> benchmarks.Benchmark:
        """Returns the benchmark that the images are: the one asked for, or its "other" split."""
        labels = raw.labels("train"), raw.labels("test")
        try:
            benchmarks.verify(self.benchmark, *labels, raw.class_names)
            return self.benchmark
        except InputError as error:
            other = benchmarks.BENCHMARKS.get(f"{self.benchmark.name}_other")
            if other is None:
                raise
            if not allow_other_split:
                hint = f"--allow_other_split prepares it as benchmark {other.name} all the same"
                raise InputError(f"{error}; {hint}") from error
            benchmarks.verify(other, *labels, raw.class_names)
            self.say(f"{error}; preparing it as benchmark {other.name}")
            return other

    def in_order(self, load: Callable[[Any], Any], items: Sequence[Any], what: str) -> Generator:
        """Loads items in threads and yields results in order, with a bar."""
        title, at_once = f"{self.benchmark.name} {what}", 32 * self.workers
        pause = 0.1 if sys.stderr.isatty() else 30.0
        options: Any = {"desc": title, "unit": "image", "disable": self.quiet}
        with (
            ThreadPoolExecutor(self.workers, thread_name_prefix="prepare") as pool,
            tqdm(total=len(items), mininterval=pause, **options) as bar,
        ):
            for start in range(0, len(items), at_once):
                for result in pool.map(load, items[start : start + at_once]):
                    yield result
                    bar.update()

    def compare(
        self,
        benchmark: benchmarks.Benchmark,
        raw: dataset.RawData,
        folder: Path,
        source: Path | None,
    ) -> None:
        """Refuses images that are not those prepared in `folder`: other names, labels or pixels."""
        for split, items in raw.splits.items():
            prepared = tfds_format.open_prepared(benchmark, split, self.data_dir)
            position = {name: index for index, name in enumerate(prepared.ids)}

            def differs(item: dataset.RawImage, prepared=prepared, position=position) -> str:
                found, kept = item.read(), prepared.read(position[item.name])
                same = found == kept or (
                    images.decode(found, item.place) == images.decode(kept, item.name)
                )
                return "" if same else item.name

            names: Iterable[str] = sorted(position.keys() ^ {item.name for item in items})
            if not names:
                # Closed before the error is printed, so that the bar ends its line.
                with contextlib.closing(
                    self.in_order(differs, items, f"{split}, compared")
                ) as each:
                    names = filter(None, [next(filter(None, each), "")])
            for name in names:
                raise InputError(
                    f"{folder} holds other images than {source}, such as {name} of {split}; remove "
                    f"that folder to prepare {benchmark.name} anew, or give another --data_dir"
                )

    def write(self, benchmark: benchmarks.Benchmark, raw: dataset.RawData, scratch: Path) -> Path:
        """Writes all images below `scratch`, on the data folder's disk, and moves them there."""
        staged = tfds_format.dataset_folder(benchmark, scratch)
        staged.mkdir(parents=True)
        label = {name: index for index, name in enumerate(raw.class_names)}
        unreadable: list[str] = []
        written: dict[str, list[tuple[str, int, bytes]]] = {split: [] for split in raw.splits}

        def load(item: dataset.RawImage) -> tuple[dict[str, Any], bytes] | Exception:
            try:
                encoded = item.read()
                pixels = images.pixels_sha256(images.decode(encoded, item.place))
            except (InputError, OSError) as error:
                return error
            return {"image": encoded, "label": label[item.class_name], **item.fields}, pixels

        def records(split: str) -> Iterator[dict[str, Any]]:
            items = raw.splits[split]
            for item, result in zip(items, self.in_order(load, items, split), strict=True):
                if isinstance(result, Exception):
                    unreadable.append(str(result))
                # After a failure only the remaining names matter.
                elif not unreadable:
                    record, pixels = result
                    written[split].append((item.name, record["label"], pixels))
                    yield record

        each = {split: records(split) for split in raw.splits}
        tfds_format.write(staged, benchmark, raw.class_names, raw.superclass_names, each)
        if unreadable:
            total = sum(map(len, raw.splits.values()))
            raise InputError(
                f"{benchmark.name}: {len(unreadable)} of {total} images cannot be read: "
                + "; ".join(unreadable)
            )
        repeated = _write_duplicates(staged / "duplicates.csv", written, raw.class_names)
        checksums = {
            split: dataset.images_sha256(raw.class_names, facts) for split, facts in written.items()
        }
        described = {"partition": benchmark.partition, "images_sha256": checksums}
        write_json(staged / "metadata.json", described)
        for split in raw.splits:
            # Reads everything back, and leaves the index beside the data.
            tfds_format.open_prepared(benchmark, split, scratch)
        folder = tfds_format.dataset_folder(benchmark, self.data_dir)
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.rename(staged, folder)
        self.say(
            f"{benchmark.name}: "
            + ", ".join(f"{len(items)} {split} images" for split, items in raw.splits.items())
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
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.say(f"waiting for another process that holds {path}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            prefix = f".{name}.incomplete-"
            for stale in self.data_dir.glob(f"{prefix}*"):
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(
                dir=self.data_dir, prefix=prefix, ignore_cleanup_errors=True
            ) as scratch:
                yield Path(scratch)


def _write_duplicates(
    path: Path, written: dict[str, list[tuple[str, int, bytes]]], class_names: Sequence[str]
) -> str:
    """Lists images with the same pixels, a number to each group; says how many, or nothing."""
    rows = [
        (pixels, split, class_names[label], name)
        for split, images_of_split in written.items()
        for name, label, pixels in images_of_split
    ]
    table = pd.DataFrame(rows, columns=["pixels", "split", "class", "image"])
    table = table[table.duplicated("pixels", keep=False)]
    if table.empty:
        return ""
    groups = table.groupby("pixels", sort=False)
    listed = table.assign(group=groups.ngroup()).sort_values("group", kind="stable")
    listed[["group", "split", "class", "image"]].to_csv(path, index=False)
    splits, classes = groups["split"].nunique(), groups["class"].nunique()
    counts = {
        "within a split": np.sum(splits < groups.size()),
        "in train and test": np.sum(splits > 1),
        "in several classes": np.sum(classes > 1),
    }
    described = ", ".join(f"{count} {where}" for where, count in counts.items() if count)
    occur = "image occurs" if len(groups) == 1 else "images occur"
    return f"{len(groups)} {occur} more than once ({described})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status, 2 for bad input."""
    parser = Program(
        "data.prepare",
        "Prepares a benchmark: images are checked and stored as TFDS array_record.",
    )
    parser.epilog = "benchmarks and where their data are: " + " | ".join(
        f"{item.name}: {item.obtain}" for item in benchmarks.BENCHMARKS.values()
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

    def body(options: argparse.Namespace) -> None:
        prepare(
            options.benchmark,
            options.source,
            options.data_dir,
            workers=options.workers,
            allow_other_split=options.allow_other_split,
            quiet=options.quiet,
        )

    return parser.run(body, arguments)


if __name__ == "__main__":
    sys.exit(main())
