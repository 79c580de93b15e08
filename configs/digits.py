"""The embedded default: scanned digits, 5 tasks of 2 classes, a tiny encoder; no download.

python main.py --config=configs/digits.py --workdir=runs/digits
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    config = base.get_config("digits")
    config.encoder.variant = "digits"
    config.encoder.weights = "digits"
    config.encoder.image_size = 32
    config.data.crop_scale = (0.6, 1.0)
    config.data.flip = False
    return config
