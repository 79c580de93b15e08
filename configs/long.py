r"""Long streams: CIFAR-100 in 50 tasks of 2 classes, or any folder of images in as many as it has.

    python main.py --config=configs/long.py
    python main.py --config=configs/long.py --config.classes_per_task=5
    python main.py --config=configs/own.py --config.data.source=photos \
        --config.classes_per_task=2 --config.evaluation.every=10

The second has 20 tasks, the third as many as a folder's classes make. A list says the classes of
each task. With one class a task a learner's cross-entropy over the task's own classes is zero
whatever it does: nothing is trained by it, and calibrators find the classes from statistics alone.
The run is evaluated after every tenth task and after the last one.
"""

import ml_collections

from fdc_jax.run import base


def get_config(learner: str = "cumulative_lora") -> ml_collections.ConfigDict:
    config = base.get_config("cifar100", learner)
    config.classes_per_task = 2
    config.evaluation.every = 10
    return config
