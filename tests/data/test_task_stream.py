"""Which images belong to which task, and what a run knows of its classes."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fdc_jax.data import benchmarks, images, task_stream
from fdc_jax.data.dataset import Dataset, class_checksums, listed
from fdc_jax.errors import InputError
from fdc_jax.run import base


@pytest.mark.parametrize("per_class", range(4))
@pytest.mark.parametrize("size", [0, 1, 20, 500])
def test_task_indices_are_the_first_of_class_after_class(size, per_class):
    labels = np.random.default_rng(size).integers(0, 7, size)
    expected = []
    for label in (5, 0, 9):
        rows = [row for row in range(size) if labels[row] == label]
        expected += rows[:per_class] if per_class else rows
    assert task_stream.task_indices(labels, [5, 0, 9], per_class).tolist() == expected


def build(train, test, seed, known=task_stream.NOTHING, **fields):
    """A stream of a configuration with some of its fields."""
    config = base.get_config("")
    config.update({"class_order_seed": seed, **fields})
    return task_stream.build(config, train, test, known)


def test_a_stream_numbers_classes_as_they_arrive(plain_source):
    stream = build(
        *(plain_source(23), plain_source(11), 4),
        classes_per_task=2,
        data={"train_per_class": 3},
    )
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
def test_classes_that_are_new_come_after_those_a_run_knows(plain_source, seed):
    def of(classes, known=task_stream.NOTHING, **fields):
        data = dataclasses.replace(
            plain_source(2 * classes, num_classes=classes), labels=np.arange(2 * classes) // 2
        )
        return build(data, data, seed, known, classes_per_task=2, **fields)

    before = of(5)
    known = task_stream.Known(before.class_checksums, before.planned)
    grown, whole = of(9, known), of(9)
    assert grown.planned == (2, 2, 1, 2, 2) and whole.planned == (2, 2, 2, 2, 1)
    new = [name for name in whole.classes if name not in known.classes]
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
    assert len({each.checksum for each in (data, *changed.values())}) == 4
    back = dict(labels=data.labels[::-1], ids=data.ids[::-1])
    assert dataclasses.replace(data, **back).checksum == data.checksum
    del changed["label"]
    for each in changed.values():
        for found in (checksums(each), checksums(data, each)):
            assert [name for name in "01234" if found[name] != before[name]] == ["4"]

    def part(split, names):
        hashes = [bytes(32)] * len(names)
        kept = dict(split=split, ids=tuple(names), pixel_hashes=lambda: hashes)
        return dataclasses.replace(data, labels=np.zeros(len(names), np.int32), **kept)

    moved = [class_checksums(part("train", "ab"[:n]), part("test", "abc"[n:])) for n in (1, 2)]
    assert moved[0] != moved[1]


def copy_of_data(split, rows):
    """Thirty images of three classes, number i of colour i, in an order of somebody's."""
    pixels = [np.full((2, 2, 3), i, np.uint8) for i in rows]
    return Dataset(
        name="plain",
        split=split,
        partition="given",
        labels=np.array(rows) % 3,
        ids=tuple(f"{split}_{place:05d}" for place in range(len(rows))),
        class_names=("ant", "bee", "cat"),
        read=lambda index: Image.fromarray(pixels[index]),
        pixel_hashes=lambda: [images.pixels_sha256(each) for each in pixels],
    )


@given(st.permutations(range(30)), st.permutations(range(30, 51)))
def test_a_list_of_images_means_the_same_in_every_copy(tmp_path_factory, train_rows, test_rows):
    wanted = {"train": {"bee": [28, 4, 1], "ant": [27, 0], "cat": [5]}, "test": {}}
    wanted["test"] = {"ant": [48], "bee": [40, 31], "cat": [32]}

    def checksum(number):
        return images.pixels_sha256(np.full((2, 2, 3), number, np.uint8)).hex()[:12]

    file = tmp_path_factory.getbasetemp() / "listed.json"
    content = {
        split: {kind: [*map(checksum, numbers)] for kind, numbers in of.items()}
        for split, of in wanted.items()
    }
    file.write_text(json.dumps(content))
    stream = build(
        copy_of_data("train", train_rows),
        copy_of_data("test", test_rows),
        -1,
        classes_per_task=(1, 2),
        data={"images": str(file)},
    )

    def colours(split, rows):
        return [np.asarray(split.image(row))[0, 0, 0] for row in rows]

    found = [colours(stream.train, rows) for rows in stream.train_indices]
    assert found == [[27, 0], [28, 4, 1, 5]]
    assert colours(stream.test, stream.test_indices) == [48, 40, 31, 32]
    assert stream.train_labels(1).tolist() == [1, 1, 1, 2]
    assert stream.train.ids[:2] == tuple(content["train"]["bee"][:2])
    same = build(
        *(copy_of_data("train", range(30)), copy_of_data("test", range(30, 51)), -1),
        classes_per_task=(1, 2),
        data={"images": str(file)},
    )
    assert stream.class_checksums == same.class_checksums
    assert (stream.train.checksum, stream.test.checksum) == (
        same.train.checksum,
        same.test.checksum,
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "expected league, or a JSON file"),
        ("[]", "expected league, or a JSON file"),
        ('{"test": {}}', "expected league, or a JSON file"),
        ('{"train": {"bee": 3}}', "expected league, or a JSON file"),
        ('{"train": {"bee": ["0", "1"]}}', "expected 2 images in train, 2 are not there.* bee 0$"),
    ],
)
def test_lists_of_images_that_say_nothing_are_refused(content, said, tmp_path):
    file = tmp_path / "listed.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=rf"config\.data\.images: .*{said}"):
        listed(copy_of_data("train", range(30)), str(file))
