import dataclasses
import re

import numpy as np
import pytest

from fdc_jax.data import benchmarks
from fdc_jax.errors import InputError

# Table of dataset partitions in the paper: classes, tasks, classes per task, train, test.
PAPER = {
    "cifar100": (100, 20, 5, 50000, 10000),
    "imagenet_a": (200, 10, 20, 5981, 1519),
    "imagenet_r": (200, 10, 20, 24000, 6000),
    "cub200": (200, 20, 10, 9430, 2358),
    "omnibench": (300, 10, 30, 89697, 5985),
}
# Test images per 10 classes of class order 1993, known independently of the paper's tasks.
PER_TEN = {
    "imagenet_a": "77 98 99 86 64 52 126 96 81 62 60 74 60 86 76 51 85 62 39 85",
    "imagenet_r": "317 372 300 332 302 304 298 273 310 177 284 376 271 298 367 362 230 248 308 271",
    "cub200": "118 129 97 110 107 111 106 141 133 136 115 113 107 118 126 124 134 103 132 98",
    "omnibench": " ".join(
        str(
            {18: 198}.get(i, 199 if i in (5, 8, 9, 10, 11, 14, 15, 16, 20, 22, 25, 27, 29) else 200)
        )
        for i in range(30)
    ),
}


@pytest.mark.parametrize("name", PAPER)
def test_table_is_the_papers(name):
    row = benchmarks.BENCHMARKS[name]
    num_tasks = len(row.task_test_counts)
    found = (row.num_classes, num_tasks, row.classes_per_task, row.num_train, row.num_test)
    assert found == PAPER[name]


@pytest.mark.parametrize("name", benchmarks.BENCHMARKS)
def test_rows_are_consistent(name):
    row = benchmarks.BENCHMARKS[name]
    assert row.name == name
    if row.task_test_counts is not None:
        assert len(row.task_test_counts) * row.classes_per_task == row.num_classes
        assert sum(row.task_test_counts) == row.num_test
    if row.partition == "random80":
        totals = {"imagenet_r": 30000, "imagenet_a": 7500, "cub200": 11788}
        total = totals[name.removesuffix("_random80")]
        assert (row.num_train, row.num_test) == (total * 4 // 5, total - total * 4 // 5)
    assert row.partition in ("pilot", "official") or not row.checksums
    if row.partition != "embedded":
        assert name.removesuffix("_random80") in PAPER
    assert [each.tfds_name for each in benchmarks.BENCHMARKS.values()].count(row.tfds_name) == 1


@pytest.mark.parametrize("name", PER_TEN)
def test_task_counts_agree_with_finer_ones(name):
    row = benchmarks.BENCHMARKS[name]
    fine = np.array(PER_TEN[name].split(), int).reshape(len(row.task_test_counts), -1)
    np.testing.assert_array_equal(fine.sum(axis=1), row.task_test_counts)


@pytest.mark.parametrize("name", ["imagenet", "../imagenet", ""])
def test_unknown_benchmark_lists_the_known(tmp_path, name):
    (tmp_path / "imagenet" / "1.0.0").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    message = re.escape("one of cifar100, ") + f".* prepared in {tmp_path}/data; found '{name}'"
    with pytest.raises(InputError, match=message):
        benchmarks.find(name, tmp_path / "data")


ROW = dataclasses.replace(
    benchmarks.BENCHMARKS["cub200"],
    num_classes=5,
    classes_per_task=2,
    num_train=10,
    num_test=8,
    task_test_counts=None,
)
TRAIN = np.repeat(np.arange(5), 2)
TEST = np.array([0, 1, 2, 3, 4, 4, 4, 1])


@pytest.mark.parametrize(
    ("changes", "train", "test", "message"),
    [
        ({}, np.repeat(np.arange(6), 2), TEST, "cub200: expected 5 classes, found 6"),
        ({}, TRAIN, TEST[:-1], "expected 8 test images, found 7"),
        ({}, np.where(TRAIN == 2, 1, TRAIN), TEST, "training images of every class.* C$"),
        ({}, TRAIN, np.where(TEST == 3, 1, TEST), "test images of every class.* D$"),
        ({"task_test_counts": (8, 0, 0)}, TRAIN, TEST, "expected 8 0 0 test .*another division"),
    ],
)
def test_verify_names_expected_and_found(changes, train, test, message):
    with pytest.raises(InputError, match=message):
        names = "ABCDEF"[: max(5, train.max() + 1)]
        benchmarks.verify(dataclasses.replace(ROW, **changes), train, test, names)
