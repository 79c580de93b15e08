"""Prepares images for reading: folders, archives and lists of files to TFDS array_record.

    python -m fdc_jax.data.prepare NAME --source=FOLDER_ARCHIVE_OR_LIST --data_dir=DIR [--append]

NAME is a benchmark of the table, or a new word for images of your own. Every image is decoded once;
nothing is left that a reader would accept unless all of it is well. Beside the data,
`duplicates.csv` lists images that occur more than once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import itertools
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
from fdc_jax.machine.files import write_json


def prepare(
    name: str,
    source: str | os.PathLike[str] | None = None,
    data_dir: str | os.PathLike[str] = "",
    *,
    test_share: float | None = None,
    split_seed: int = 0,
    append: bool = False,
    workers: int | None = None,
    quiet: bool = False,
) -> Path | None:
    """Prepares a benchmark, or images of one's own, below `data_dir`, once.

    Args:
        name: key of `benchmarks.BENCHMARKS`, or a new word.
        source: folder, archive or list (.csv) of the images, see `folders.read`; may be None for
            CIFAR-100, which is then downloaded, for the embedded digits, and for what is prepared
            already.
        data_dir: as in `dataset.data_folder`.
        test_share: of one's own images without a division into train and test: the share of each
            class that is for testing, see `folders.stratified`.
        split_seed: of that division.
        append: put images of new classes to those of one's own that are prepared under this name;
            the new classes come after the others.
        workers: decoding threads; None for one per core.
        quiet: says nothing but errors.

    Returns:
        The folder of the prepared data; None for the embedded digits.

    Raises:
        InputError: the raw data are not there, are damaged, are not what the table says, or are
            others than those that are prepared already; there is nothing to append to.
    """
    raw = None if source is None else Path(source)
    if raw is not None and not (raw.is_dir() or raw.is_file()):
        found = "neither" if raw.exists() else "nothing"
        raise InputError(f"{raw}: expected a folder or an archive, found {found}")
    workers = dataset.default_workers() if workers is None else workers
    if workers < 1:
        raise InputError(f"workers must be at least 1, found {workers}")
    partition, divide = "given", None
    if test_share is not None:
        if not 0 < test_share < 1 or not 0 <= split_seed < 2**32:
            raise InputError(
                "expected a test_share between 0 and 1 and a split_seed from 0 to 4294967295, "
                f"found {test_share} and {split_seed}"
            )
        if name in benchmarks.BENCHMARKS:
            raise InputError(f"{name} has a division of its own: test_share does not apply")
        partition = f"{test_share:g} of each class, seed {split_seed}"
        divide = functools.partial(folders.stratified, share=test_share, seed=split_seed)
    place = dataset.data_folder(data_dir)
    known = raw is None or name in benchmarks.BENCHMARKS
    found = benchmarks.look_up(name, place) if known else None
    benchmark = found or benchmarks.own(name, partition)
    job = _Job(benchmark, place, workers, quiet)
    if append and (name in benchmarks.BENCHMARKS or job.prepared() is None):
        raise InputError(f"{name}: expected prepared images of your own to append to, found none")
    if benchmark.partition == "embedded":
        job.say(f"{name} is embedded: nothing to prepare")
        return None
    if benchmark.partition == "random80":
        divide = folders.random80
    folder = job.prepared()
    if raw is None and folder is not None and not append:
        return job.keep(folder)
    if raw is None and name != "cifar100":
        raise InputError(f"{name} needs --source=PATH, where PATH is {benchmark.obtain}")
    with job.workplace() as scratch, contextlib.ExitStack() as stack:
        if name == "cifar100":
            archive = (
                cifar100.download(benchmark, place / "downloads", quiet)
                if raw is None
                else cifar100.find(benchmark, raw)
            )
            data = cifar100.read(archive)
        else:
            assert raw is not None
            if raw.is_file() and not quiet:
                job.note_checksum(raw)
            root = stack.enter_context(folders.unpacked(raw, scratch))
            data, notes = folders.read(root, divide, one_class=append)
            for note in notes:
                job.say(note)
        job.verify(data)
        folder = job.prepared()
        if append and folder is not None:
            return job.append(data, folder, raw, scratch)
        if folder is not None:
            job.compare(data, folder, raw)
            return job.keep(folder)
        return job.write(data, scratch)


def remove(name: str, data_dir: str | os.PathLike[str] = "", quiet: bool = False) -> None:
    """Removes prepared data, all at once.

    Raises:
        InputError: there are none, or this program did not make them.
    """
    place = dataset.data_folder(data_dir)
    job = _Job(benchmarks.find(name, place), place, 1, quiet)
    with job.workplace() as scratch:
        folder = job.prepared()
        if folder is None:
            raise InputError(f"{name} is not prepared in {place}")
        if not benchmarks.metadata(folder):
            raise InputError(f"{folder} was prepared by another program; remove it by hand")
        # Out of readers' sight in one step; the rest goes with the workplace.
        job.drop_others(folder, scratch)
        os.rename(folder, scratch / "removed")
        with contextlib.suppress(OSError):
            folder.parent.rmdir()
    job.say(f"removed {folder}")


def describe(data_dir: str | os.PathLike[str] = "") -> list[str]:
    """Returns a line for everything that is prepared in the data folder."""
    place = dataset.data_folder(data_dir)

    def number(value: int | None) -> str:
        return "?" if value is None else f"{value:,}"

    return [
        f"{each.name}: {number(each.num_classes)} classes, {number(each.num_train)} train and "
        f"{number(each.num_test)} test images, partition {each.partition}, in {each.folder(place)}"
        for each in benchmarks.prepared(place)
    ]


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

    def prepared(self) -> Path | None:
        """Returns where the data are prepared already, if they are."""
        found = benchmarks.look_up(self.benchmark.name, self.data_dir) or self.benchmark
        folder = found.folder(self.data_dir)
        if found.is_prepared(self.data_dir):
            return folder
        if folder.exists():
            raise InputError(
                f"{folder}: expected a prepared data set or nothing, found a folder without "
                "dataset_info.json; remove it"
            )
        return None

    def keep(self, folder: Path) -> Path:
        if self.benchmark.partition == "tfds":
            for split in dataset.SPLITS:  # Decodes every image, once.
                assert tfds_format.open_prepared(self.benchmark, split, self.data_dir).checksum
        self.say(f"{self.benchmark.name} is already prepared in {folder}")
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

    def verify(self, raw: dataset.RawData) -> None:
        """Refuses images that are not what the table says of a benchmark."""
        try:
            labels = raw.labels("train"), raw.labels("test")
            benchmarks.verify(self.benchmark, *labels, raw.class_names)
        except InputError as error:
            if self.benchmark.partition != "pilot":
                raise
            hint = "under another name, such as my_set, any division can be prepared"
            raise InputError(f"{error}; {hint}") from error

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

    def compare(self, raw: dataset.RawData, folder: Path, source: Path | None) -> None:
        """Refuses images that are not those prepared in `folder`: other names, labels or pixels."""
        benchmark = benchmarks.find(self.benchmark.name, self.data_dir)
        for split, items in raw.splits.items():
            prepared = tfds_format.open_prepared(benchmark, split, self.data_dir)
            came = _came_together(benchmark, prepared.class_names, raw.class_names)
            position = {
                name: index
                for index, (name, label) in enumerate(
                    zip(prepared.ids, prepared.labels.tolist(), strict=True)
                )
                if label in came
            }

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
                    f"{folder} holds other images than {source}, such as {name} of {split}; choose "
                    f"another name, remove them with --remove, or give another --data_dir"
                )

    def append(
        self, new: dataset.RawData, folder: Path, source: Path | None, scratch: Path
    ) -> Path:
        """Writes the prepared images again, and those of new classes after them.

        That is a newer version of the data, found as soon as it is whole; the older one goes then.
        """
        noted = benchmarks.metadata(folder)
        if not noted:
            raise InputError(f"{folder} was prepared by another program; nothing can be appended")
        known = benchmarks.find(self.benchmark.name, self.data_dir)
        opened = [tfds_format.open_prepared(known, s, self.data_dir) for s in dataset.SPLITS]
        names = opened[0].class_names
        if there := [name for name in new.class_names if name in names]:
            came = _came_together(known, names, new.class_names)
            if len(came) == len(new.class_names) and 0 not in came:
                self.compare(new, folder, source)  # This command was finished before.
                self.drop_others(folder, scratch)
                return self.keep(folder)
            raise InputError(
                f"{source}: expected classes that {known.name} does not have, found "
                f"{', '.join(there[:5])}"
            )
        size = sum(path.stat().st_size for path in folder.iterdir()) // sum(map(len, opened))
        both: dict[str, list[dataset.RawImage]] = {}
        for each in opened:
            taken = set(each.ids)
            for item in new.splits[each.split]:
                if item.name in taken:
                    raise InputError(
                        f"{item.place}: expected the name of an image that {known.name} does not "
                        f"have, found {item.name}"
                    )
            both[each.split] = _as_raw(each, size) + new.splits[each.split]
        earlier = [*noted.pop("earlier", []), noted]
        parts = dict.fromkeys((*known.partition.split(" + "), self.benchmark.partition))
        grown = dataclasses.replace(
            self.benchmark, partition=" + ".join(parts), tfds_version=f"1.{len(earlier)}.0"
        )
        raw = dataset.RawData(both, [*names, *new.class_names])
        written = dataclasses.replace(self, benchmark=grown).write(raw, scratch, earlier)
        self.drop_others(written, scratch)
        return written

    def drop_others(self, folder: Path, scratch: Path) -> None:
        """Removes versions that one with more classes replaces."""
        for path in folder.parent.glob("*/metadata.json"):
            if path.parent != folder:
                os.rename(path.parent, scratch / f"replaced_{path.parent.name}")

    def write(
        self, raw: dataset.RawData, scratch: Path, earlier: Sequence[dict[str, Any]] = ()
    ) -> Path:
        """Writes all images below `scratch`, on the data folder's disk, and moves them there.

        `earlier` is what was noted of them before classes were appended, each time.
        """
        benchmark, items = self.benchmark, [item for each in raw.splits.values() for item in each]
        folders.check_space(scratch, sum(item.size for item in items))
        staged = benchmark.folder(scratch)
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
            raise InputError(
                f"{benchmark.name}: {len(unreadable)} of {len(items)} images cannot be read: "
                + "; ".join(unreadable)
            )
        repeated = _write_duplicates(staged / "duplicates.csv", written, raw.class_names)
        checksums = {
            split: dataset.images_sha256(raw.class_names, facts) for split, facts in written.items()
        }
        for before in earlier[-1:]:
            count = before["num_classes"]
            kept = {
                split: dataset.images_sha256(
                    raw.class_names[:count], [fact for fact in facts if fact[1] < count]
                )
                for split, facts in written.items()
            }
            if kept != before["images_sha256"]:
                raise InputError(
                    f"{benchmark.name}: expected the prepared images with SHA-256 "
                    f"{before['images_sha256']}, found {kept}; they were changed or damaged"
                )
        described = {
            "partition": benchmark.partition,
            "num_classes": len(raw.class_names),
            **{f"num_{split}": len(items) for split, items in raw.splits.items()},
            "images_sha256": checksums,
            **({"earlier": list(earlier)} if earlier else {}),
        }
        write_json(staged / "metadata.json", described)
        for split in raw.splits:
            # Reads everything back, and leaves the index beside the data.
            tfds_format.open_prepared(benchmark, split, scratch)
        folder = benchmark.folder(self.data_dir)
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
        try:
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
        except OSError as error:
            raise InputError(f"cannot prepare {self.benchmark.name}: {error}") from error


def _came_together(
    benchmark: benchmarks.Benchmark, known: Sequence[str], names: Sequence[str]
) -> range:
    """Returns the labels of the prepared classes of these names if they came at once, else all."""
    limits = itertools.pairwise((0, *benchmark.earlier_classes, len(known)))
    parts = [range(first, after) for first, after in limits]
    every = range(len(known))
    return next((part for part in parts if {known[i] for i in part} == set(names)), every)


def _as_raw(opened: dataset.Dataset, size: int) -> list[dataset.RawImage]:
    """Returns prepared images, of about so many bytes each, as ones to be prepared."""
    return [
        dataset.RawImage(
            name,
            opened.class_names[label],
            opened.describe(index),
            functools.partial(opened.read, index),
            {"file_name": name},
            size,
        )
        for index, (name, label) in enumerate(zip(opened.ids, opened.labels.tolist(), strict=True))
    ]


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
        "Prepares images: they are checked and stored as TFDS array_record.",
    )
    parser.epilog = "benchmarks and where their data are: " + " | ".join(
        f"{item.name}: {item.obtain}" for item in benchmarks.BENCHMARKS.values()
    )
    known = ", ".join(benchmarks.BENCHMARKS)
    parser.add_argument("name", nargs="?", help=f"one of {known}, or a new word for your images")
    parser.add_argument(
        "--source",
        help="folder or archive with train/CLASS/IMAGE and test/CLASS/IMAGE (or val), or with "
        "CLASS/IMAGE; or a list.csv with the columns file, label and split",
    )
    parser.add_argument(
        "--data_dir",
        default="",
        help="folder of prepared data sets; default: $TFDS_DATA_DIR or ~/tensorflow_datasets",
    )
    parser.add_argument("--test_share", type=float, help="share of each class to draw for testing")
    parser.add_argument("--split_seed", type=int, default=0, help="of that draw; default 0")
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument(
        "--append", action="store_true", help="put images of new classes to those of NAME"
    )
    parser.add_argument("--workers", type=int, help="decoding threads; default one per core")
    actions.add_argument("--remove", action="store_true", help="remove what is prepared as NAME")
    actions.add_argument("--list", action="store_true", help="list what is prepared")

    def body(options: argparse.Namespace) -> None:
        if options.list:
            print("\n".join(describe(options.data_dir)) or "nothing is prepared")
        elif options.name is None:
            raise InputError("expected the NAME of a data set, or --list")
        elif options.remove:
            remove(options.name, options.data_dir, options.quiet)
        else:
            prepare(
                options.name,
                options.source,
                options.data_dir,
                test_share=options.test_share,
                split_seed=options.split_seed,
                append=options.append,
                workers=options.workers,
                quiet=options.quiet,
            )

    return parser.run(body, arguments)


if __name__ == "__main__":
    sys.exit(main())
