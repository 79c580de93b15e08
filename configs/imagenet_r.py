"""ImageNet-R, PILOT's split: 10 tasks of 20 classes, 24,000 training and 6,000 test images.

    python main.py --config=configs/imagenet_r.py --workdir=runs/imagenet_r --config.seed=1,2,3

Final accuracy of Cumulative-LoRA in the paper, percent, three seeds:
raw 75.91 +- 0.34, FDC 79.48 +- 0.24.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    config = base.get_config()
    config.benchmark = "imagenet_r"
    config.learner.lora_subtraction.triplet_weight = 0.2  # the authors'
    config.learner.lora_subtraction.margin = 2.0  # likewise
    config.learner.loda.margin = 0.1  # the authors'
    config.learner.loda.look_ahead = 0.7  # likewise
    return config
