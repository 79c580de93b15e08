"""CUB-200, PILOT's split: 20 tasks of 10 classes, 9,430 training and 2,358 test images.

    python main.py --config=configs/cub200.py --workdir=runs/cub200 --config.seed=1,2,3

Final accuracy of Cumulative-LoRA in the paper, percent, three seeds:
raw 73.55 +- 1.70, FDC 84.44 +- 0.26.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    config = base.get_config()
    config.benchmark = "cub200"
    config.learner.lora_subtraction.triplet_weight = 0.2  # the authors'
    config.learner.lora_subtraction.margin = 1.0  # likewise
    config.learner.loda.margin = 0.1  # the authors'
    return config
