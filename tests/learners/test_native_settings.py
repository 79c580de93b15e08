"""The authors' settings that no preset has, as the learners' docstrings give them to be copied."""

import importlib
import re

import pytest

from fdc_jax import configuration, learners

# Epochs, and the batch size where one is published.
PUBLISHED = {
    "inflora": {"cifar100": (20, 128), "imagenet_r": (50, 128), "imagenet_a": (20, 128)},
    "inflora_ca": {"imagenet_r": (50, None)},
    "splitlora": {"cifar100": (100, 256), "imagenet_r": (100, 256)},
    "ewc_lora": {"cifar100": (20, 128), "imagenet_r": (50, 128), "imagenet_a": (20, 128)},
    "sd_lora": {"cifar100": (20, 128), "imagenet_r": (20, 128), "imagenet_a": (20, 128)},
    "lora_subtraction": {"cifar100": (20, 128), "imagenet_r": (50, 128), "cub200": (20, 128)},
}
BESIDE = {
    "inflora_ca": {"learner.inflora.lamb": 0.95},
    "ewc_lora": {"learner.ewc_lora.fisher": "batch_mean", "learner.ewc_lora.folding": "factors"},
    "sd_lora": {"learner.sd_lora.head_start": "zero_bias"},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_flags_of_the_authors_runs(name):
    """Flags in the line of a benchmark are for it, others for all."""
    documented = learners.find(name).__doc__
    rows = dict(re.findall(r"^    (\w+) +(--config\..*)$", documented, re.MULTILINE))
    everywhere = re.findall(r"^(?!    \w+ ).*?((?:--config\.\S+=\S+ ?)+)", documented, re.MULTILINE)
    found, beside = {}, []
    for benchmark, flags in rows.items():
        config = importlib.import_module(f"configs.{benchmark}").get_config()
        assert config.benchmark == benchmark
        given = dict(
            flag.removeprefix("--config.").rstrip(":,.").split("=")
            for flag in " ".join([flags, *everywhere]).split()
        )
        flat = configuration.flatten(config)
        changed = {field: type(flat[field])(text) for field, text in given.items()}
        config.update_from_flattened_dict(changed)
        config.learner.name, config.learner.preset = name, "native"
        configuration.validate(config)
        found[benchmark] = (changed.pop("train.epochs"), changed.pop("train.batch_size", None))
        beside.append(changed)
    assert found == PUBLISHED[name]
    assert beside == [BESIDE.get(name, {})] * len(rows)
