"""The benchmarks as a table, the order of their classes, and the check of data against the table.

A data set of the user's own is one more entry, which lies beside its prepared data.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_object

# The class order under which per-task counts are listed, and PILOT's default.
REFERENCE_CLASS_ORDER_SEED = 1993
# What a name may be, as TFDS makes file names of it.
_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One data set with its division into train and test and its task sequence."""

    name: str  # results carry it
    title: str  # in tables
    partition: str  # "official" (its makers'), "pilot", "random80", "embedded"; or see `own`
    obtain: str = "a folder, an archive or a list of your images"  # where raw data are, in words
    num_classes: int | None = None  # None where any number is accepted
    num_train: int | None = None  # images; likewise
    num_test: int | None = None  # likewise
    classes_per_task: int = 0  # of every task but perhaps the last; 0 where a run must say it
    task_test_counts: tuple[int, ...] | None = None  # in class order seed 1993, where known
    checksums: dict[str, str] = dataclasses.field(default_factory=dict)  # of the raw archive
    tfds_version: str = "1.0.0"  # folder of the prepared data below that of their name
    earlier_classes: tuple[int, ...] = ()  # numbers of classes before others were appended

    @property
    def tfds_name(self) -> str:
        """Folder of the prepared data below the data folder."""
        return f"pilot_{self.name}" if self.partition == "pilot" else self.name

    def folder(self, data_dir: Path) -> Path:
        """Returns the folder of the prepared data."""
        return data_dir / self.tfds_name / self.tfds_version

    def is_prepared(self, data_dir: Path) -> bool:
        """Says whether there are prepared data; their information is written last."""
        return (self.folder(data_dir) / "dataset_info.json").is_file()


def _pilot(
    name: str, title: str, classes: int, per_task: int, num_train: int, md5: str, *counts: int
) -> Benchmark:
    """A benchmark in PILOT's own division."""
    return Benchmark(
        name=name,
        title=title,
        partition="pilot",
        obtain=f"the {title} archive behind the Google Drive link in the README of the PILOT "
        "toolbox (GitHub: LAMDA-CL/LAMDA-PILOT, section Datasets), or its contents: "
        "train/CLASS/IMAGE and test/CLASS/IMAGE",
        num_classes=classes,
        num_train=num_train,
        num_test=sum(counts),
        classes_per_task=per_task,
        task_test_counts=counts,
        checksums={"md5": md5},
    )


def _random80(
    name: str, title: str, classes: int, per_task: int, total: int, release: str
) -> Benchmark:
    """The substitute for those without PILOT's archive: public images, divided by our rule."""
    return Benchmark(
        name=f"{name}_random80",
        title=f"{title} (random 80/20)",
        partition="random80",
        obtain=f"the official release {release}/IMAGE",
        num_classes=classes,
        num_train=total * 4 // 5,
        num_test=total - total * 4 // 5,
        classes_per_task=per_task,
    )


# The MD5 of the archives are those that the authors of RevisitingCIL, who made them, published.
_TABLE = [
    Benchmark(
        name="cifar100",
        title="CIFAR-100",
        partition="official",
        obtain="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        num_classes=100,
        num_train=50000,
        num_test=10000,
        classes_per_task=5,
        task_test_counts=(500,) * 20,
        checksums={"sha256": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"},
        tfds_version="3.0.2",
    ),
    _pilot(
        *("imagenet_a", "ImageNet-A", 200, 20, 5981, "7f4aaf0b1532b7a0bd670822c152d3c5"),
        *(175, 185, 116, 222, 143, 134, 146, 127, 147, 124),
    ),
    _pilot(
        *("imagenet_r", "ImageNet-R", 200, 20, 24000, "730aa3fb9c7d2ec0b6381c6b23040681"),
        *(689, 632, 606, 571, 487, 660, 569, 729, 478, 579),
    ),
    _pilot(
        *("cub200", "CUB-200", 200, 10, 9430, "85e342a2d5f941e740193602057df7a5"),
        *(118, 129, 97, 110, 107, 111, 106, 141, 133, 136),
        *(115, 113, 107, 118, 126, 124, 134, 103, 132, 98),
    ),
    _pilot(
        *("omnibench", "OmniBenchmark", 300, 30, 89697, "f1c30808a707f9197c6c811ea52e5cbb"),
        *(600, 599, 599, 597, 599, 598, 597, 599, 599, 598),
    ),
    _random80(
        *("imagenet_r", "ImageNet-R", 200, 20, 30000),
        "imagenet-r.tar (GitHub: hendrycks/imagenet-r), which holds imagenet-r/WNID",
    ),
    _random80(
        *("imagenet_a", "ImageNet-A", 200, 20, 7500),
        "imagenet-a.tar (GitHub: hendrycks/natural-adv-examples), which holds imagenet-a/WNID",
    ),
    _random80(
        *("cub200", "CUB-200", 200, 10, 11788),
        "CUB_200_2011.tgz (Caltech), which holds CUB_200_2011/images/CLASS",
    ),
    Benchmark(
        name="digits",
        title="Digits",
        partition="embedded",
        obtain="embedded: the 1797 scans of 8 x 8 pixels that come with scikit-learn",
        num_classes=10,
        num_train=1201,
        num_test=596,
        classes_per_task=2,
        task_test_counts=(119, 119, 120, 118, 120),
    ),
]
BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in _TABLE}


