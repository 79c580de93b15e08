"""The lines that end a run: one table for each contract between the user and the command."""

import re

import pytest

from fdc_jax import run_command
from fdc_jax.errors import InputError
from fdc_jax.machine import devices
from fdc_jax.run import base, configuration, seeds
from fdc_jax.run import setup as setups
from tests import small_runs
from tests.errors import input_error
from tests.small_runs import config, run

COMMAND_LINE = {
    "": "--config: expected a file, or one of best, ",
    "--config=omnibnch": "--config: expected a file, .*; found omnibnch; did you mean omnibench?",
    "--config=digits --config.trian.epochs=3": "trian.epochs: no such field; .* train.epochs?",
    "--config=digits --config.classes_per_task=five": "expected a whole number, or .*, found .five",
    "--config=digits --config.seed=1 --config.seed=2": "^--config.seed is given twice",
    "--config=digits --config.report=maybe": "^--config.report: expected true or false, ",
    "--config=digits --config.train=5": "^--config.train: no such field; did you mean train.rank?",
    "--config=digits surplus": "unexpected argument surplus",
    "--config=digits --flagfile=/dev/zero": "--flagfile=/dev/zero: expected a regular file",
    "--config=digits:cumulativ_lora": "expected one of cumulative_lora, .*; did you mean cumul",
}


@pytest.mark.parametrize("arguments", COMMAND_LINE)
def test_wrong_command_lines_are_one_line(arguments):
    with input_error(COMMAND_LINE[arguments].replace("?", r"\?")):
        run_command.configured(arguments.split())


PART = "from ml_collections import ConfigDict\n\ndef get_config():\n    return ConfigDict"
FILES_OF_CONFIGURATIONS = {
    "import nowhere": "own.py, line 1: ModuleNotFoundError: No module named 'nowhere'",
    "def get_config(:": "own.py, line 1: ",
    "def get_config():\n    return {}": "own.py: AttributeError: 'dict' object",
    "from configs import digits\n\ndef get_config():\n    config = digits.get_config()\n"
    "    config.trian = 1": 'own.py, line 5: .* "trian" does not exist and cannot be added',
    f"{PART}({{'benchmark': 'digits'}})": "own.py: expected all fields of base.get_config, ",
}


@pytest.mark.parametrize("text", FILES_OF_CONFIGURATIONS)
def test_files_of_configurations(text, tmp_path):
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(InputError, match=FILES_OF_CONFIGURATIONS[text]):
        configuration.load(str(tmp_path / "own.py"))


VALUES = {
    "train.batch_size": (-1, 10**20, 3_000_000_000),
    "train.increment_learning_rate": (0.0,),
    "train.head_learning_rate": (float("nan"),),
    "train.schedule": ("linear", "x" * 5000),
    "learner.preset": ("paper",),
    "learner.inflora.lamb": (0.0,),
    "learner.ewc_lora.fisher": ("mean",),
    "fdc.retained_energy": (1.2, 0.0),
    "classes_per_task": (-1, (3, 0, 3), "five"),
    "data.test_share": (1.0,),
    "data.crop_scale": ((1.0, 0.5), (0.5,), ("a", "b")),
    "seed": ((), (1, 1), ("one",), (-1,), (1, 2**32)),
    "class_order_seed": (-2, 2**32),
}


@pytest.mark.parametrize("field", VALUES)
def test_wrong_values_are_one_line(field):
    for value in VALUES[field]:
        config = base.get_config()
        config.update_from_flattened_dict({field: value})
        message = rf"^config\.{field}(\[\d\])?: expected .*, found .{{1,100}}$"
        with pytest.raises(InputError, match=message):
            configuration.typed(config)


SETTINGS = {
    "fdc.neighbours": (6, "config.fdc.neighbours: expected at most 5, the classes with im"),
    "classes_per_task": (11, "config.classes_per_task: expected at most the 10"),
    "encoder.weights": ("/nowhere.npz", "found no file /nowhere.npz"),
    "learner.name": ("tests.learners.grows", "must return a state like that of"),
}


@pytest.mark.parametrize("field", SETTINGS)
def test_settings_that_do_not_fit_data_weights_or_learner(field, cache, tmp_path):
    value, message = SETTINGS[field]
    with input_error(message):
        run(config(cache, **{field: value}), tmp_path / "run")
    assert (tmp_path / "run").exists() == (field == "learner.name")


def test_a_batch_that_cannot_fit_is_refused(cache, monkeypatch):
    """An image has 3,072 bytes, and 64 tokens of width 24 in 16 bits before each of 4 blocks."""
    monkeypatch.setattr(devices, "total_memory", lambda: 2**20)
    sizes = {"train.batch_size": 68, "evaluation.batch_size": 170}
    setups.build(config(cache, **sizes))
    for field, most in sizes.items():
        message = rf"^config\.{field}: expected at most {most}, as 0\.0 GiB of memory hold no more"
        with pytest.raises(InputError, match=message):
            setups.build(config(cache, **sizes | {field: most + 1}))


IMPORT = "from fdc_jax.learners import Learner"
# Mistakes in the methods of a user's own learner, by the text of the method: the exception.
METHODS = {
    "loss(self, backbone, frozen, trained, batch): return batch.weights": (
        "TypeError: Gradient only defined for scalar-output functions. Output had shape: "
    ),
    "loss(self, *arguments): return 1 / 0": "ZeroDivisionError: division by zero",
    "start_task(self, backbone, state, task, key): return {}, {'head': state.increment}": (
        "AttributeError: 'State' object has no attribute 'increment'"
    ),
    "encoder(self, backbone, state): pass": "TypeError: .* takes 3 positional arguments ",
}


@pytest.mark.parametrize("method", METHODS)
def test_error_in_a_learner_has_a_note(method, cache, tmp_path, monkeypatch):
    file = tmp_path / f"own_{list(METHODS).index(method)}.py"
    file.write_text(f"{IMPORT}\n\n\nclass Own(Learner):\n    def {method}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Exception) as caught:
        seeds.run(config(cache, learner__name=file.stem), str(tmp_path / "run"))
    error = caught.value
    assert re.match(METHODS[method], f"{type(error).__name__}: {error}")
    hook = method.partition("(")[0]
    (note,) = [note for note in error.__notes__ if note.startswith("learner: Own.")]
    assert note.startswith(f"learner: Own.{hook} in {file}, line 5")
    assert f"; expected {hook}(self, backbone, " in note


OTHER_RUNS = {
    "of another configuration: train.rank was 10, is 3;": dict(train__rank=3),
    "fdc.attenuation was 0.5, is 0.25;.*posthoc ": dict(fdc__attenuation=0.25),
    "another configuration: other weights; choose": dict(encoder__weights="weights.npz"),
    "holds a run of a single seed; choose another --workdir": dict(seed=(1, 2)),
}


@pytest.mark.parametrize("message", OTHER_RUNS)
def test_work_directories_of_other_runs(message, finished_run, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_runs.other_weights(tmp_path)
    copy = small_runs.copied(finished_run, tmp_path / "copy")
    before = small_runs.contents(copy)
    with pytest.raises(InputError, match=message):
        run(config(cache, **OTHER_RUNS[message]), copy)
    assert small_runs.contents(copy) == before


def test_work_directories_that_hold_no_single_run(cache, tmp_path):
    (tmp_path / "seed_1").mkdir()
    with pytest.raises(InputError, match="holds runs of several seeds; choose another --workdir"):
        run(config(cache), tmp_path)
