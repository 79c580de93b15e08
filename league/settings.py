r"""The league's protocol: CIFAR-100, reduced to what two processor cores learn in ten minutes.

    python -m league images
    python main.py --config=league/settings.py:slca --config.encoder.weights=FILE \
        --config.seed=1 --workdir=runs/league_slca_1
    python -m league record runs/league_slca_1

20 tasks of 5 classes with 60 training and 20 test images each, ViT-Ti/16 at 128 pixels, 5 epochs
per task. The first command writes the images. FILE is AugReg's file with the checksum below, by
default in the current folder. README.md has the results.
"""

from typing import Any

import ml_collections

from fdc_jax.run import base

# Ti/16, pretrained on ImageNet-21k and fine-tuned on ImageNet-1k.
WEIGHTS_SHA256 = "936d8b1a582a0ee78c10d8ba7ca528198bbc5492bebfee7dd4e6e9e18ed0ab13"
IMAGES = "runs/league_images"


def get_config(learner: str = "cumulative_lora") -> ml_collections.ConfigDict:
    """Returns the protocol for a learner."""
    config: Any = base.get_config("cifar100", learner)
    config.benchmark = "league"
    config.classes_per_task = 5
    config.data.source = IMAGES
    config.data.allow_overlap = True  # CIFAR-100 has a few images in both splits.
    config.encoder.variant = "Ti/16"
    config.encoder.weights = "Ti_16-augreg-i21k-ft-i1k.npz"
    config.encoder.image_size = 128
    config.train.epochs = 5
    return config
