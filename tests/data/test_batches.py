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
from tests.errors import input_error


def test_the_stream_of_a_seed_does_not_change_between_releases():
    # A change here changes every training run: resumed runs would not be the same runs.
    assert epoch_permutation(10, 1, 2, 3).tolist() == [1, 8, 2, 4, 6, 5, 0, 9, 7, 3]
    assert_allclose(
        epoch_uniforms(4, 1, 2, 3)[3, :3],
        [0.75525430428998, 0.84826892298274, 0.48690979957128],
        atol=1e-12,
    )


def assert_same(actual, expected):
    for batch, other in zip(actual, expected, strict=True):
        for array, other_array in zip(batch, other, strict=True):
            assert_array_equal(array, other_array)


@pytest.fixture
def photo_source(plain_source, photo, encode):
    encoded = [encode(photo(20 + i, 30 - i, seed=i)) for i in range(11)]
    return plain_source(11, read=encoded.__getitem__)


SEED, TASK, EPOCHS, SCALE = 6, 3, 3, (0.3, 0.9)


def batches_by_definition(source, indices, labels, batch_size, flip):
    for epoch in range(EPOCHS):
        order = epoch_permutation(len(indices), SEED, TASK, epoch)
        uniforms = epoch_uniforms(len(indices), SEED, TASK, epoch)
        for start in range(0, len(indices), batch_size):
            shapes = ((batch_size, 8, 8, 3), batch_size, batch_size)
            pixels, numbers, weights = map(np.zeros, shapes)
            for row, index in enumerate(order[start : start + batch_size]):
                image = source.image(int(indices[index]))
                pixels[row] = images.train_transform(image, 8, uniforms[index], SCALE, flip)
                numbers[row] = labels[index]
                weights[row] = 1.0
            yield pixels, numbers, weights


@hypothesis.settings(
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    st.integers(1, 11), st.integers(1, 5), st.integers(0, 40), st.integers(1, 4), st.booleans()
)
def test_batches_follow_their_definition(photo_source, count, batch_size, start, workers, flip):
    indices = np.arange(count)[::-1]
    labels = np.arange(count) + 50
    expected = [*batches_by_definition(photo_source, indices, labels, batch_size, flip)]
    batches = TrainBatches(
        photo_source,
        indices,
        labels,
        batch_size,
        SEED,
        TASK,
        image_size=8,
        epochs=EPOCHS,
        crop_scale=SCALE,
        flip=flip,
        start_step=start,
        workers=workers,
    )
    assert batches.num_steps == len(expected)
    assert_same(batches, expected[start:])


def test_evaluation_keeps_the_order(photo_source):
    indices = np.array([5, 1, 1, 9, 0])
    batches = EvaluationBatches(photo_source, indices, None, 2, image_size=16, workers=3)
    pixels, labels, weights = map(np.concatenate, zip(*batches, strict=True))
    shown = [images.evaluation_transform(photo_source.image(int(i)), 16) for i in indices]
    assert_array_equal(pixels[:5], shown)
    assert_array_equal(labels[:5], photo_source.labels[indices])
    assert weights.tolist() == [1, 1, 1, 1, 1, 0]
    assert_array_equal(evaluation_images(photo_source, indices, 16), shown)
    assert evaluation_images(photo_source, indices[:0], 16).shape == (0, 16, 16, 3)


def counting(source):
    """Returns a copy of a source that counts its reads, and the counts."""
    counts = collections.Counter()

    def read(index):
        counts[index] += 1
        return source.read(index)

    return dataclasses.replace(source, read=read), counts


def test_evaluation_cache_keeps_pixels_of_a_size(photo_source):
    source, counts = counting(photo_source)
    options = dict(cache=ByteCache(5 * 16 * 16 * 3 + 1), workers=1)
    batches = EvaluationBatches(source, np.arange(8), None, 4, image_size=16, **options)
    assert_same([*batches], [*batches])
    assert sorted(counts.values()) == [1] * 5 + [2] * 3
    (smaller,) = EvaluationBatches(source, np.arange(3), None, 4, image_size=8, **options)
    assert smaller.images.shape == (4, 8, 8, 3)


@pytest.mark.parametrize("limit, kept", [(0, 0), (7200, 3), (1 << 20, 11)])
def test_decoded_images_give_the_same_pixels(photo_source, limit, kept):
    source, reads = counting(photo_source)
    decoded = ByteCache(limit)
    # Two threads may read the same image at once.
    options = dict(image_size=24, workers=1)
    arguments = (np.arange(11), None, 4)
    for Batches, given in ((TrainBatches, (3, 0)), (EvaluationBatches, ())):
        for _ in range(2):
            actual = Batches(source, *arguments, *given, decoded=decoded, **options)
            assert_same(actual, Batches(photo_source, *arguments, *given, **options))
    assert reads.total() == 4 * 11 - 3 * kept


def no_decoding_threads():
    return not any(thread.name.startswith("decode") for thread in threading.enumerate())


def test_a_broken_image_stops_the_stream_with_its_name(plain_source):
    good = plain_source(9)
    source = plain_source(9, read=lambda index: b"" if index == 5 else good.read(index))
    with input_error(r"plain, split train, image 5 \(image_5\)"):
        list(TrainBatches(source, np.arange(9), None, 2, 0, 0, image_size=4))
    assert no_decoding_threads()


def test_reading_ahead_is_bounded_and_ends_with_the_reader(plain_source):
    source, reads = counting(plain_source(20))
    iterator = iter(TrainBatches(source, np.arange(20), None, 2, 0, 0, image_size=4))
    for yielded in range(1, 3):
        next(iterator)
        time.sleep(0.1)  # in which all images could be read
        assert 2 * yielded <= reads.total() <= 2 * (yielded + 4)
    assert not no_decoding_threads()
    iterator.close()
    assert no_decoding_threads()
