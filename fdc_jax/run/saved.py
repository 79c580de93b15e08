"""A saved run: `open_run` reads a work directory and changes nothing.

Opening reads JSON alone. Encoder, learner, checkpoint, images and calibrator are loaded on demand.
"""

import copy
import functools
import itertools
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import Float, Int, UInt8

from fdc_jax import calibration, learners
from fdc_jax.calibration import METHODS, Calibrator
from fdc_jax.calibration.inputs import whole_number
from fdc_jax.data import sources
from fdc_jax.data.batches import Batch, evaluation_images
from fdc_jax.data.task_stream import TaskStream
from fdc_jax.errors import InputError, counted, escaped
from fdc_jax.learners import Replaced
from fdc_jax.machine import devices
from fdc_jax.machine.checkpoint import Checkpoints
from fdc_jax.machine.files import check_manifest, read_npz, read_safetensors
from fdc_jax.model import vit
from fdc_jax.model.weights import by_checksum as weights_by_checksum
from fdc_jax.run import configuration, records, resume
from fdc_jax.run import setup as setups
from fdc_jax.run.config import Config
from fdc_jax.run.folder import RunFolder
from fdc_jax.run.resume import ResumePoint
from fdc_jax.run.setup import Encoders


class Run(RunFolder):
    """The work directory of one seed, finished or stopped, or its export by `fdc_jax.export`.

    The folder may come from a stranger, so that no path in it is used: the caller names code,
    images, weights and cache, and nothing is downloaded.

    Args:
        folder: path of the directory.
        data_dir: folder or archive of the images, or a folder of data prepared by TFDS. The digits
            need none, as they are part of the package.
        weights: file of the pretrained encoder, whose checksum is compared. Exports need none, nor
            do runs with weights of the digits or of AugReg that are in the user's cache.
        learner: the module of a learner outside the package, whose code is run.
        host: instead of `data_dir` and `weights`, the fields `configuration.OF_A_HOST` of the
            caller's own configuration.

    Attributes:
        config: settings, such as `config.train.rank`.
        results: the content of `results.json`, None before the run is finished.
        exported: True for an export.

    Raises:
        InputError: the folder has no run. Missing data, weights or checkpoints are reported when
            they are needed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        data_dir: str | None = None,
        weights: str | None = None,
        learner: str = "",
        host: Mapping[str, Any] | None = None,
    ):
        super().__init__(folder)
        self.exported = self.weights_file.parent.is_dir()
        if self.exported:
            check_manifest(self.folder, "export the run again")
        if not self.config_file.exists():
            seeds = sorted(self.folder.glob("seed_*"))
            hint = f"; of several seeds, open one: {seeds[0]}" if seeds else ""
            raise InputError(
                f"{self.folder}: expected the work directory of a run, found no config.json{hint}"
            )
        self._saved = self.read_config()
        self._planned = self._saved.content.planned
        self._host = dict(host or {})
        if data_dir is not None:
            self._host |= sources.fields_of(self._saved.config.benchmark, data_dir)
        if self.exported:
            self._host["encoder.weights"] = str(self.weights_file)
        if weights is not None:
            self._host["encoder.weights"] = weights
        self.config = configuration.replaced(self._saved.config, self._host)
        self._learner = learner
        self.results = self.read_results()

    @functools.cached_property
    @jax.enable_x64(False)
    def encoders(self) -> Encoders:
        """Network, learner and pretrained weights, from which all encoders follow."""
        config, checksum = self.checked_configuration(), self._saved.content.weights_sha256
        if "encoder.weights" not in self._host:
            cache, variant = setups.cache_folder(config), config.encoder.variant
            file = weights_by_checksum(checksum, variant, cache)
            config = configuration.changed(config, encoder={"weights": file})
        if not config.encoder.weights:
            raise InputError(
                f"{self.folder}: needs the weights of its encoder, sha256 {checksum}; name their "
                "file: --weights=FILE, or open_run(weights=...)"
            )
        built = setups.build_encoders(config, self._planned)
        if checksum != built.pretrained.sha256:
            raise InputError(
                f"{built.pretrained.path}: expected the weights of {self.folder}, sha256 "
                f"{checksum}, found {built.pretrained.sha256}"
            )
        return built

    @functools.cached_property
    def tasks(self) -> TaskStream:
        """The images, divided into tasks; InputError if the caller has not named them."""
        config = self.checked_configuration()
        if config.benchmark != "digits" and not {"data.source", "data.dir"} & self._host.keys():
            raise InputError(
                f"{self.folder}: needs the images of {config.benchmark}; name their folder: "
                "--data=FOLDER, or open_run(data_dir=...)"
            )
        return setups.open_images(config, self._saved.known)

    def checked_configuration(self) -> Config:
        """Returns the configuration; InputError if its learner must be named."""
        name = self.config.learner.name
        if name not in (*learners.names(), self._learner):
            raise InputError(
                f"{self.config_file}: its learner {name} is not part of the package; to run its "
                f"code, name it: --learner={name}, or open_run(learner=...)"
            )
        fields = configuration.flatten(self.config) | self._saved.options
        with records.remedied(self.config_file, "put it back"):
            return configuration.of_fields(fields)

    @property
    def num_tasks(self) -> int:
        """Number of tasks of the stream."""
        if self.results:
            return self.results.num_tasks
        return self.config.num_tasks or len(self._planned)

    @property
    def class_names(self) -> list[str]:
        """Names of the classes by class-order position."""
        if self.results and self.results.class_names is not None:
            return self.results.class_names
        known = self._saved.known
        return list(known.classes)[: sum(known.sizes)]

    @functools.cached_property
    @jax.enable_x64(False)
    def _point(self) -> ResumePoint:
        """The newest resume point."""
        if self.exported:
            raise InputError(
                f"{self.folder} is an export, which has no encoders but E_0 and E_{self.num_tasks}"
            )
        encoders, folder = self.encoders, self.checkpoints_folder
        checkpoints = Checkpoints(folder, read_only=True)
        point = resume.newest(encoders, self.config.seed[0], checkpoints)
        if point is None:
            raise InputError(f"{folder}: expected a checkpoint of the run, found none")
        return point

    @jax.enable_x64(False)
    def encoder(self, t: int) -> Replaced:
        """Returns the parameters in which E_t differs from E_0; t is the number of tasks."""
        t = whole_number(t, f"{self.folder}: encoder", 0)
        learner, backbone = self.encoders.learner, self.encoders.backbone
        if t == 0:
            return vit.pretrained_kernels(backbone)
        if t == self.num_tasks and self.exported:
            arrays = traverse_util.unflatten_dict(read_safetensors(self.merged_file), sep="/")
            self._check_merged(arrays)
            return devices.replicate(learner.setup.mesh, jax.tree.map(jnp.asarray, arrays))
        trained_tasks = self._point.cursor.trained_tasks
        if not 0 < t <= trained_tasks:
            raise InputError(f"{self.folder}: expected E_0 to E_{trained_tasks}, found E_{t}")
        return learner.encoder(backbone, self._point.state, t)

    def _check_merged(self, arrays: Any) -> None:
        """Raises InputError if arrays differ from the learner's in names, shapes or types."""
        learner, backbone = self.encoders.learner, self.encoders.backbone
        # Learners recognise their newest encoder by heads that are not zero.
        state = jax.tree.map(
            lambda leaf: jnp.ones_like(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
            setups.first_state(learner),
        )
        trained = learner.encoder(backbone, state, len(self._planned))
        if different := learners.difference(trained, arrays):
            raise InputError(f"{self.merged_file}: {different}")

    @jax.enable_x64(False)
    def heads(self) -> list[Any]:
        """Returns the heads of all tasks that were trained."""
        if self.exported:
            return self.calibrator(self.calibrators[0]).heads
        state, trained_tasks = self._point.state, self._point.cursor.trained_tasks
        return setups.heads(self.encoders.learner, state, trained_tasks)

    def answering(self) -> "Run":
        """Returns the run that predicts: until this run is finished, the run before training."""
        untrained = RunFolder(self.untrained_folder)
        if self.results or not untrained.results_file.exists():
            return self
        return Run(untrained.folder, host=self._host)

    @property
    def unfinished(self) -> str:
        """Progress of a run without results, with the folder of its answer before training."""
        text = f"unfinished: no results.json, {counted(len(self.recorded_tasks()), 'task')} done"
        before = self.answering().folder
        if before != self.folder:
            text += f"; {before} has its answer before training"
        return text

    @functools.cached_property
    def calibrators(self) -> list[str]:
        """Names of the calibrators that are fitted on all tasks, or on the tasks before a stop."""
        names = [name for name in sorted(METHODS) if self.calibrator_file(name).exists()]
        if names or self.results or not self.checkpoints_folder.exists():
            return names
        return sorted(self._point.calibrators) if self._point.cursor.done_tasks else []

    @property
    def best_calibrator(self) -> str:
        """Name of the calibrator that answers by default, chosen without test labels.

        The class Gaussians, which state their confidence, else FDC, else any other.
        """
        if not self.calibrators:
            reason = "stopped before the first answer; repeat the command of the run"
            if self.results:
                reason = "expected a calibrator, found none"
            raise InputError(f"{self.folder}: {reason}")

        def rank(name: str) -> tuple[bool, bool]:
            method = calibration.find(name)
            return method.gives_confidence, method.has_components

        return max(self.calibrators, key=rank)

    def calibrator(self, name: str | None = None) -> Calibrator:
        """Returns a calibrator that was fitted on all tasks, or on the tasks before a stop.

        Args:
            name: one of `calibrators`; by default `best_calibrator`.

        Raises:
            InputError: the file is missing or damaged, or has another calibrator or one of another
                run, with other classes or widths.
        """
        name = name or self.best_calibrator
        if name not in self.calibrators:
            names = ", ".join(self.calibrators)
            raise InputError(f"{self.folder}: has no calibrator {name}, expected one of {names}")
        path = self.calibrator_file(name)
        finished = path.exists()
        if finished:
            loaded = calibration.load(path)
        else:
            loaded = copy.deepcopy(self._point.calibrators[name])
        fresh = calibration.make(name)
        if type(loaded) is not type(fresh) or vars(loaded).get("view") != vars(fresh).get("view"):
            raise InputError(f"{path}: expected a calibrator {name}, found {type(loaded).__name__}")
        sizes = self._planned[: self.num_tasks if finished else loaded.num_tasks]
        starts = np.cumsum([0, *sizes]).tolist()
        expected = [{*range(*ends)} for ends in itertools.pairwise(starts)]
        if [{*labels.tolist()} for labels in loaded.classes] != expected:
            raise InputError(f"{path}: is of another run: other classes or tasks")
        encoder = self.results.encoder if self.results else None
        width = encoder.width if encoder and encoder.width else loaded.widths[0]
        if any(of_view != width for of_view in loaded.widths):
            raise InputError(
                f"{path}: is of another run: expected features of width {width}, found "
                f"{loaded.widths}"
            )
        return loaded

    @jax.enable_x64(False)
    def predict(self, images: Any, top: int = 5, method: str | None = None) -> Any:
        """Predicts the classes of images.

        Args:
            images: a file, a folder with images at any depth, a uint8 array [h, w], [h, w, 3] or
                [n, h, w, 3], an image of Pillow, or a sequence of these.
            top: number of classes to name.
            method: the calibrator that answers; by default `best_calibrator`.

        Returns:
            A pandas frame with the columns of docs/predict.md, a row per image, indexed by its
            position. An image that cannot be read is logged and has no row.

        Raises:
            InputError: no image can be read, or the run lacks a file that predictions need.
        """
        from fdc_jax.run.prediction import Predictions  # pandas takes half a second to import

        return Predictions(self, images, top, method).table()

    @functools.cached_property
    def predictions(self) -> dict[str, np.ndarray]:
        """Columns of `predictions.npz`, a row per test image, checked."""
        columns, results = read_npz(self.predictions_file), self.results
        if missing := sorted({"label", "task"} - columns.keys()):
            raise InputError(f"{self.predictions_file}: expected column {missing[0]}, found none")
        classes = results.num_classes if results else sum(self._planned)
        rows = results.num_test_images if results else columns["label"].size
        limits = {"task": self.num_tasks, "label": classes}
        for name, column in columns.items():
            limit = limits.get(name.rpartition("_")[2])
            integers = column.dtype.kind in "iu" and column.shape == (rows,)
            if limit and not (integers and np.all((column >= 0) & (column < limit))):
                raise InputError(
                    f"{self.predictions_file}: {escaped(name)[:80]}: expected {rows} whole numbers "
                    f"below {limit}, found {column.dtype}{[*column.shape]}"
                )
            columns[name] = column.astype(np.int32) if limit else column
        return columns

    @jax.enable_x64(False)
    def features(self, images: UInt8[np.ndarray, "n s s 3"], t: int) -> Float[np.ndarray, "n d"]:
        """Returns the features by E_t of preprocessed images, see `test_images`."""
        parts = np.split(images, range(0, len(images), self.config.evaluation.batch_size)[1:])
        batches = [
            Batch(part, np.zeros(len(part), np.int32), np.ones(len(part), np.float32))
            for part in parts
        ]
        extract, backbone = self.encoders.extract, self.encoders.backbone
        return devices.to_host(extract(backbone, [self.encoder(t)], batches)[0].features)

    def test_images(self, rows: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n s s 3"]:
        """Returns test images by rows of `predictions.npz`, preprocessed except for scaling."""
        tasks, labels = self.tasks, self.predictions["label"]
        if not np.array_equal(tasks.test_labels[: len(labels)], labels):  # More tasks may follow.
            raise InputError(
                f"{self.predictions_file}: expected labels of the test images of "
                f"{self.config.benchmark}, found other labels"
            )
        indices = tasks.test_indices[np.asarray(rows)]
        return evaluation_images(tasks.test, indices, self.config.encoder.image_size)


# The public name.
open_run = Run
