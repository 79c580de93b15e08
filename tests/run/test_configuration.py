"""Configurations as flat fields: saved, completed and compared."""

from fdc_jax.run import base, configuration
from fdc_jax.run.config import Config


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
