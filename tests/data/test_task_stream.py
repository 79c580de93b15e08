import dataclasses
import hashlib

import numpy as np
import pytest

from fdc_jax.data import benchmarks, task_stream
from fdc_jax.data.dataset import class_checksums
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


@pytest.mark.parametrize("per_class", range(4))
@pytest.mark.parametrize("size", [0, 1, 20, 500])
def test_task_indices_are_the_first_of_class_after_class(size, per_class):
    labels = np.random.default_rng(size).integers(0, 7, size)
    expected = []
    for label in (5, 0, 9):
        rows = [row for row in range(size) if labels[row] == label]
        expected += rows[:per_class] if per_class else rows
    assert task_stream.task_indices(labels, [5, 0, 9], per_class).tolist() == expected


def test_a_stream_numbers_classes_as_they_arrive(plain_source):
    stream = task_stream.build(plain_source(23), plain_source(11), 4, 2, train_per_class=3)
    order = benchmarks.class_order(5, 4)
    assert stream.class_names == [str(label) for label in order]
    assert stream.classes_per_task == (2, 2, 1) and stream.first_position.tolist() == [0, 2, 4]
    for task, (indices, first) in enumerate(
        zip(stream.train_indices, stream.first_position, strict=True)
    ):
        found = [stream.class_names[label] for label in stream.train_labels(task)]
        assert found == [stream.train.class_names[label] for label in stream.train.labels[indices]]
        counts = np.bincount(stream.train_labels(task) - first)
        assert counts.tolist() == [3] * stream.classes_per_task[task]
    np.testing.assert_array_equal(
        stream.test_labels, stream.positions[stream.test.labels[stream.test_indices]]
    )
    assert sorted(stream.test_indices) == list(range(11))
    np.testing.assert_array_equal(stream.test_labels // 2, stream.test_tasks)
    with pytest.raises(InputError, match="at most the 5 classes of plain, found 6"):
        task_stream.build(plain_source(23), plain_source(11), 4, classes_per_task=6)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ((2, 2), r"add up to the 5 classes of mine, found 2 \+ 2 = 4$"),
        (0, "the number of classes of each task of mine, or a list such as 10,5,5; found 0$"),
    ],
)
def test_task_sizes_that_do_not_add_up(wanted, message):
    with pytest.raises(InputError, match="config.classes_per_task: expected .*" + message):
        benchmarks.task_sizes("mine", 5, wanted)


def test_classes_arrive_in_the_order_of_their_names_or_of_a_list(plain_source):
    given = task_stream.build(plain_source(23), plain_source(11), -1, (1, 4))
    assert given.class_names == list("01234") and given.classes_per_task == (1, 4)
    listed = task_stream.build(
        plain_source(23), plain_source(11), -1, (2, 1, 2), class_order=list("30142")
    )
    assert listed.class_names == list("30142")
    assert [task.tolist() for task in listed.tasks] == [[3, 0], [1], [4, 2]]
    assert listed.train_labels(1).tolist() == [2] * 5
    # The last classes have no test image.
    with pytest.raises(InputError, match="test images in every task, found none in task 2, of cla"):
        task_stream.build(plain_source(23), plain_source(3), -1, (3, 2))


def known_of(stream):
    return task_stream.Known(stream.class_checksums, stream.planned)


@pytest.mark.parametrize("seed", [-1, 4])
def test_classes_that_are_new_come_after_those_a_run_knows(plain_source, seed):
    def build(classes, known=task_stream.NOTHING, **options):
        data = dataclasses.replace(
            plain_source(2 * classes, num_classes=classes), labels=np.arange(2 * classes) // 2
        )
        return task_stream.build(data, data, seed, 2, known=known, **options)

    known = known_of(build(5))
    grown, whole = build(9, known), build(9)
    assert grown.planned == (2, 2, 1, 2, 2) and whole.planned == (2, 2, 2, 2, 1)
    new = [name for name in whole.classes if name not in known.classes]
    assert grown.classes == (*known.classes, *new)
    assert grown.class_checksums.items() >= known.classes.items()
    assert known.tasks == [
        [grown.class_names[c] for c in grown.positions[classes]] for classes in grown.tasks[:3]
    ]
    # What it took in stays; what was planned beyond keeps its place alone.
    few = build(9, known._replace(sizes=(2,)))
    assert few.planned == (2, 2, 2, 2, 1) and few.classes == grown.classes
    assert build(5, known, num_tasks=2).class_names == list(known.classes)[:4]


def test_a_class_checksum_is_of_names_pixels_and_splits(plain_source):
    data = plain_source(10)

    def checksums(train=data, test=data):
        return class_checksums(train, dataclasses.replace(test, split="test"))

    before = checksums()
    pixels = [bytes(32)] * 9 + [b"x" * 32]
    changed = {"pixels": dataclasses.replace(data, pixel_hashes=lambda: pixels)}
    changed["name"] = dataclasses.replace(data, ids=(*data.ids[:-1], "other"))
    for each in changed.values():
        for found in (checksums(each), checksums(data, each)):
            assert [name for name in "01234" if found[name] != before[name]] == ["4"]

    def part(split, names):
        hashes = [bytes(32)] * len(names)
        kept = dict(split=split, ids=tuple(names), pixel_hashes=lambda: hashes)
        return dataclasses.replace(data, labels=np.zeros(len(names), np.int32), **kept)

    moved = [class_checksums(part("train", "ab"[:n]), part("test", "abc"[n:])) for n in (1, 2)]
    assert moved[0] != moved[1]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("0124", "it lacks 3$"),
        ("012344", "it names twice 4$"),
        ("012345678", "it names, unlike the data, 5, 6, 7, 8$"),
    ],
)
def test_an_order_must_name_every_class_once(names, message):
    with pytest.raises(InputError, match="config.class_order: expected each of the 5 .*" + message):
        benchmarks.named_order("01234", names)
