"""Images of your own: a folder or an archive, tasks of two classes unless you say otherwise.

    python main.py --config=configs/own.py --config.data.source=photos

The classes arrive in the order of their names. Those that you put into the folder later are learned
by the same command, as further tasks.
"""

import ml_collections

from fdc_jax.run import base


def get_config() -> ml_collections.ConfigDict:
    config = base.get_config("")
    config.class_order_seed = -1
    config.classes_per_task = 2
    config.data.test_share = 0.2
    return config