# Entries that lie beside prepared data ------------------------------------------------------------


def own(name: str, partition: str) -> Benchmark:
    """Returns the entry of a data set of the user's own, before anything is known of it.

    Args:
        name: a new word.
        partition: "given", or how the images are divided into train and test; "tfds" of data that
            TFDS prepared.

    Raises:
        InputError: the name is taken or cannot be one.
    """
    if not _NAME.fullmatch(name):
        raise InputError(
            f"expected a name of letters, digits and _ that starts with a letter, found {name!r}"
        )
    for benchmark in BENCHMARKS.values():
        if name.lower() in (benchmark.name, benchmark.tfds_name):
            raise InputError(f"the name {name} is taken by benchmark {benchmark.name}")
    return Benchmark(name, name, partition)


def find(name: str, data_dir: Path) -> Benchmark:
    """Returns an entry of the table, or that of a data set which is prepared in the data folder.

    Raises:
        InputError: there is none of that name, or several.
    """
    found = look_up(name, data_dir)
    if found is None:
        known = ", ".join(sorted(BENCHMARKS))
        raise InputError(
            f"benchmark must be one of {known}, or a data set that is prepared in {data_dir}; "
            f"found {name!r}"
        )
    return found


def look_up(name: str, data_dir: Path) -> Benchmark | None:
    """Returns what `find` does, None where there is nothing of that name."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    if not _NAME.fullmatch(name):
        return None
    # Of TFDS, a folder may hold several configurations, and each of them versions.
    below = data_dir / name
    found = [
        path.parent
        for pattern in ("*/dataset_info.json", "*/*/dataset_info.json")
        for path in below.glob(pattern)
    ]
    if not found:
        return None
    entry = own(name, "tfds")
    if len({folder.parent for folder in found}) > 1:
        places = ", ".join(sorted({folder.parent.name for folder in found}))
        raise InputError(f"{below}: expected one configuration, found {places}")
    newest = max(found, key=lambda folder: [int(n) for n in re.findall(r"\d+", folder.name)])
    noted = metadata(newest)
    fields = ("partition", "num_classes", "num_train", "num_test")
    known = {field: noted[field] for field in fields if field in noted}
    known["earlier_classes"] = tuple(each["num_classes"] for each in noted.get("earlier", []))
    return dataclasses.replace(entry, tfds_version=str(newest.relative_to(below)), **known)


def metadata(folder: Path) -> dict:
    """Returns what was noted of data when they were prepared; nothing where TFDS did it.

    Raises:
        InputError: it cannot be read.
    """
    return read_object(folder / "metadata.json")


def prepared(data_dir: Path) -> list[Benchmark]:
    """Returns the entries of all data that are prepared in the data folder, by name."""
    own_names = {path.name for path in data_dir.glob("*") if path.is_dir()}
    own_names -= {benchmark.tfds_name for benchmark in BENCHMARKS.values()}
    found = list(BENCHMARKS.values())
    for name in sorted(own_names):
        try:
            found.append(find(name, data_dir))
        except InputError:
            continue
    return [each for each in found if each.is_prepared(data_dir)]


# Classes and tasks --------------------------------------------------------------------------------


def class_order(num_classes: int, seed: int, earlier: Sequence[int] = ()) -> Int[np.ndarray, " c"]:
    """Returns the class labels in the order in which they arrive (PILOT: seed 1993).

    Equal to `numpy.random.seed(seed)` followed by `numpy.random.permutation(num_classes)`; for a
    seed of -1 the order given, which is that of the labels. Classes that were appended when there
    were `earlier` ones come after those, in such an order among themselves.
    """
    if seed == -1:
        return np.arange(num_classes)
    limits = itertools.pairwise((0, *earlier, num_classes))
    return np.concatenate(
        [first + np.random.RandomState(seed).permutation(after - first) for first, after in limits]
    )


def named_order(class_names: Sequence[str], names: Sequence[str]) -> Int[np.ndarray, " c"]:
    """Returns the class labels in an order of names.

    Raises:
        InputError: a class is missing, doubled or unknown; names some.
    """
    given = set(names)
    for problem, wrong in (
        ("names twice", [name for name in dict.fromkeys(names) if list(names).count(name) > 1]),
        ("names, unlike the data,", [name for name in names if name not in set(class_names)]),
        ("lacks", [name for name in class_names if name not in given]),
    ):
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise InputError(
                f"config.class_order: expected each of the {len(class_names)} classes once; it "
                f"{problem} {', '.join(map(str, wrong[:5]))}{more}"
            )
    label = {name: index for index, name in enumerate(class_names)}
    return np.array([label[name] for name in names])


def task_sizes(name: str, num_classes: int, wanted: int | Sequence[int] = 0) -> tuple[int, ...]:
    """Returns the number of classes of each task of a benchmark.

    Args:
        name: of the benchmark.
        num_classes: of all tasks.
        wanted: of each task; one number for all of them but perhaps a shorter last one; 0 for the
            benchmark's own number.

    Raises:
        InputError: they do not add up, or there is no number.
    """
    field = "config.classes_per_task: expected"
    if not isinstance(wanted, int):
        if sum(wanted) != num_classes:
            raise InputError(
                f"{field} numbers that add up to the {num_classes} classes of {name}, found "
                f"{' + '.join(map(str, wanted))} = {sum(wanted)}"
            )
        return tuple(wanted)
    if wanted > num_classes:
        raise InputError(f"{field} at most the {num_classes} classes of {name}, found {wanted}")
    # Earlier versions called another division of PILOT's images NAME_other.
    entry = BENCHMARKS.get(name.removesuffix("_other"))
    size = wanted or (entry.classes_per_task if entry else 0)
    if not size:
        raise InputError(
            f"{field} the number of classes of each task of {name}, or a list such as 10,5,5; "
            "found 0"
        )
    return tuple(min(size, num_classes - first) for first in range(0, num_classes, size))


def verify(
    benchmark: Benchmark,
    train_labels: Int[np.ndarray, " n"],
    test_labels: Int[np.ndarray, " m"],
    class_names: Sequence[str],
) -> None:
    """Checks whole splits, as class indices, against the table.

    Raises:
        InputError: a number differs; the message says what was expected and what was found.
    """

    def expect(what: str, expected: int | None, found: int) -> None:
        if expected not in (None, found):
            raise InputError(f"{benchmark.name}: expected {expected} {what}, found {found}")

    expect("classes", benchmark.num_classes, len(class_names))
    for split, labels in (("training", train_labels), ("test", test_labels)):
        absent = np.setdiff1d(np.arange(len(class_names)), labels)[:10]
        if len(absent) and (split == "training" or benchmark.partition == "pilot"):
            raise InputError(
                f"{benchmark.name}: expected {split} images of every class, found none of "
                + ", ".join(class_names[int(label)] for label in absent)
            )
    expect("training images", benchmark.num_train, len(train_labels))
    expect("test images", benchmark.num_test, len(test_labels))
    if benchmark.task_test_counts is not None:
        order = class_order(len(class_names), REFERENCE_CLASS_ORDER_SEED)
        sizes = task_sizes(benchmark.name, len(order), benchmark.classes_per_task)
        tasks = np.split(order, np.cumsum(sizes)[:-1])
        counts = tuple(int(np.isin(test_labels, task).sum()) for task in tasks)
        if counts != benchmark.task_test_counts:
            raise InputError(
                f"{benchmark.name}: expected {' '.join(map(str, benchmark.task_test_counts))} test "
                f"images in the tasks of class order {REFERENCE_CLASS_ORDER_SEED}, found "
                f"{' '.join(map(str, counts))}; this is another division into train and test"
            )
