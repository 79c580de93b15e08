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
    assert len(row.task_test_counts) * row.classes_per_task == row.num_classes
    assert sum(row.task_test_counts) == row.num_test


@pytest.mark.parametrize("name", PER_TEN)
def test_task_counts_agree_with_finer_ones(name):
    row = benchmarks.BENCHMARKS[name]
    fine = np.array(PER_TEN[name].split(), int).reshape(len(row.task_test_counts), -1)
    np.testing.assert_array_equal(fine.sum(axis=1), row.task_test_counts)


TRAIN = np.repeat(np.arange(5), 2)
TEST = np.array([0, 1, 2, 3, 4, 4, 4, 1])
OTHER = "; config.benchmark gives another division a name of its own$"


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (np.repeat(np.arange(6), 2), TEST, "cub200: expected 5 classes, found 6$"),
        (TRAIN[1:], TEST, "expected 10 training images, found 9" + OTHER),
        (TRAIN, TEST[:-1], "expected 8 test images, found 7" + OTHER),
        (np.where(TRAIN == 2, 1, TRAIN), TEST, "training images of every class.* C$"),
        (TRAIN, np.where(TEST == 3, 1, TEST), "test images of every class.* D$"),
        (TRAIN, TEST.clip(None, 3), "test images of every class.* E$"),
        (TRAIN, np.array([0, 1, 2, 3, 4, 4, 4, 4]), "expected 2 4 2 test .* found 2 5 1" + OTHER),
    ],
)
def test_verify_names_expected_and_found(tiny_benchmark, train, test, message):
    order = benchmarks.class_order(5, 1993)
    counts = tuple(int(np.isin(TEST, order[i : i + 2]).sum()) for i in (0, 2, 4))
    shrunk = dict(num_classes=5, classes_per_task=2, num_train=10, num_test=8)
    tiny_benchmark("cub200", **shrunk, task_test_counts=counts)
    benchmarks.verify("cub200", TRAIN, TEST, "ABCDE")
    with pytest.raises(InputError, match=message):
        benchmarks.verify("cub200", train, test, "ABCDEF"[: max(5, train.max() + 1)])


def test_data_of_a_users_own_need_training_images_of_every_class():
    benchmarks.verify("mine", TRAIN, TEST[:2], "ABCDE")
    with pytest.raises(InputError, match=r"mine: expected training images of every class.* F$"):
        benchmarks.verify("mine", TRAIN, TEST, "ABCDEF")
