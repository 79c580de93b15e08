"""The table of benchmarks, the order of classes, task sizes, and the check of data."""

import hashlib

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fdc_jax.data import benchmarks
from tests.errors import input_error

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
    "omnibench": "200 200 200 200 200 199 200 200 199 199 199 199 200 200 199 199 199 200 198 200 "
    "199 200 199 200 200 199 200 199 200 199",
}


@pytest.mark.parametrize("name", PAPER)
def test_table_of_benchmarks_is_that_of_the_paper(name):
    row = benchmarks.BENCHMARKS[name]
    counts = row.task_test_counts
    actual = (row.num_classes, len(counts), row.classes_per_task, row.num_train, sum(counts))
    assert (row.name, actual) == (name, PAPER[name])


@pytest.mark.parametrize("name", PER_TEN)
def test_task_counts_agree_with_finer_ones(name):
    row = benchmarks.BENCHMARKS[name]
    fine = np.array(PER_TEN[name].split(), int).reshape(len(row.task_test_counts), -1)
    assert_array_equal(fine.sum(axis=1), row.task_test_counts)


@pytest.mark.parametrize(
    "num_classes, digest",
    [(100, "e90204efdce7db6c"), (200, "b113214bc61598d0"), (300, "28f846a95c20caae")],
)
def test_class_order_is_pilots(num_classes, digest):
    order = benchmarks.class_order(num_classes, 1993).tolist()
    assert hashlib.sha256(str(order).encode()).hexdigest().startswith(digest)


TRAIN = np.repeat(np.arange(6), 2)
TEST = np.array([0, 1, 2, 3, 4, 4, 5, 1])


@pytest.mark.parametrize(
    "train, test, message",
    [
        (TRAIN.clip(0, 4), TEST, "cub200: expected 6 classes, found 5"),
        (TRAIN[1:], TEST, "expected 12 training images, found 11"),
        (TRAIN, TEST[:-1], "expected 8 test images, found 7"),
        (TRAIN, TEST % 4, "expected 2 3 3 test images in the tasks of .*, found 4 1 3"),
    ],
)
def test_a_benchmark_has_the_counts_of_its_table(tiny_benchmark, train, test, message):
    tiny_benchmark("cub200", classes_per_task=2, num_train=12, task_test_counts=(2, 3, 3))
    benchmarks.verify("cub200", TRAIN, TEST, "ABCDEF")
    message += "; config.benchmark gives another division a name of its own$"
    with input_error(message):
        benchmarks.verify("cub200", train, test, "ABCDEF"[: train.max() + 1])


def test_every_class_has_training_images_and_a_plain_name():
    with input_error(r"mine: expected training images of every class.* G$"):
        benchmarks.verify("mine", TRAIN, TEST, "ABCDEFG")
    with input_error(r"expected class names without control .* a\\"):
        benchmarks.verify("mine", TRAIN, TEST, ["a\u202eb", *"BCDEF"])


@pytest.mark.parametrize(
    "wanted, message",
    [
        ((2, 2), r"add up to the 5 classes of mine, found 2 \+ 2 = 4; to add a task: 3,2$"),
        (6, "at most the 5 classes of mine, found 6$"),
    ],
)
def test_task_sizes_add_up(wanted, message):
    with input_error("config.classes_per_task: expected .*" + message):
        benchmarks.task_sizes("mine", 5, wanted, earlier=(3,))


def test_default_task_sizes_are_a_fifth_of_the_classes_and_stay():
    assert benchmarks.task_sizes("mine", 14) == (3, 3, 3, 3, 2)
    assert benchmarks.task_sizes("mine", 9, earlier=(3, 2)) == (3, 2, 3, 1)
    assert benchmarks.task_sizes("cub200", 200) == (10,) * 20


@pytest.mark.parametrize("names, odd", [("0124", "3"), ("012344", "4, 4")])
def test_an_order_names_every_class_once(names, odd):
    with input_error(f"config.class_order: .* found otherwise {odd}$"):
        benchmarks.named_order("01234", names)
