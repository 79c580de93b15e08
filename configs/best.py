"""The strongest pipeline measured: SLCA's slow encoder, and class Gaussians that follow it.

    python main.py --config=configs/best.py --config.seed=1,2,3
    python main.py --config=configs/best.py --config.benchmark=cub200 --config.data.source=cub.zip

Read the accuracy of `gaussians`. On CIFAR-100 in 20 tasks, reduced as in docs/results.md, percent,
three seeds: raw 66.78 +- 1.32, FDC 66.15 +- 0.13, Gaussians 73.48 +- 0.32, where Cumulative-LoRA
has 69.50 in one. Of the Gaussians before, one seed: in 50 tasks 67.85 and 63.45; on 100 classes of
photographs in 10 tasks, where the gain is small, 89.75 and 89.42. Not measured: ViT-B/16, and the
five benchmarks in full; expect the order of the two, not these numbers. A training step takes 1.6
times as long.
"""

import ml_collections

from fdc_jax.run import base


def get_config() -> ml_collections.ConfigDict:
    config = base.get_config("cifar100")
    config.learner.name = "slca"
    return config
