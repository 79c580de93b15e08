"""FDC is fitted on the features of both views while they are extracted."""

import jax
import numpy as np
import pytest

from fdc_jax import command, preparation
from fdc_jax.calibration import FDC
from fdc_jax.errors import InputError
from fdc_jax.extraction import FeatureStream
from fdc_jax.heads import LinearHead
from fdc_jax.model import vit
from fdc_jax.views import Views
from tests import small_runs


def small(cache):
    config = small_runs.config(cache, train_per_class=9, test_per_class=4)
    config.evaluation.batch_size = 16
    return config


@pytest.fixture(scope="module")
def experiment(cache, tmp_path_factory):
    config = small(cache)
    config.cache_dir = str(tmp_path_factory.mktemp("features"))
    return preparation.prepare(config, quiet=True)


def fitted(source, *arrays, classes):
    head = LinearHead(np.eye(5, 96, dtype=np.float32), np.zeros(5, np.float32))
    calibrator = FDC()
    calibrator.fit_task(source, *arrays[:1], head, *arrays[1:], classes=classes)
    return calibrator.tasks[0]


def test_a_stream_gives_the_statistics_of_the_arrays_computed_or_cached(experiment):
    views = Views(experiment, experiment.test_images.beside(), lambda: None)
    kernels = jax.tree.map(lambda k: 1.2 * k, vit.pretrained_kernels(experiment.backbone))
    classes = experiment.tasks.positions[experiment.tasks.tasks[0]]
    found = []
    for encoders in (2, 1):
        features = views.training(0, kernels)
        assert features.stream.seconds == 0.0
        assert len(next(iter(features.stream))) == encoders
        found.append(fitted(features, None, classes=classes))
        adapted, pretrained = features.whole()
        assert pretrained.from_cache == (encoders == 1)
        views.keep(0, pretrained)
        found.append(
            fitted(
                adapted.features,
                experiment.tasks.train_labels(0),
                pretrained.features,
                classes=classes,
            )
        )
    assert adapted.features.shape == (45, 96)
    assert np.abs(adapted.features - pretrained.features).max() > 1e-2
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], other)


def test_a_cache_folder_that_cannot_be_made_is_refused(cache, tmp_path):
    config = small(cache)
    config.cache_dir = str(tmp_path / "file" / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"config.cache_dir=.*: expected a folder to write in"):
        preparation.prepare(config, quiet=True)


def test_every_batch_is_extracted_whatever_becomes_of_the_fit(cache, tmp_path, monkeypatch):
    streams, make = [], FeatureStream.__init__
    monkeypatch.setattr(
        FeatureStream, "__init__", lambda self, *a: streams.append(self) or make(self, *a)
    )

    def fit_task(self, source, labels, head, classes):
        next(source())
        raise InputError("the features are odd")

    monkeypatch.setattr(FDC, "fit_task", fit_task)
    with pytest.raises(InputError, match="the features are odd"):
        command.run(small(cache), str(tmp_path / "run"), quiet=True)
    assert sum(len(rows[0]) for rows in streams[-1]._made) == 45
    assert next(streams[-1]._rows, None) is None
