"""CUB-200, PILOT's split: 20 tasks of 10 classes, 9,430 training and 2,358 test images.

    python main.py --config=configs/cub200.py --config.data.source=cub.zip --config.seed=1,2,3

Final accuracy of Cumulative-LoRA in the paper, percent, three seeds:
raw 73.55 +- 1.70, FDC 84.44 +- 0.26.
"""

import ml_collections

from fdc_jax.run import base


def get_config(learner: str = "cumulative_lora") -> ml_collections.ConfigDict:
    return base.get_config("cub200", learner)
