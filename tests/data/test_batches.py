import collections
import dataclasses
import threading
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fdc_jax.data import images
from fdc_jax.data.batches import (
    ByteCache,
    EvaluationBatches,
    TrainBatches,
    epoch_permutation,
    epoch_uniforms,
    evaluation_images,
)
from fdc_jax.errors import InputError


def test_the_stream_of_a_seed_does_not_change_between_releases():
    # A change here changes every training run: resumed runs would not be the same runs.
    assert epoch_permutation(10, 1, 2, 3).tolist() == [1, 8, 2, 4, 6, 5, 0, 9, 7, 3]
    assert_allclose(
        epoch_uniforms(4, 1, 2, 3)[3, :3],
        [0.75525430428998, 0.84826892298274, 0.48690979957128],
        atol=1e-12,
    )


def test_every_coordinate_changes_the_stream():
    coordinates = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (0, 1, 0), (0, 0, 1)]
    assert len({tuple(epoch_permutation(50, *row)) for row in coordinates}) == 6
    assert len({tuple(epoch_uniforms(2, *row).ravel()) for row in coordinates}) == 6


def collect(batches):
    return [(b.images.copy(), b.labels.copy(), b.weights.copy()) for b in batches]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            assert_array_equal(x, y)


@pytest.fixture
def photo_source(plain_source, photo, encode):
    encoded = [encode(photo(20 + i, 30 - i, seed=i)) for i in range(11)]
    return plain_source(11, read=encoded.__getitem__)


