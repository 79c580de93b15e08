"""Declarations of learners: options and defaults, and the search for a learner by name."""

import dataclasses
import inspect
import py_compile
import re
import sys
import types
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
from msgspec import Meta

from fdc_jax import learners
from fdc_jax.errors import InputError
from fdc_jax.learners import Learner, training
from fdc_jax.model import vit
from fdc_jax.run import base, configuration


@pytest.mark.parametrize("benchmark", ["digits", "cifar100", "imagenet_r"])
def test_no_default_is_a_departure(benchmark):
    """Also where a benchmark has its own; two of the authors' values tell that it does."""
    flat = configuration.flatten(configuration.load(benchmark))
    for name in learners.names():
        assert learners.deviations(name, flat) == []
    assert flat["learner.inflora.lamb"] == (0.95 if benchmark == "cifar100" else 0.98)
    assert flat["learner.loda.look_ahead"] == (0.7 if benchmark == "imagenet_r" else 0.3)


@dataclasses.dataclass(frozen=True)
class Mine(Learner):
    reach: Annotated[float, Meta(gt=0, le=1, description="how far")] = 0.5


class Undecorated(Learner):
    reach: Annotated[float, Meta(gt=0, description="how far")] = 0.5


@dataclasses.dataclass(frozen=True)
class NoDefault(Learner):
    reach: float


@dataclasses.dataclass(frozen=True)
class DefaultOutOfRange(Learner):
    reach: Annotated[float, Meta(gt=0, description="how far")] = 0.0


def in_module(monkeypatch, name, learner):
    """Puts a learner where `name` is imported from."""
    module = types.ModuleType(name)
    module.Single = type(learner.__name__, (learner,), {**vars(learner), "__module__": name})
    monkeypatch.setitem(sys.modules, name, module)


def test_a_users_learner_has_options(monkeypatch):
    in_module(monkeypatch, "mine.own", Mine)
    config = base.get_config(learner="mine.own")
    assert configuration.typed(config).learner.own.reach == 0.5
    assert learners.title("mine.own") == "mine.own"
    assert learners.deviations("mine.own", {"learner.own.reach": 2.0}) == ["reach 2"]
    config.learner.own.reach = 2.0
    with pytest.raises(InputError, match=r"own\.reach: expected a number <= 1"):
        configuration.typed(config)


@pytest.mark.parametrize(
    ("name", "learner", "message"),
    [
        ("mine.loda", Mine, "expected a file with a name of its own, found loda"),
        ("mine.own", object, "expected a class derived from Learner, found none"),
        ("mine.own", Undecorated, r"options: .* with @dataclasses\.dataclass\("),
        ("mine.own", NoDefault, "options: expected a default of reach, found none"),
        ("mine.own", DefaultOutOfRange, "reach: expected a number > 0.0, found 0.0"),
    ],
)
def test_other_modules_are_refused(monkeypatch, name, learner, message):
    in_module(monkeypatch, name, learner)
    with pytest.raises(InputError, match=f"learner.name: {name}: {message}"):
        learners.find(name)


def test_parts_without_a_learning_rate_are_named():
    with pytest.raises(InputError, match=r"the parts biases; expected .*: increment, head$"):
        training.descend({"biases": 0.0}, {"biases": 0.0}, {"increment": 1.0, "head": 1.0}, 1.0)


def test_parameters_of_another_form_are_named():
    with pytest.raises(InputError, match=r"^encoder: expected .*, found cls, embedding$"):
        vit.encode(None, {}, np.zeros((1, 8, 8, 3), np.uint8), {"cls": 0.0, "embedding": 0.0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text = 'Mine'\n\nvalue = 1 / 0\n", "line 3: ZeroDivisionError: division"),
        ("text = (\n", "line 1: '.' was never closed"),
        ("import beside_it\n", "line 1: ModuleNotFoundError"),
    ],
)
def test_an_error_in_a_users_file_names_its_line(tmp_path, monkeypatch, text, message):
    """A learner's file imports nothing that is beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_it.py").write_text("")
    (tmp_path / "of_a_user.py").write_text(text)
    with pytest.raises(InputError, match=rf"learner.name: of_a_user: .*user.py, {message}"):
        learners.find("of_a_user")
    assert "of_a_user" not in sys.modules


PROBE = """
from fdc_jax.learners import Learner
class Probe(Learner):
    title = "Probe {}"
"""


@pytest.fixture
def forgotten():
    """Removes the modules that a test loads."""
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["probe_of_a_user", "probes_of_a_user.linear"])
def test_a_learner_is_loaded_from_its_file(name, tmp_path, monkeypatch, forgotten):
    """Bytecode beside it is not run."""
    file = (tmp_path / name.replace(".", "/")).with_suffix(".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(PROBE.format("other"))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(file), invalidation_mode=mode)
    file.write_text(PROBE.format(1))
    monkeypatch.chdir(tmp_path)
    assert learners.find(name).title == learners.title(name) == "Probe 1"
    with pytest.raises(InputError, match=f"did you mean {name}"):
        learners.find(str(file.relative_to(tmp_path)))


def test_a_missing_learner_names_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, file in (("", ""), ("..", ""), ("absent.probe", tmp_path / "absent/probe.py")):
        with pytest.raises(InputError, match=rf"name: expected one of cumulative_lora.*{file}"):
            learners.find(name)


def test_two_files_of_one_name_are_refused(tmp_path, monkeypatch, forgotten):
    for folder in ("installed", "current"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "of_both.py").write_text(PROBE.format(folder))
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.chdir(tmp_path / "current")
    with pytest.raises(InputError, match=r"of_both: expected one file, found .*installed.* and "):
        learners.find("of_both")
    monkeypatch.chdir(tmp_path)
    assert learners.find("of_both").title == "Probe installed"


def test_the_page_lists_the_methods():
    page = (Path(__file__).parents[2] / "docs" / "learners.md").read_text()
    methods = re.findall(r"\| `(\w+)\((.*)\)` \|", page)
    assert len(methods) == 8
    for name, given in methods:
        declared = inspect.signature(getattr(Learner, name)).parameters.values()
        required = [p.name for p in declared if p.default is p.empty]
        assert given.split(", ") == required, name
