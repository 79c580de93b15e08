r"""OmniBenchmark, PILOT's split: 10 tasks of 30 classes, 89,697 training and 5,985 test images.

    python main.py --config=configs/omnibench.py --config.data.source=omnibenchmark.zip \
        --config.seed=1,2,3

Final accuracy of Cumulative-LoRA in the paper, percent, three seeds:
raw 67.15 +- 0.21, FDC 73.49 +- 0.39.
"""

import ml_collections

from fdc_jax.run import base


def get_config(learner: str = "cumulative_lora") -> ml_collections.ConfigDict:
    return base.get_config("omnibench", learner)
