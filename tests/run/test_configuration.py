"""Configurations: every field is checked before work begins."""

import typing

import pytest

from fdc_jax import run_command
from fdc_jax.learners import training
from fdc_jax.model import vit
from fdc_jax.run import base, configuration
from fdc_jax.run.config import Config, fields

CHOICES = {
    "precision": vit.PRECISIONS,
    "data.input_range": (*vit.INPUT_RANGES, "model"),
    "encoder.attention": vit.ATTENTIONS,
    "train.schedule": training.SCHEDULES,
}


@pytest.mark.parametrize("field", CHOICES)
def test_choices_are_the_names_that_the_code_knows(field):
    kind = Config
    for name in field.split("."):
        kind = typing.get_type_hints(kind)[name]
    assert typing.get_args(kind) == tuple(CHOICES[field])


def test_every_field_has_a_description():
    silent = [name for name, metas in fields() if not any(meta.description for meta in metas)]
    assert silent == []


HELP = """
train.epochs=0  # 0: chosen by
data.test_share=0.2  # to hold out
learner.name=inflora  # see the README
learner.inflora.lamb=0.98  # share of energy to protect at the first task; > 0; <= 1
data.crop_scale=0.05,1.0  # share of the image
"""


def test_help_shows_the_values_of_the_named_configuration():
    assert "  --config.train.epochs=20  # 0: chosen by the number" in run_command.usage()
    usage = run_command.usage(configuration.load("own:inflora"))
    for line in HELP.split("\n")[1:-1]:
        assert f"\n  --config.{line}" in usage


def test_settings_survive_flattening_with_options_of_all_learners():
    config = configuration.typed(configuration.load("cifar100:inflora"))
    changed = configuration.changed(config, train={"epochs": 3})
    assert (changed.learner.inflora.lamb, changed.train.epochs) == (0.95, 3)
    assert configuration.of_fields(configuration.flatten(changed)) == changed


def test_completed_settings_ignore_the_host():
    saved = {"benchmark": "cifar100", "train.rank": 3, "train.gone": 1, "learner.mine.x": 2.0}
    saved |= {"data.source": "/etc", "learner.name": "mine", "learner.mine.y": [1]}
    config, options = configuration.completed(saved)
    expected = configuration.flatten(base.get_config("cifar100"))
    assert configuration.flatten(config) == expected | {"train.rank": 3, "learner.name": "mine"}
    assert options == {"learner.mine.x": 2.0}


def test_differences_name_fields_that_change_results_only():
    saved = configuration.flatten(Config()) | {"weights": "a"}
    same = saved | {"data.dir": "/elsewhere", "data.workers": 3}
    assert configuration.differences(saved, same) == {}
    new = saved | {"train.epochs": 5, "seed": [2], "weights": "b"}
    assert configuration.differences(saved, new) == {
        "seed": "seed was [1], is [2]",
        "train.epochs": "train.epochs was 20, is 5",
        "weights": "weights was 'a', is 'b'",
    }
    earlier = {name: value for name, value in saved.items() if name != "train.rank"}
    assert configuration.differences(earlier, saved).keys() == {"train.rank"}