@hypothesis.settings(
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(st.integers(1, 11), st.integers(1, 5), st.integers(0, 40), st.integers(1, 4))
def test_batches_do_not_depend_on_threads_or_start(photo_source, n, batch_size, start, workers):
    arguments = (photo_source, np.arange(n)[::-1], None, batch_size, 1, 2)
    options = dict(image_size=8, epochs=3)
    complete = TrainBatches(*arguments, workers=1, **options)
    part = TrainBatches(*arguments, start_step=start, workers=workers, **options)
    expected = collect(complete)
    assert len(expected) == complete.num_steps == 3 * -(-n // batch_size)
    assert_same(collect(part), expected[start:])


@pytest.mark.parametrize("flip", [True, False])
def test_batches_follow_their_definition(photo_source, flip):
    indices, labels = np.array([4, 9, 0, 2, 7]), np.array([10, 11, 12, 13, 14])
    options = dict(image_size=16, epochs=2, crop_scale=(0.3, 0.9), flip=flip)
    batches = TrainBatches(photo_source, indices, labels, 2, 6, 3, **options)
    actual = collect(batches)
    assert batches.steps_per_epoch == 3
    assert [part.dtype for part in actual[0]] == [np.uint8, np.int32, np.float32]
    for epoch in range(2):
        order = epoch_permutation(5, 6, 3, epoch)
        assert sorted(order) == [*range(5)]
        uniforms = epoch_uniforms(5, 6, 3, epoch)
        for position, row in enumerate(order):
            batch_images, batch_labels, batch_weights = actual[3 * epoch + position // 2]
            image = images.decode(photo_source.read(int(indices[row])), "x")
            expected = images.train_transform(image, 16, uniforms[row], (0.3, 0.9), flip)
            assert_array_equal(batch_images[position % 2], expected)
            assert batch_labels[position % 2] == labels[row]
            assert batch_weights[position % 2] == 1.0


def test_the_last_batch_is_padded(plain_source):
    (batch,) = TrainBatches(plain_source(9), [8], [3], 4, 0, 0, image_size=4)
    assert batch.weights.tolist() == [1, 0, 0, 0] and batch.labels.tolist() == [3, 0, 0, 0]
    assert batch.images.shape == (4, 4, 4, 3) and not batch.images[1:].any()
    evaluation = EvaluationBatches(plain_source(7), np.arange(7), None, 4, image_size=4)
    assert [batch.weights.sum() for batch in evaluation] == [4, 3]


@pytest.mark.parametrize("workers", [1, 3])
def test_evaluation_keeps_the_order(photo_source, workers):
    indices = np.array([5, 1, 1, 9, 0])
    batches = EvaluationBatches(photo_source, indices, None, 2, image_size=16, workers=workers)
    pixels, labels, _ = (np.concatenate(parts)[:5] for parts in zip(*batches, strict=True))
    for row, index in enumerate(indices):
        image = images.decode(photo_source.read(int(index)), "x")
        assert_array_equal(pixels[row], images.evaluation_transform(image, 16))
    assert_array_equal(labels, photo_source.labels[indices])
    assert_array_equal(evaluation_images(photo_source, indices, 16), pixels)


def counting(source):
    """Returns a copy of a source that counts its reads, and the counts."""
    counts = collections.Counter()

    def read(index):
        counts[index] += 1
        return source.read(index)

    return dataclasses.replace(source, read=read), counts


def test_evaluation_cache_keeps_the_same_pixels(photo_source):
    source, counts = counting(photo_source)
    cache = ByteCache(5 * 16 * 16 * 3 + 1)

    def walk(number, size):
        options = dict(image_size=size, cache=cache, workers=1)
        return collect(EvaluationBatches(source, np.arange(number), None, 4, **options))

    assert_same(walk(8, 16), walk(8, 16))
    assert [counts[i] for i in range(8)] == [1] * 5 + [2] * 3
    assert walk(3, 8)[0][0].shape == (4, 8, 8, 3)


@pytest.mark.parametrize("limit", [0, 3 * 20 * 30 * 4, 1 << 20])
def test_decoded_images_give_the_same_pixels(photo_source, limit):
    source, reads = counting(photo_source)
    decoded = ByteCache(limit)
    # Two threads may read the same image at once, in the last and in the next epoch.
    options = dict(image_size=24, epochs=3, workers=1)
    arguments = (np.arange(11), None, 4, 3, 0)
    kept = collect(TrainBatches(source, *arguments, decoded=decoded, **options))
    assert_same(kept, collect(TrainBatches(photo_source, *arguments, **options)))
    assert 0 <= decoded.room <= limit
    # What is kept is read once, the rest in each of three epochs.
    keys = [("decoded", source.name, source.split, index) for index in range(11)]
    count = sum(decoded.get(key) is not None for key in keys)
    assert sum(reads.values()) == 33 - 2 * count
    assert count == {0: 0, 1 << 20: 11}.get(limit, count) and (limit == 0 or count >= 3)
    # The evaluation transform takes the same decoded images.
    reads.clear()
    plain = EvaluationBatches(source, np.arange(11), None, 11, image_size=24, decoded=decoded)
    expected = evaluation_images(photo_source, np.arange(11), 24)
    assert_array_equal(next(iter(plain)).images, expected)
    assert sum(reads.values()) == 11 - count


def test_caches_of_pixels_share_a_limit_and_are_cleared_apart():
    cache = ByteCache(10)
    for kind, size in (("a", 6), ("b", 5), ("b", 4)):
        cache.put((kind, 0), np.zeros(size, np.uint8))
    assert cache.get(("a", 0)).size == 6 and cache.get(("b", 0)).size == 4 and cache.room == 0
    cache.forget("a")
    assert cache.get(("a", 0)) is None and cache.get(("b", 0)).size == 4 and cache.room == 6


def test_processes_together_read_each_image_once(photo_source):
    """Each its own rows of every batch, with labels and weights of all."""
    arguments, options = (np.arange(11), None, 4, 3, 0), dict(image_size=24)
    complete = collect(TrainBatches(photo_source, *arguments, **options))
    owners = np.array([True, False, True, False])
    total = collections.Counter()
    for rows_read in (owners, ~owners):
        source, reads = counting(photo_source)
        part = collect(TrainBatches(source, *arguments, own_rows=rows_read, **options))
        for actual, expected in zip(part, complete, strict=True):
            assert_array_equal(actual[0][rows_read], expected[0][rows_read])
            assert_same([actual[1:]], [expected[1:]])
        assert len(reads) < 11
        total += reads
    assert total == collections.Counter(range(11))


def no_decoding_threads():
    return not any(thread.name.startswith("decode") for thread in threading.enumerate())


def test_a_broken_image_stops_the_stream_with_its_name(plain_source):
    good = plain_source(9)
    source = plain_source(9, read=lambda i: b"" if i == 5 else good.read(i))
    for batches in [
        TrainBatches(source, np.arange(9), None, 2, 0, 0, image_size=4),
        EvaluationBatches(source, np.arange(9), None, 2, image_size=4),
    ]:
        with pytest.raises(InputError, match=r"plain, split train, image 5 \(image_5\)"):
            list(batches)
    assert no_decoding_threads()


def test_reading_ahead_is_bounded_and_ends_with_the_reader(plain_source):
    source, reads = counting(plain_source(40))
    iterator = iter(TrainBatches(source, np.arange(40), None, 2, 0, 0, image_size=4))
    for yielded in range(1, 5):
        next(iterator)
        time.sleep(0.1)  # in which all images could be read
        assert 2 * yielded <= sum(reads.values()) <= 2 * (yielded + 4)
    assert not no_decoding_threads()
    iterator.close()
    assert no_decoding_threads()
