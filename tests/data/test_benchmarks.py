"""The table of benchmarks, the order of classes, task sizes, and the check of data."""

import hashlib

import numpy as np
import pytest

from fdc_jax.data import benchmarks
from fdc_jax.errors import InputError


@pytest.mark.parametrize(
    ("num_classes", "digest", "first", "last"),
    [
        (100, "e90204efdce7db6c", [68, 56, 78, 8, 23], [67, 29, 49, 57, 33]),
        (200, "b113214bc61598d0", [168, 136, 51, 9, 183], [195, 29, 177, 185, 161]),
        (300, "28f846a95c20caae", [169, 221, 146, 296, 92], [295, 95, 285, 225, 185]),
    ],
)
def test_class_order_is_pilots(num_classes, digest, first, last):
    order = benchmarks.class_order(num_classes, 1993).tolist()
    assert hashlib.sha256(str(order).encode()).hexdigest().startswith(digest)
    assert (order[:5], order[-5:]) == (first, last)


# What is refused ----------------------------------------------------------------------------------

TRAIN = np.repeat(np.arange(6), 2)
TEST = np.array([0, 1, 2, 3, 4, 4, 5, 1])


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (TRAIN.clip(0, 4), TEST, "cub200: expected 6 classes, found 5"),
        (TRAIN[1:], TEST, "expected 12 training images, found 11"),
        (TRAIN, TEST[:-1], "expected 8 test images, found 7"),
        (TRAIN, TEST % 4, "expected 2 3 3 test images in the tasks of .*, found 4 1 3"),
    ],
)
def test_a_benchmark_has_the_counts_of_its_table(tiny_benchmark, train, test, message):
    order = benchmarks.class_order(6, 1993)
    counts = tuple(int(np.isin(TEST, order[i : i + 2]).sum()) for i in (0, 2, 4))
    tiny_benchmark("cub200", classes_per_task=2, num_train=12, task_test_counts=counts)
    benchmarks.verify("cub200", TRAIN, TEST, "ABCDEF")
    message += "; config.benchmark gives another division a name of its own$"
    with pytest.raises(InputError, match=message):
        benchmarks.verify("cub200", train, test, "ABCDEF"[: train.max() + 1])


def test_every_class_has_training_images():
    benchmarks.verify("mine", TRAIN, TEST[:2], "ABCDEF")
    with pytest.raises(InputError, match=r"mine: expected training images of every class.* G$"):
        benchmarks.verify("mine", TRAIN, TEST, "ABCDEFG")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ((2, 2), r"add up to the 5 classes of mine, found 2 \+ 2 = 4; to add a task: 3,2$"),
        (6, "at most the 5 classes of mine, found 6$"),
        ((3,), r"found 3 = 3; to add a task: 3,2$"),
    ],
)
def test_task_sizes_add_up(wanted, message):
    with pytest.raises(InputError, match="config.classes_per_task: expected .*" + message):
        benchmarks.task_sizes("mine", 5, wanted, taken=(3,))


def test_who_says_no_number_gets_a_fifth_of_the_classes_also_for_those_that_come_later():
    assert benchmarks.task_sizes("mine", 14) == (3, 3, 3, 3, 2)
    assert benchmarks.task_sizes("mine", 3) == (2, 1)
    assert benchmarks.task_sizes("mine", 18, taken=(3, 3, 3, 3, 2)) == (3, 3, 3, 3, 2, 3, 1)
    assert benchmarks.task_sizes("cub200", 200) == (10,) * 20


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("0124", "found otherwise 3$"),
        ("012344", "found otherwise 4, 4$"),
        ("012345678", "found otherwise 5, 6, 7, 8$"),
    ],
)
def test_an_order_names_every_class_once(names, message):
    with pytest.raises(InputError, match="config.class_order: expected each of the 5 .*" + message):
        benchmarks.named_order("01234", names)
