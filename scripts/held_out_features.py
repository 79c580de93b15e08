"""Features of training images that a reduced run never saw, to choose between variants of FDC on.

python -m scripts.held_out_features RUN... --output=FOLDER [--images=20]

For each finished run of one seed with `data.train_per_class=K`, writes `FOLDER/LEARNER_SEED`: the
run's own feature folder with the images K+1 to K+20 of each class, from the training split, in the
place of the test images, by the run's final encoder.
"""

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np

import fdc_jax
from benchmarks import measure
from fdc_jax import feature_files
from fdc_jax.data.batches import evaluation_images
from fdc_jax.errors import InputError
from fdc_jax.files import check_writable_folder


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--images", type=int, default=20, help="of each class (default 20)")
    parser.add_argument("--cache_dir", default="")
    options = parser.parse_args()
    check_writable_folder("--output", options.output)
    for run in options.runs:
        opened = fdc_jax.open_run(run)
        config, results = opened.config, opened.results
        if results is None:
            raise InputError(f"{run}: expected a finished run")
        target = options.output / f"{results['learner']}_{results['seed']}"
        if (target / "test_adapted.npy").exists():
            continue
        if options.cache_dir:
            config.cache_dir = options.cache_dir
        tasks = opened.experiment.tasks
        indices = _next_images(tasks.train.labels, config.data.train_per_class, options.images)
        images = evaluation_images(tasks.train, indices, config.encoder.image_size)
        adapted, pretrained = (opened.features(images, t) for t in (opened.num_tasks, 0))
        shutil.copytree(run / "features", target, dirs_exist_ok=True)
        labels = tasks.positions[tasks.train.labels[indices]]
        feature_files.write_test(target, adapted, pretrained, labels)
        print(target, flush=True)


def _next_images(labels: np.ndarray, used: int, count: int) -> np.ndarray:
    order = np.argsort(labels, kind="stable")
    rank = np.arange(len(labels)) - np.searchsorted(labels[order], labels[order], side="left")
    return np.sort(order[(rank >= used) & (rank < used + count)])


if __name__ == "__main__":
    sys.exit(measure.run("scripts.held_out_features", main))
