"""Which images belong to which task, and what a run knows of its classes."""

import dataclasses

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fdc_jax.data import benchmarks, task_stream
from fdc_jax.data.dataset import class_checksums
from tests.errors import input_error


def build(train, test, seed, known=task_stream.NONE_LEARNED, **fields):
    """A stream by a seed of the class order and other fields of a configuration."""
    return task_stream.build(train, test, known, class_order_seed=seed, **fields)


def test_a_stream_numbers_classes_as_they_arrive(plain_source):
    data = dataclasses.replace(plain_source(50), labels=np.random.default_rng(0).integers(0, 5, 50))
    fields = dict(classes_per_task=2, train_per_class=3, test_per_class=4)
    stream = build(data, data, 4, **fields)
    order = benchmarks.class_order(5, 4)
    assert stream.class_names == [str(label) for label in order]
    assert stream.classes_per_task == (2, 2, 1) and stream.first_position.tolist() == [0, 2, 4]
    rows = [np.flatnonzero(data.labels == label) for label in order]  # class after class
    for task in range(3):
        positions = range(5)[2 * task : 2 * task + 2]
        assert_array_equal(stream.train_labels(task), np.repeat(positions, 3))
        expected = [rows[position][:3] for position in positions]
        assert_array_equal(stream.train_indices[task], np.concatenate(expected))
    assert_array_equal(stream.test_labels, np.repeat(range(5), 4))
    assert_array_equal(stream.test_indices, np.concatenate([part[:4] for part in rows]))
    assert_array_equal(stream.test_tasks, np.repeat([0, 0, 1, 1, 2], 4))
    named = build(data, data, 4, classes_per_task=5, class_order="30142")
    assert named.class_names == [*"30142"] and len(named.test_indices) == 50


@pytest.mark.parametrize("share", [0.01, 0.25, 0.99])
def test_validation_images_are_a_share_of_every_class(plain_source, share):
    labels = np.random.default_rng(3).integers(0, 5, 100, np.int32)
    data = dataclasses.replace(plain_source(100), labels=labels)
    stream = build(data, data, 4, classes_per_task=(2, 3), validation_share=share)
    held_out = stream.validation_indices
    assert sorted([*np.concatenate(stream.train_indices), *held_out]) == [*range(100)]
    for label, count in enumerate(np.bincount(labels)):
        expected = min(max(round(share * count), 1), count - 1)
        assert np.sum(labels[held_out] == label) == expected
    names = [stream.class_names[label] for label in stream.validation_labels]
    assert names == [str(label) for label in labels[held_out]]


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
    with input_error(message):
        build(plain_source(9), plain_source(10), -1, classes_per_task=5, validation_share=0.1)


def test_every_task_has_test_images(plain_source):
    # Of classes in the order of their names, the last ones have no test image.
    with input_error("test images in every task, found none in task 2, of cla"):
        build(plain_source(23), plain_source(3), -1, classes_per_task=(3, 2))


def test_new_classes_come_after_the_known_ones(plain_source):
    def stream_of(classes, known=task_stream.NONE_LEARNED, **fields):
        data = plain_source(2 * classes, num_classes=classes)
        data = dataclasses.replace(data, labels=np.arange(2 * classes) // 2)
        return build(data, data, 4, known, classes_per_task=2, **fields)

    before = stream_of(5)
    known = task_stream.LearnedClasses(before.class_checksums, before.planned)
    grown = stream_of(9, known)
    assert grown.planned == (2, 2, 1, 2, 2)
    new = [name for name in stream_of(9).classes if name not in known.classes]
    assert grown.classes == (*known.classes, *new)
    assert grown.class_checksums.items() >= known.classes.items()
    assert known.tasks[2] == grown.class_names[4:5]
    # Learned tasks stay; classes that were planned beyond them keep only their order.
    few = stream_of(9, known._replace(sizes=(2,)), num_tasks=2)
    assert few.planned == (2, 2, 2, 2, 1)
    assert few.class_names == list(known.classes)[:4]
    assert sorted(few.positions) == [-1] * 5 + [*range(4)]


def test_checksums_are_of_names_labels_and_pixels_in_any_order(plain_source):
    data = plain_source(10)
    hashes = [*(bytes(32) for _ in range(9)), b"x" * 32]
    pixels = {"pixel_hashes": lambda: hashes}
    name = {"ids": (*data.ids[:-1], "other")}
    label = {"labels": np.append(data.labels[:-1], 3)}
    variants = [dataclasses.replace(data, **change) for change in (pixels, name, label)]
    assert len({variant.checksum for variant in (data, *variants)}) == 4
    backward = dataclasses.replace(data, labels=data.labels[::-1], ids=data.ids[::-1])
    assert backward.checksum == data.checksum
    before = class_checksums(data, data).items()
    for variant in variants[:2]:
        for splits in ((variant, data), (data, variant)):
            assert {name for name, _ in before - class_checksums(*splits).items()} == {"4"}
