"""A work directory opened again, by anybody: configuration, encoders, heads, calibrator, images."""

import functools
import os
from typing import Any

import ml_collections
import numpy as np
from jaxtyping import Float, Int, UInt8

from fdc_jax import calibration, devices
from fdc_jax.checkpoint import Checkpoints
from fdc_jax.configuration import CAME_LATER, Config
from fdc_jax.data.batches import Batch, evaluation_images
from fdc_jax.data.benchmarks import task_sizes
from fdc_jax.errors import InputError
from fdc_jax.files import read_npz
from fdc_jax.model import vit
from fdc_jax.preparation import Experiment
from fdc_jax.store import WRITTEN_AGAIN, Places, read_object


class Run(Places):
    """A finished or stopped work directory of one seed; nothing is trained or changed.

    Args:
        folder: the work directory.
        data_dir: where the images lie, if no longer where they did.
        weights: file of the pretrained encoder, if no longer where it was.

    Attributes:
        config: the run's configuration.
        results: what `results.json` holds, None before the run is finished.

    Raises:
        InputError: no run lies there. What else it needs, data or weights or a checkpoint, is
            looked for when it is asked for.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        data_dir: str | None = None,
        weights: str | None = None,
    ):
        super().__init__(folder)
        if not self.config_file.exists():
            raise InputError(
                f"{self.folder}: expected the work directory of a run, found no config.json"
            )
        saved = read_object(self.config_file, "it says what the run is")
        self.config = _configuration(saved)
        self._weights_sha256 = saved.get("weights sha256")
        if data_dir is not None:
            self.config.data.dir = data_dir
        if weights is not None:
            self.config.encoder.weights = weights
        self.results: dict[str, Any] | None = None
        if self.results_file.exists():
            self.results = read_object(self.results_file, WRITTEN_AGAIN)

    @functools.cached_property
    def experiment(self) -> Experiment:
        """Learner, encoder, devices and, when asked for, data."""
        known = None
        try:
            if self.results is not None:
                config, classes = self.config, self.results["num_classes"]
                known = task_sizes(config.benchmark, classes, config.classes_per_task)
            e = Experiment(self.config, quiet=True, classes_per_task=known)
        except (AttributeError, KeyError) as error:
            raise InputError(
                f"{self.config_file}: lacks a field of this version: {error}"
            ) from error
        if self._weights_sha256 not in (None, e.pretrained.sha256):
            raise InputError(
                f"{e.pretrained.path}: expected the weights that {self.folder} was run with, "
                f"sha256 {self._weights_sha256}, found {e.pretrained.sha256}"
            )
        return e

    @property
    def num_tasks(self) -> int:
        """Number of tasks of the stream."""
        return self.results["num_tasks"] if self.results else self.experiment.setup.num_tasks

    @property
    def class_names(self) -> list[str]:
        """Names of the classes by class-order position; unless the run is finished, needs data."""
        kept = (self.results or {}).get("class_names")
        return self.experiment.tasks.class_names if kept is None else kept

    @functools.cached_property
    def _saved(self) -> tuple[Any, int]:
        """State of the learner from the newest readable checkpoint, and its number of tasks."""
        e, seed = self.experiment, next(iter(self.config.seed))
        checkpoints = Checkpoints(self.checkpoints_folder, read_only=True)
        try:
            for _, cursor, tree in checkpoints.newest(lambda cursor: e.checkpoint(cursor, seed)):
                return tree["state"], cursor["tasks_done"]
        finally:
            checkpoints.close()
        raise InputError(f"{self.checkpoints_folder}: expected a checkpoint of the run, found none")

    def encoder(self, t: int) -> vit.KeyValueKernels:
        """Returns the kernels of E_t: after t tasks, 0 being the pretrained encoder.

        Raises:
            InputError: so many tasks were not trained, or there is no checkpoint.
        """
        e = self.experiment
        if t == 0:
            return vit.pretrained_kernels(e.backbone)
        state, tasks_done = self._saved
        if not 0 < t <= tasks_done:
            raise InputError(f"{self.folder}: expected E_0 to E_{tasks_done}, found E_{t}")
        return e.learner.encoder(e.setup, e.backbone, state, t)

    def heads(self, num_tasks: int | None = None) -> list[Any]:
        """Returns the heads of the first tasks, by default of all that were trained."""
        e, (state, tasks_done) = self.experiment, self._saved
        num_tasks = tasks_done if num_tasks is None else num_tasks
        if not 0 <= num_tasks <= tasks_done:
            raise InputError(f"{self.folder}: expected up to {tasks_done} heads, found {num_tasks}")
        return devices.to_host(e.learner.heads(e.setup, state, num_tasks)) if num_tasks else []

    def calibrator(self) -> Any:
        """Returns FDC as it was fitted, on all tasks or on those of a run that stopped."""
        found = self.fitted_files() + [self.calibrator_file] * self.calibrator_file.exists()
        if not found:
            raise InputError(f"{self.folder}: expected a calibrator, found none")
        return calibration.load(found[-1])

    @functools.cached_property
    def predictions(self) -> dict[str, np.ndarray]:
        """Columns of `predictions.npz`, one row per test image."""
        return read_npz(self.predictions_file)

    def features(
        self, images: UInt8[np.ndarray, "n s s 3"] | Int[np.ndarray, " n"], t: int
    ) -> Float[np.ndarray, "n d"]:
        """Returns features by E_t of images, or of the test images of some rows of predictions."""
        images = np.asarray(images)
        if images.ndim == 1:
            images = self.test_images(images)
        parts = np.split(images, range(0, len(images), self.config.evaluation.batch_size)[1:])
        batches = [
            Batch(part, np.zeros(len(part), np.int32), np.ones(len(part), np.float32))
            for part in parts
        ]
        e, kernels = self.experiment, self.encoder(t)
        return e.extract(e.backbone, [kernels], batches)[0].features

    def test_images(self, rows: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n s s 3"]:
        """Returns test images, by rows of `predictions.npz`, as an encoder sees them unscaled.

        Raises:
            InputError: the data cannot be read, or are not those of the run.
        """
        tasks = self.experiment.tasks
        if not np.array_equal(tasks.test_labels, self.predictions["label"]):
            raise InputError(
                f"{self.folder}: its predictions are not of the test images of "
                f"{self.config.benchmark} that were found"
            )
        indices = tasks.test_indices[np.asarray(rows)]
        return evaluation_images(tasks.test, indices, self.config.encoder.image_size)


def _configuration(saved: dict[str, Any]) -> Config:
    """Returns the configuration that a run has stored; names with a space are checksums."""
    nested: dict[str, Any] = {}
    for field, value in (CAME_LATER | saved).items():
        if " " not in field:
            *parents, name = field.split(".")
            place = nested
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = tuple(value) if isinstance(value, list) else value
    return ml_collections.ConfigDict(nested)
