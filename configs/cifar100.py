"""CIFAR-100: 20 tasks of 5 classes, 50,000 training and 10,000 test images.

    python main.py --config=configs/cifar100.py --config.seed=1,2,3

Final accuracy of Cumulative-LoRA in the paper, percent, three seeds:
raw 84.34 +- 0.15, FDC 88.62 +- 0.13.
"""

import ml_collections

from fdc_jax.run import base


def get_config(learner: str = "cumulative_lora") -> ml_collections.ConfigDict:
    return base.get_config("cifar100", learner)
