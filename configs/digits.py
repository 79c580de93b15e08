"""The embedded default: scanned digits, 5 tasks of 2 classes, a tiny encoder; no download.

    python main.py --config=configs/digits.py --config.seed=1,2,3

Final accuracy of Cumulative-LoRA on two CPU cores, percent, three seeds:
raw 72.76 +- 5.70, FDC 93.18 +- 0.39.
"""

import ml_collections

from fdc_jax.run import base


def get_config(learner: str = "cumulative_lora") -> ml_collections.ConfigDict:
    config = base.get_config("digits", learner)
    config.encoder.variant = "digits"
    config.encoder.weights = "digits"
    config.encoder.image_size = 32
    config.data.crop_scale = (0.6, 1.0)
    config.data.flip = False
    return config
