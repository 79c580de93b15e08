r"""ImageNet-R, PILOT's split: 10 tasks of 20 classes, 24,000 training and 6,000 test images.

    python main.py --config=configs/imagenet_r.py --config.data.source=imagenet-r.zip \
        --config.seed=1,2,3

Final accuracy of Cumulative-LoRA in the paper, percent, three seeds:
raw 75.91 +- 0.34, FDC 79.48 +- 0.24.
"""

import ml_collections

from fdc_jax.run import base


def get_config(learner: str = "cumulative_lora") -> ml_collections.ConfigDict:
    return base.get_config("imagenet_r", learner)
