import numpy as np
from sklearn.datasets import load_digits

from fdc_jax.data import sources


def test_every_third_scan_of_a_class_is_held_out_and_enlarged(tmp_path):
    scans, labels = load_digits(return_X_y=True)
    train, test = sources.open_splits("digits", tmp_path / "nothing here")
    assert len(train) + len(test) == len(scans) and test.checksum != train.checksum
    held_out = np.concatenate([np.flatnonzero(labels == label)[2::3] for label in range(10)])
    rows = np.argsort(test.labels, kind="stable")
    assert [test.ids[row] for row in rows] == [f"digit_{scan:04d}" for scan in held_out]
    pixels = np.asarray(test.image(int(rows[0])), np.float64)
    assert pixels.shape == (32, 32, 3) and pixels.max() > 200
    small = pixels.reshape(8, 4, 8, 4, 3).mean(axis=(1, 3))
    for channel in small.T:
        assert np.corrcoef(channel.T.ravel(), scans[held_out[0]])[0, 1] > 0.97
