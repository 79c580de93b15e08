"""The authors' epochs and batch sizes, as the learners' docstrings give them to be copied."""

import importlib
import re

import pytest

from fdc_jax import configuration, learners

PUBLISHED = {
    "inflora": {"cifar100": (20, 128), "imagenet_r": (50, 128), "imagenet_a": (20, 128)},
    "inflora_ca": {"imagenet_r": (50, None)},
    "splitlora": {"cifar100": (100, 256), "imagenet_r": (100, 256)},
    "ewc_lora": {"cifar100": (20, 128), "imagenet_r": (50, 128), "imagenet_a": (20, 128)},
    "sd_lora": {"cifar100": (20, 128), "imagenet_r": (20, 128), "imagenet_a": (20, 128)},
    "lora_subtraction": {"cifar100": (20, 128), "imagenet_r": (50, 128), "cub200": (20, 128)},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_flags_of_the_authors_runs(name):
    rows = re.findall(r"^    (\w+) +(--config\..*)$", learners.find(name).__doc__, re.MULTILINE)
    found = {}
    for benchmark, flags in rows:
        config = importlib.import_module(f"configs.{benchmark}").get_config()
        assert config.benchmark == benchmark
        given = dict(flag.removeprefix("--config.").split("=") for flag in flags.split())
        assert given.keys() <= {"train.epochs", "train.batch_size"}
        config.update_from_flattened_dict({field: int(text) for field, text in given.items()})
        config.learner.name, config.learner.preset = name, "native"
        configuration.validate(config)
        found[benchmark] = (
            config.train.epochs,
            config.train.batch_size if "train.batch_size" in given else None,
        )
    assert found == PUBLISHED[name]
