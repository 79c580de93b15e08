"""What learners declare: their options, defaults and authors' runs, and how one is found."""

import importlib
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from fdc_jax import learners
from fdc_jax.errors import InputError
from fdc_jax.learners import Option, check_state
from fdc_jax.run import configuration

NAN = float("nan")
IMPOSSIBLE = {
    "inflora": {"lamb": (0.0, 1.1), "lame": (0.5,)},
    "inflora_ca": dict.fromkeys(("epochs", "samples_per_class", "batch_size"), (0,))
    | dict.fromkeys(("learning_rate", "ridge"), (0.0,))
    | {"schedule": ("linear",), "mean_scale": (-0.1,), "logit_temperature": (-0.1,)},
    "splitlora": {"alpha": (0.0,), "loss_temperature": (-1.0,)},
    "ewc_lora": dict.fromkeys(("fisher", "head_input", "folding"), ("none",))
    | {"strength": (-1.0,), "accumulation": (-1.0, NAN), "images_at_once": (0,)},
    "sd_lora": {"magnitude": (-1.0,), "head_start": ("zero",)},
    "lora_subtraction": {"triplet_weight": (-0.1,), "margin": (NAN,), "energy": (0.0, 1.1)},
    "loda": dict.fromkeys(("general_scale", "isolated_scale", "margin", "look_ahead"), (-0.1,))
    | {"merge_gamma": (0.0,), "scale": (0.0,)},
    "rsiat": dict.fromkeys(("bottleneck", "projector_width", "calibration_epochs"), (0,))
    | dict.fromkeys(("scale", "drift_width", "ridge"), (0.0,))
    | dict.fromkeys(("margin", "steering_weight", "alignment_weight"), (-1.0,))
    | dict.fromkeys(("separation_threshold", "repulsion_weight"), (NAN,))
    | {"dropout": (1.0, -0.1), "warm_up_epochs": (-1,), "projector_learning_rate": (-1e-3,)}
    | {"calibration_optimizer": ("lion",), "mean_scale": (1.5,)},
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_settings_are_named(name):
    for field, values in IMPOSSIBLE[name].items():
        for value in values:
            config = base.get_config()
            configuration.validate(config)
            config.learner[name][field] = value
            message = rf"^config\.learner\.{name}\.{field}: expected .*, found "
            with pytest.raises(InputError, match=message):
                configuration.validate(config)


@pytest.mark.parametrize("benchmark", ["digits", "cifar100", "imagenet_r", "omnibench"])
def test_no_default_is_a_departure(benchmark):
    """Also where a benchmark has its own; two of the authors' values tell that it does."""
    flat = configuration.flatten(importlib.import_module(f"configs.{benchmark}").get_config())
    for name in learners.names():
        assert learners.deviations(name, flat) == []
    assert flat["learner.inflora.lamb"] == (0.95 if benchmark == "cifar100" else 0.98)
    assert flat["learner.loda.look_ahead"] == (0.7 if benchmark == "imagenet_r" else 0.3)


# Some of what the authors set in their own runs.
BESIDE = {
    ("inflora_ca", "imagenet_r"): {"learner.inflora.lamb": 0.95},
    ("ewc_lora", "cifar100"): {
        "learner.ewc_lora.fisher": "batch_mean",
        "learner.ewc_lora.folding": "factors",
    },
    ("sd_lora", "imagenet_a"): {"learner.sd_lora.head_start": "zero_bias"},
    ("splitlora", "cifar100"): {"train.epochs": 100, "train.batch_size": 256},
    ("lora_subtraction", "imagenet_r"): {"train.first_epochs": 40, "train.epochs": 50},
    ("rsiat", "cub200"): {
        "train.first_epochs": 20,
        "learner.rsiat.scale": 20.0,
        "learner.rsiat.warm_up_epochs": 9,
        "learner.rsiat.separation_threshold": 0.5,
        "learner.rsiat.repulsion_weight": 0.75,
        "learner.rsiat.projector_width": 768,
    },
}


def test_settings_of_the_authors_runs():
    """They are valid, of the types of the fields, and set what the table says."""
    published = set()
    for benchmark in ("cifar100", "imagenet_r", "imagenet_a", "cub200", "omnibench"):
        for name in learners.names():
            settings = getattr(learners.find(name), "AUTHORS_RUNS", {}).get(benchmark)
            if settings is None:
                continue
            config = importlib.import_module(f"configs.{benchmark}").get_config()
            default = configuration.flatten(config)
            changed = {"learner.name": name, "learner.preset": "native"}
            for field, value in settings.items():
                full = field if "." in field else f"learner.{name}.{field}"
                assert type(value) is type(default[full]), full
                changed[full] = value
            config.update_from_flattened_dict(changed)
            configuration.validate(config)
            assert BESIDE.get((name, benchmark), {}).items() <= changed.items()
            published.add((name, benchmark))
    assert published > BESIDE.keys() and len(published) == 25


def test_departures_are_said_in_words():
    flat = configuration.flatten(base.get_config())
    flat |= {"learner.loda.alignment": False, "learner.loda.merge_gamma": 2.5}
    assert learners.deviations("loda", flat) == ["merge gamma 2.5", "alignment off"]
    flat |= {"learner.inflora.lamb": 0.9}
    # InfLoRA+CA reads InfLoRA's options, too; other learners' are nothing to it.
    assert learners.deviations("inflora_ca", flat) == ["lamb 0.9"]
    assert learners.deviations("splitlora", flat) == []


# How one is found ---------------------------------------------------------------------------------


def test_find_refuses_what_is_no_learner():
    for name in learners.names():
        assert learners.find(name).TITLE == learners.title(name)
    with pytest.raises(InputError, match=r"learner.name: .*'no_such_learner'"):
        learners.find("no_such_learner")
    with pytest.raises(InputError, match="module 'json' is no learner: it declares no TITLE"):
        learners.find("json")


def test_declarations_that_cannot_be_are_refused(monkeypatch):
    for name, options, message in (
        ("mine.loda", {}, "mine.loda: loda is taken; call the file otherwise"),
        ("mine.own", {"reach": 0.5}, r"own: OPTIONS: reach: expected Option\(default, allowed"),
        ("mine.own", {"reach": Option(0.5, "0..1")}, "expected an interval such as '\\(0, 1]'"),
    ):
        module = types.ModuleType(name)
        module.TITLE, module.OPTIONS = "Mine", options
        monkeypatch.setitem(sys.modules, name, module)
        config = base.get_config()
        config.learner.name = name
        with pytest.raises(InputError, match=message):
            configuration.validate(config)


def test_an_error_in_a_users_file_is_placed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text, message in (
        ("of_the_user", "TITLE = 'Mine'\n\nvalue = 1 / 0\n", "line 3: ZeroDivisionError: division"),
        ("misspelt_by_the_user", "TITLE = (\n", "line 1: '.' was never closed"),
        ("imports_what_is_not_there", "import not_there\n", "line 1: ModuleNotFoundError"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(InputError, match=rf"learner.name: {name}: .*{name}.py, {message}"):
            learners.find(name)


def test_what_an_outside_learner_leaves_out_is_answered_as_by_cumulative_lora(monkeypatch):
    module = types.ModuleType("mine.of_the_tests")
    module.TITLE, module.OPTIONS = "Mine", {"reach": Option(0.5, "(0, 1]", "how far")}
    module.heads = lambda setup, state, num_tasks: []
    monkeypatch.setitem(sys.modules, "mine.of_the_tests", module)
    found, default = learners.find("mine.of_the_tests"), learners.find("cumulative_lora")
    assert found.heads is module.heads and found.after_task is default.after_task
    assert learners.title("mine.of_the_tests") == "Mine"
    config = base.get_config()
    config.learner.name = "mine.of_the_tests"
    configuration.validate(config)
    assert config.learner.of_the_tests.reach == 0.5
    config.learner.of_the_tests.reach = 2.0
    flat = configuration.flatten(config)
    assert learners.deviations("mine.of_the_tests", flat) == ["reach 2"]
    with pytest.raises(InputError, match=r"of_the_tests\.reach: expected a number in \(0, 1\]"):
        configuration.validate(config)


# States -------------------------------------------------------------------------------------------

STATE = {"heads": jnp.zeros((3, 4)), "host": np.zeros(2, np.float32)}


@pytest.mark.parametrize(
    ("state", "found"),
    [
        (None, r"expected float32\[3, 4\] at \['heads'\], found nothing"),
        (STATE | {"heads": jnp.zeros((4, 4))}, r"found float32\[4, 4\]"),
        (STATE | {"heads": jnp.zeros((3, 4), int)}, r"found int32\[3, 4\]"),
        (STATE | {"more": 0.0}, r"expected nothing at \['more'\], found float32\[\]"),
    ],
)
def test_another_state_is_named(state, found):
    with pytest.raises(InputError, match=rf"^learner.name: mine: after_task must return .*{found}"):
        check_state("mine", "after_task", STATE, state)
