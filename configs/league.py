"""The league: CIFAR-100 reduced to what two processor cores learn in some ten minutes.

    fdc bench --learner=cumulative_lora --seed=1 --config.encoder.weights=FILE

20 tasks of 5 classes; of each class 60 training and 20 test images, which a list of their checksums
names, so that they are the same in every copy of CIFAR-100; ViT-Ti/16 at 128 pixels, 5 epochs a
task. FILE is AugReg's of ImageNet-21k fine-tuned on ImageNet-1k, SHA-256
936d8b1a...; without the flag it is looked for in the current folder under the name below.

Records of it, and what others' code reaches on the same images: docs/league.md.
"""

import ml_collections

from fdc_jax.run import base


def get_config(learner: str = "cumulative_lora") -> ml_collections.ConfigDict:
    config = base.get_config("cifar100", learner)
    config.classes_per_task = 5
    config.data.images = "league"
    config.encoder.variant = "Ti/16"
    config.encoder.weights = "Ti_16-augreg-i21k-ft-i1k.npz"
    config.encoder.image_size = 128
    config.train.epochs = 5
    return config
