import numpy as np
from sklearn.datasets import load_digits

from fdc_jax.data import digits, sources


def test_every_third_scan_of_a_class_is_held_out():
    labels = load_digits().target
    train, test = digits.open_digits()
    for label in range(10):
        numbers = np.flatnonzero(labels == label)
        ids = [test.ids[i] for i in np.flatnonzero(test.labels == label)]
        assert ids == [f"digit_{number:04d}" for number in numbers[2::3]]
        assert (train.labels == label).sum() == len(numbers) - len(ids)


def test_images_are_enlarged_scans(tmp_path):
    scans, labels = load_digits(return_X_y=True)
    train, source = sources.open_splits("digits", tmp_path / "nothing here")
    assert (source.name, source.split, source.partition) == ("digits", "test", "embedded")
    assert source.checksum != train.checksum
    for index in (0, 100, 595):
        number = int(source.ids[index].removeprefix("digit_"))
        assert labels[number] == source.labels[index]
        image = source.image(index)
        assert image.size == (32, 32)
        grey = np.asarray(image, np.float64)
        assert (grey == grey[..., :1]).all() and grey.max() > 200
        small = grey[..., 0].reshape(8, 4, 8, 4).mean(axis=(1, 3))
        assert np.corrcoef(small.ravel(), scans[number].ravel())[0, 1] > 0.97
