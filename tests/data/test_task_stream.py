"""Which images belong to which task, and what a run knows of its classes."""

import dataclasses

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fdc_jax.data import benchmarks, task_stream
from fdc_jax.data.dataset import class_checksums
from fdc_jax.errors import InputError


@pytest.mark.parametrize("per_class", range(4))
@pytest.mark.parametrize("size", [20, 500])
def test_tasks_have_the_first_images_of_class_after_class(plain_source, size, per_class):
    labels = np.random.default_rng(size).integers(0, 5, size, np.int32)
    data = dataclasses.replace(plain_source(size), labels=labels)
    order = tuple("30142")
    fields = dict(class_order=order, train_per_class=per_class, test_per_class=per_class)
    stream = build(data, data, -1, classes_per_task=(2, 3), **fields)
    rows = {label: np.flatnonzero(labels == int(label))[: per_class or None] for label in order}
    expected = [[row for label in task for row in rows[label]] for task in ("30", "142")]
    assert [task.tolist() for task in stream.train_indices] == expected
    assert stream.test_indices.tolist() == [*expected[0], *expected[1]]


def build(train, test, seed, known=task_stream.NOTHING, **fields):
    """A stream by a seed of the class order and other fields of a configuration."""
    return task_stream.build(train, test, known, class_order_seed=seed, **fields)


def test_a_stream_numbers_classes_as_they_arrive(plain_source):
    fields = dict(classes_per_task=2, train_per_class=3)
    stream = build(plain_source(23), plain_source(11), 4, **fields)
    order = benchmarks.class_order(5, 4)
    assert stream.class_names == [str(label) for label in order]
    assert stream.classes_per_task == (2, 2, 1) and stream.first_position.tolist() == [0, 2, 4]
    for task, (indices, first) in enumerate(
        zip(stream.train_indices, stream.first_position, strict=True)
    ):
        actual = [stream.class_names[label] for label in stream.train_labels(task)]
        assert actual == [stream.train.class_names[label] for label in stream.train.labels[indices]]
        counts = np.bincount(stream.train_labels(task) - first)
        assert counts.tolist() == [3] * stream.classes_per_task[task]
    assert_array_equal(
        stream.test_labels, stream.positions[stream.test.labels[stream.test_indices]]
    )
    assert sorted(stream.test_indices) == list(range(11))
    assert_array_equal(stream.test_labels // 2, stream.test_tasks)


def test_classes_arrive_in_the_order_of_their_names_or_of_a_list(plain_source):
    given = build(plain_source(23), plain_source(11), -1, classes_per_task=(1, 4))
    assert given.class_names == list("01234") and given.classes_per_task == (1, 4)
    fields = dict(classes_per_task=(2, 1, 2), class_order=tuple("30142"))
    listed = build(plain_source(23), plain_source(11), -1, **fields)
    assert listed.class_names == list("30142")
    assert [task.tolist() for task in listed.tasks] == [[3, 0], [1], [4, 2]]
    assert listed.train_labels(1).tolist() == [2] * 5
    # The last classes have no test image.
    with pytest.raises(InputError, match="test images in every task, found none in task 2, of cla"):
        build(plain_source(23), plain_source(3), -1, classes_per_task=(3, 2))


@pytest.mark.parametrize("seed", [-1, 4])
def test_new_classes_come_after_the_known_ones(plain_source, seed):
    def of(classes, known=task_stream.NOTHING, **fields):
        data = dataclasses.replace(
            plain_source(2 * classes, num_classes=classes), labels=np.arange(2 * classes) // 2
        )
        return build(data, data, seed, known, classes_per_task=2, **fields)

    before = of(5)
    known = task_stream.Known(before.class_checksums, before.planned)
    grown, complete = of(9, known), of(9)
    assert grown.planned == (2, 2, 1, 2, 2) and complete.planned == (2, 2, 2, 2, 1)
    new = [name for name in complete.classes if name not in known.classes]
    assert grown.classes == (*known.classes, *new)
    assert grown.class_checksums.items() >= known.classes.items()
    assert known.tasks == [
        [grown.class_names[c] for c in grown.positions[classes]] for classes in grown.tasks[:3]
    ]
    # What it took in stays; what was planned beyond keeps its place alone.
    few = of(9, known._replace(sizes=(2,)))
    assert few.planned == (2, 2, 2, 2, 1) and few.classes == grown.classes
    assert of(5, known, num_tasks=2).class_names == list(known.classes)[:4]


def test_checksums_are_of_names_labels_and_pixels_in_any_order(plain_source):
    data = plain_source(10)

    def checksums(train=data, test=data):
        return class_checksums(train, dataclasses.replace(test, split="test"))

    before = checksums()
    pixels = [bytes(32)] * 9 + [b"x" * 32]
    changed = {"pixels": dataclasses.replace(data, pixel_hashes=lambda: pixels)}
    changed["name"] = dataclasses.replace(data, ids=(*data.ids[:-1], "other"))
    changed["label"] = dataclasses.replace(data, labels=np.append(data.labels[:-1], 3))
    assert len({variant.checksum for variant in (data, *changed.values())}) == 4
    back = dict(labels=data.labels[::-1], ids=data.ids[::-1])
    assert dataclasses.replace(data, **back).checksum == data.checksum
    del changed["label"]
    for variant in changed.values():
        for actual in (checksums(variant), checksums(data, variant)):
            assert [name for name in "01234" if actual[name] != before[name]] == ["4"]

    def part(split, names):
        hashes = [bytes(32)] * len(names)
        kept = dict(split=split, ids=tuple(names), pixel_hashes=lambda: hashes)
        return dataclasses.replace(data, labels=np.zeros(len(names), np.int32), **kept)

    moved = [class_checksums(part("train", "ab"[:n]), part("test", "abc"[n:])) for n in (1, 2)]
    assert moved[0] != moved[1]
