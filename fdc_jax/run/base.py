"""The start of every configuration, `configs/*.py` and those of users: `get_config`."""

from typing import Any

import ml_collections
import msgspec
from ml_collections import config_dict

from fdc_jax import learners
from fdc_jax.run.config import type_for


def get_config(
    benchmark: str = "cifar100", learner: str = "cumulative_lora"
) -> ml_collections.ConfigDict:
    """Returns the settings of a learner on a benchmark, with the options of all learners.

    The learner is one of the package, or a module outside of it, by its dotted name.

    Raises:
        InputError: there is no such learner.
    """
    kind = type_for(learners.find(learner), benchmark)
    config: Any = ml_collections.ConfigDict(msgspec.to_builtins(kind()))
    config.benchmark, config.learner.name = benchmark, learner
    # A number, or a list of numbers.
    config.classes_per_task = config_dict.FieldReference(0, field_type=object)
    config.lock()
    return config
