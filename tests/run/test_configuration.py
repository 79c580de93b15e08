"""Configurations: every field is checked before work begins."""

import importlib
import re

import pytest

from fdc_jax import command
from fdc_jax.data import benchmarks as stream
from fdc_jax.errors import InputError
from fdc_jax.run import base, configuration

BENCHMARKS = ("cifar100", "imagenet_a", "imagenet_r", "cub200", "omnibench", "digits")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_shipped_configurations_are_valid(name):
    config = importlib.import_module(f"configs.{name}").get_config()
    configuration.validate(config)
    assert config.benchmark == name


def test_the_streams_of_omnibenchmark_1k_have_as_many_tasks_as_its_file_says():
    module = importlib.import_module("configs.omnibench1k")
    config = module.get_config()
    configuration.validate(config)
    assert config.class_order_seed == stream.REFERENCE_CLASS_ORDER_SEED
    sizes = [config.classes_per_task]
    for line in re.findall("classes_per_task=(.*)", module.__doc__):
        made = re.sub(r"\$\(printf '(.*)%.0s' \{1\.\.(\d+)\}\)", lambda m: m[1] * int(m[2]), line)
        words = ["--config=omnibench1k", f"--config.classes_per_task={made}"]
        sizes.append(command.configured(words).classes_per_task)
    of = [len(stream.task_sizes("omnibench1k", 1000, each)) for each in sizes]
    assert of == [100, 200, 151, 301]


IMPOSSIBLE = {
    "train.rank": (0,),
    "train.epochs": (-1,),
    "train.batch_size": (-1,),
    "evaluation.every": (0,),
    "train.increment_learning_rate": (0.0,),
    "train.head_learning_rate": (float("nan"),),
    "train.schedule": ("linear",),
    "learner.preset": ("paper",),
    "learner.inflora.lamb": (0.0,),
    "learner.rsiat.projector_width": (0,),
    "learner.ewc_lora.fisher": ("mean",),
    "learner.ewc_lora.strength": (float("nan"),),
    "fdc.retained_energy": (1.2, 0.0),
    "classes_per_task": (-1, (3, 0, 3), "five"),
    "data.train_per_class": (-1,),
    "data.test_share": (1.0,),
    "data.crop_scale": ((1.0, 0.5), (0.5,), ("a", "b")),
    "checkpoint.keep": (0,),
    "seed": ((), (1, 1), ("one",), (-1,), (1, 2**32)),
    "class_order_seed": (-2, 2**32),
    "evaluation.batch_size": (0,),
}


@pytest.mark.parametrize("field", IMPOSSIBLE)
def test_impossible_values_are_named(field):
    for value in IMPOSSIBLE[field]:
        config = base.get_config()
        config.update_from_flattened_dict({field: value})
        with pytest.raises(InputError, match=rf"^config\.{field}: expected .*, found "):
            configuration.validate(config)


def test_differences_name_fields_that_change_results_only():
    saved = configuration.flatten(base.get_config()) | {"weights": "a"}

    def found(**fields):
        named = {name.replace("__", "."): value for name, value in fields.items()}
        return configuration.differences(saved, saved | named)

    assert found() == found(data__dir="/elsewhere", data__workers=3) == []
    changed = found(train__epochs=5, seed=[2], weights="b")
    assert changed == [("seed", [1], [2]), ("train.epochs", 20, 5), ("weights", "a", "b")]
    of_before = {name: value for name, value in saved.items() if name != "train.rank"}
    assert configuration.differences(of_before, saved) == [("train.rank", None, 10)]
