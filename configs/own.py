"""Images of your own: a folder or an archive; the first lines of a run say what was chosen.

    python main.py --config=configs/own.py --config.data.source=photos

The classes arrive in the order of their names, a fifth of them a task unless you say otherwise.
Pixels are as the encoder's file states them, 20 % of each class are for testing, and the number of
epochs follows from that of images. Classes that you put into the folder later are learned
by the same command, as further tasks.
"""

import ml_collections

from fdc_jax.run import base


def get_config(learner: str = "cumulative_lora") -> ml_collections.ConfigDict:
    config = base.get_config("", learner)
    config.class_order_seed = -1
    config.data.test_share = 0.2
    config.data.input_range = "model"
    config.train.epochs = 0
    config.untrained = True
    return config
