"""Configurations: every field is checked before work begins."""

import importlib
import re

import pytest

from fdc_jax import command
from fdc_jax.data import benchmarks as stream
from fdc_jax.run import configuration
from fdc_jax.run.config import Config

BENCHMARKS = ("cifar100", "imagenet_a", "imagenet_r", "cub200", "omnibench", "digits")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_shipped_configurations_are_valid(name):
    config = configuration.typed(configuration.load(name))
    assert config.benchmark == name


def test_the_streams_of_omnibenchmark_1k_have_as_many_tasks_as_its_file_says():
    module = importlib.import_module("configs.omnibench1k")
    config = configuration.typed(module.get_config())
    assert config.class_order_seed == stream.REFERENCE_CLASS_ORDER_SEED
    sizes = [config.classes_per_task]
    for line in re.findall("classes_per_task=(.*)", module.__doc__):
        made = re.sub(r"\$\(printf '(.*)%.0s' \{1\.\.(\d+)\}\)", lambda m: m[1] * int(m[2]), line)
        words = ["--config=omnibench1k", f"--config.classes_per_task={made}"]
        sizes.append(command.configured(words).classes_per_task)
    of = [len(stream.task_sizes("omnibench1k", 1000, each)) for each in sizes]
    assert of == [100, 200, 151, 301]


def test_differences_name_fields_that_change_results_only():
    saved = configuration.flatten(Config()) | {"weights": "a"}

    def found(**fields):
        named = {name.replace("__", "."): value for name, value in fields.items()}
        return configuration.differences(saved, saved | named)

    assert found() == found(data__dir="/elsewhere", data__workers=3) == {}
    assert found(train__epochs=5, seed=[2], weights="b") == {
        "seed": "seed was [1], is [2]",
        "train.epochs": "train.epochs was 20, is 5",
        "weights": "weights was 'a', is 'b'",
    }
    of_before = {name: value for name, value in saved.items() if name != "train.rank"}
    assert configuration.differences(of_before, saved).keys() == {"train.rank"}
