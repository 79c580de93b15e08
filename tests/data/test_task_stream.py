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


def build(train, test, seed, known=task_stream.NONE_LEARNED, **fields):
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


@pytest.mark.parametrize("per_class", [0, 4])
@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.99])
def test_validation_images_are_a_share_of_every_class(plain_source, share, per_class):
    data = dataclasses.replace(
        plain_source(200), labels=np.random.default_rng(3).integers(0, 5, 200, np.int32)
    )
    fields = dict(classes_per_task=(2, 3), train_per_class=per_class)
    all_images = build(data, data, 4, **fields)
    stream = build(data, data, 4, **fields, validation_share=share)
    learned, held_out = np.concatenate(stream.train_indices), stream.validation_indices
    assert not {*learned} & {*held_out}
    assert {*learned} | {*held_out} == {*np.concatenate(all_images.train_indices)}
    for label in range(5):
        count = np.sum(data.labels[np.concatenate(all_images.train_indices)] == label)
        expected = min(max(round(share * count), 1), count - 1)
        assert np.sum(data.labels[held_out] == label) == expected
    names = [stream.class_names[label] for label in stream.validation_labels]
    assert names == [str(label) for label in data.labels[held_out]]
    assert_array_equal(stream.test_indices, all_images.test_indices)
    assert_array_equal(all_images.validation_indices, [])


def test_validation_images_do_not_depend_on_other_classes(plain_source):
    def held_out(num_classes, seed, **fields):
        labels = np.arange(200, dtype=np.int32) // 20 % num_classes
        data = dataclasses.replace(plain_source(200, num_classes=num_classes), labels=labels)
        stream = build(data, data, seed, classes_per_task=5, validation_share=0.3, **fields)
        return {row for row in stream.validation_indices if row < 100}

    assert held_out(5, 1, train_per_class=20) == held_out(10, 2) == held_out(10, 3)


def test_a_class_of_one_image_has_none_to_hold_out(plain_source):
    message = (
        "config.data.validation_share: expected at least two training images of every class, "
        "found one of 4"
    )
    with pytest.raises(InputError, match=message):
        build(plain_source(9), plain_source(10), -1, classes_per_task=5, validation_share=0.1)


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
    def of(classes, known=task_stream.NONE_LEARNED, **fields):
        data = dataclasses.replace(
            plain_source(2 * classes, num_classes=classes), labels=np.arange(2 * classes) // 2
        )
        return build(data, data, seed, known, classes_per_task=2, **fields)

    before = of(5)
    known = task_stream.LearnedClasses(before.class_checksums, before.planned)
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
