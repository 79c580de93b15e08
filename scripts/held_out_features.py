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

import ml_collections
import numpy as np

from benchmarks import measure
from configs import base
from fdc_jax import feature_files, preparation
from fdc_jax.files import check_writable_folder, read_json
from fdc_jax.model import vit
from fdc_jax.report import recompute


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
        results = read_json(run / "results.json")
        target = options.output / f"{results['learner']}_{results['seed']}"
        if (target / "test_adapted.npy").exists():
            continue
        config = base.get_config()
        # Fields that the run's time did not know keep their defaults, which change nothing.
        _update(config, recompute.stored_config(run / "config.json"))
        config.cache_dir = options.cache_dir
        e = preparation.prepare(config, quiet=True)
        indices = _next_images(e.tasks.train.labels, config.data.train_per_class, options.images)
        state = recompute.final_state(e, run / "checkpoints")
        kernels = e.learner.encoder(e.setup, e.backbone, state, e.setup.num_tasks)
        adapted = recompute.features_of(e, kernels, e.tasks.train, indices)
        pretrained = recompute.features_of(
            e, vit.pretrained_kernels(e.backbone), e.tasks.train, indices
        )
        shutil.copytree(run / "features", target, dirs_exist_ok=True)
        labels = e.tasks.positions[e.tasks.train.labels[indices]]
        feature_files.write_test(target, adapted, pretrained, labels)
        print(target, flush=True)


def _update(config: ml_collections.ConfigDict, known: ml_collections.ConfigDict) -> None:
    for name, value in known.items():
        if isinstance(value, ml_collections.ConfigDict):
            _update(config[name], value)
        elif name in config:
            config[name] = value


def _next_images(labels: np.ndarray, used: int, count: int) -> np.ndarray:
    order = np.argsort(labels, kind="stable")
    rank = np.arange(len(labels)) - np.searchsorted(labels[order], labels[order], side="left")
    return np.sort(order[(rank >= used) & (rank < used + count)])


if __name__ == "__main__":
    sys.exit(measure.run("scripts.held_out_features", main))
