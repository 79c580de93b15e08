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
    scans = load_digits().images
    train, test = sources.open_splits("digits", tmp_path / "nothing here")
    assert (test.name, test.split, test.partition) == ("digits", "test", "embedded")
    assert test.checksum != train.checksum
    for index in (0, 100, 595):
        pixels = np.asarray(test.image(index), np.float64)
        assert pixels.shape == (32, 32, 3) and (pixels == pixels[..., :1]).all()
        small = pixels[..., 0].reshape(8, 4, 8, 4).mean(axis=(1, 3))
        scan = scans[int(test.ids[index].removeprefix("digit_"))]
        assert pixels.max() > 200 and np.corrcoef(small.ravel(), scan.ravel())[0, 1] > 0.97
