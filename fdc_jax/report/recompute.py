"""Features of a finished run that did not save them, from its last checkpoint.

python -m fdc_jax.report.recompute RUN [--data-dir=FOLDER] [--weights=FILE]
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_collections
import numpy as np

from fdc_jax import calibration, devices, feature_files, preparation
from fdc_jax.calibration.statistics import Task
from fdc_jax.checkpoint import Checkpoints
from fdc_jax.configuration import Config
from fdc_jax.errors import InputError
from fdc_jax.files import read_json
from fdc_jax.model import vit
from fdc_jax.preparation import Experiment
from fdc_jax.workdir import Workdir

# Relative difference to the run's own statistics that another device's rounding may make.
TOLERANCE = 1e-3


def recompute(
    folder: str | os.PathLike[str],
    data_dir: str | None = None,
    weights: str | None = None,
    quiet: bool = False,
) -> Path:
    """Extracts the features of all tasks and test images with the encoders of a finished run.

    Args:
        folder: of one seed.
        data_dir: where the images lie, if no longer where they did.
        weights: file of the pretrained encoder, if no longer where it was.
        quiet: show nothing.

    Returns:
        The folder of features.

    Raises:
        InputError: the run is unfinished, its images or weights are others, its checkpoint is gone,
            or the encoder or the head of an earlier task does not follow from the final state of
            its learner, which is compared with the statistics of the time. Nothing is written then.
    """
    folder = Path(folder)
    for name in ("config.json", "results.json", "calibrator.npz"):
        if not (folder / name).exists():
            raise InputError(f"{folder}: expected a finished run of one seed, found no {name}")
    if (folder / "features" / "test_adapted.npy").exists():
        raise InputError(f"{folder / 'features'}: the features are there already")
    config = stored_config(folder / "config.json", data_dir, weights)
    try:
        e = preparation.prepare(config, quiet)
    except (AttributeError, KeyError) as error:
        raise InputError(
            f"{folder / 'config.json'}: lacks a field of this version: {error}"
        ) from error
    checksums = {
        "weights sha256": e.pretrained.sha256,
        "training images sha256": e.tasks.train.checksum,
        "test images sha256": e.tasks.test.checksum,
    }
    workdir = Workdir(folder, config, checksums)
    fitted = calibration.FDC.load(folder / "calibrator.npz")
    state = final_state(e, workdir.checkpoints)
    heads = e.learner.heads(e.setup, state, e.setup.num_tasks)
    adapted = []
    for task, indices in enumerate(e.tasks.train_indices):
        if not quiet:
            print(f"task {task + 1}/{e.setup.num_tasks}", file=sys.stderr, flush=True)
        kernels = e.learner.encoder(e.setup, e.backbone, state, task + 1)
        features = features_of(e, kernels, e.tasks.train, indices)
        _check(features, heads[task], fitted.tasks[task], config.learner.name, task)
        adapted.append(features)
    for task, (features, indices) in enumerate(zip(adapted, e.tasks.train_indices, strict=True)):
        feature_files.write_task(
            workdir.features,
            task,
            features,
            e.tasks.train_labels(task),
            heads[task],
            _pretrained(e, f"train_{task:03d}", e.tasks.train, indices),
            e.tasks.positions[e.tasks.tasks[task]],
        )
    kernels = e.learner.encoder(e.setup, e.backbone, state, e.setup.num_tasks)
    feature_files.write_test(
        workdir.features,
        features_of(e, kernels, e.tasks.test, e.tasks.test_indices),
        _pretrained(e, "test", e.tasks.test, e.tasks.test_indices),
        e.tasks.test_labels,
    )
    return workdir.features


def stored_config(path: Path, data_dir: str | None = None, weights: str | None = None) -> Config:
    """Returns the configuration that a run has stored; names with a space are checksums."""
    nested: dict[str, Any] = {}
    for field, value in read_json(path).items():
        if " " in field:
            continue
        *parents, name = field.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = tuple(value) if isinstance(value, list) else value
    config: Config = ml_collections.ConfigDict(nested)
    if data_dir is not None:
        config.data.dir = data_dir
    if weights is not None:
        config.encoder.weights = weights
    return config


def final_state(e: Experiment, folder: Path) -> Any:
    """Returns the state of a finished run from its last checkpoint.

    Raises:
        InputError: there is none that can be read.
    """
    if folder.is_dir():
        checkpoints = Checkpoints(folder, e.config.checkpoint.keep)
        target = {"state": e.learner.initial_state(e.setup)}
        try:
            for number, cursor in checkpoints.cursors():
                if cursor["tasks_done"] < e.setup.num_tasks or cursor["step"]:
                    continue
                tree = checkpoints.restore(number, devices.replicate(e.mesh, target), cursor)
                if tree is not None:
                    return tree["state"]
        finally:
            checkpoints.close()
    raise InputError(f"{folder}: expected the run's last checkpoint, found none")


def features_of(e: Experiment, kernels: Any, source: Any, indices: np.ndarray) -> np.ndarray:
    """Returns the features [n, d] of images in evaluation preprocessing."""
    return e.extract(e.backbone, kernels, e.evaluation_batches(source, indices)).features


def _pretrained(e: Experiment, name: str, source: Any, indices: np.ndarray) -> np.ndarray | None:
    if not e.config.fdc.pretrained_view_weight > 0:
        return None
    kernels = vit.pretrained_kernels(e.backbone)
    batches = e.evaluation_batches(source, indices)
    extraction = e.pretrained_features.get(
        name, indices, lambda: e.extract(e.backbone, kernels, batches)
    )
    return extraction.features


def _check(features: np.ndarray, head: Any, then: Task, learner: str, task: int) -> None:
    """Compares a task's mean feature and score scale with those of its time."""
    mean = features.mean(axis=0, dtype=np.float64)
    known = then.views[0].mean
    if np.linalg.norm(mean - known) > TOLERANCE * np.linalg.norm(known):
        raise InputError(
            f"{learner}: its final state does not give the encoder after task {task} again; "
            "run it with save_features on"
        )
    scale = float(np.max(head.logits(jnp.asarray(features)), axis=1).std())
    if abs(scale - then.raw_scale) > TOLERANCE * then.raw_scale:
        raise InputError(
            f"{learner}: its final state does not give the head that task {task} was learned with; "
            "run it with save_features on"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m fdc_jax.report.recompute",
        description="Writes the features of a finished run that did not save them.",
    )
    parser.add_argument("run", help="folder of a finished run of one seed")
    parser.add_argument("--data-dir", help="folder of the images, if they moved")
    parser.add_argument("--weights", help="file of the pretrained encoder, if it moved")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    options = parser.parse_args(arguments)
    try:
        folder = recompute(options.run, options.data_dir, options.weights, options.quiet)
    except InputError as error:
        print(f"fdc_jax: error: {error}", file=sys.stderr)
        return 2
    if not options.quiet:
        print(f"features: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
