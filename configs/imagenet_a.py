r"""ImageNet-A, PILOT's split: 10 tasks of 20 classes, 5,981 training and 1,519 test images.

    python main.py --config=configs/imagenet_a.py --config.data.source=imagenet-a.zip \
        --config.seed=1,2,3

Final accuracy of Cumulative-LoRA in the paper, percent, three seeds:
raw 54.11 +- 0.17, FDC 60.08 +- 1.02.
"""

import ml_collections

from fdc_jax.run import base


def get_config(learner: str = "cumulative_lora") -> ml_collections.ConfigDict:
    return base.get_config("imagenet_a", learner)
