"""Declarations of learners: options and defaults, and the search for a learner by name."""

import dataclasses
import inspect
import py_compile
import re
import sys
import types
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import scipy
from msgspec import Meta

from fdc_jax import learners
from fdc_jax.data.benchmarks import BENCHMARKS
from fdc_jax.errors import InputError
from fdc_jax.learners import Learner, check_state, training
from fdc_jax.model import vit
from fdc_jax.run import base, configuration
from tests.learners import toy


def test_ranges_hold_every_default():
    for name in learners.names():
        learner = learners.find(name)
        for benchmark in ("", *BENCHMARKS):
            options = learners.default_options(name, benchmark)
            converted = msgspec.convert(options, learner.options())
            assert msgspec.to_builtins(converted) == options


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


@dataclasses.dataclass(frozen=True)
class NoDescription(Learner):
    reach: Annotated[float, Meta(gt=0)] = 0.5


@dataclasses.dataclass(frozen=True)
class UnknownType(Learner):
    reach: "Nothing" = 0.5


def in_module(monkeypatch, name, learner=None):
    """Puts a learner where `name` is imported from."""
    module = types.ModuleType(name)
    if learner is not None:
        module.Single = type(learner.__name__, (learner,), {**vars(learner), "__module__": name})
    monkeypatch.setitem(sys.modules, name, module)


def test_a_users_learner_has_options(monkeypatch):
    in_module(monkeypatch, "mine.of_the_tests", Mine)
    config = base.get_config()
    config.learner.name = "mine.of_the_tests"
    assert configuration.typed(config).learner.of_the_tests.reach == 0.5
    assert learners.title("mine.of_the_tests") == "mine.of_the_tests"
    flat = {"learner.of_the_tests.reach": 2.0}
    assert learners.deviations("mine.of_the_tests", flat) == ["reach 2"]
    config = base.get_config(learner="mine.of_the_tests")
    config.learner.of_the_tests.reach = 2.0
    with pytest.raises(InputError, match=r"of_the_tests\.reach: expected a number <= 1"):
        configuration.typed(config)


@pytest.mark.parametrize(
    ("name", "learner", "message"),
    [
        ("no_such_learner", None, "expected one of cumulative_lora, .* found 'no_such_learner'"),
        ("json", None, "json: expected a class derived from Learner, found none"),
        ("mine.loda", Mine, "mine.loda: expected a file with a name of its own, found loda"),
        ("mine.own", Undecorated, r"mine.own: options: .* with @dataclasses\.dataclass\("),
        ("mine.own", NoDefault, "mine.own: options: expected a default of reach, found none"),
        ("mine.own", NoDescription, r"mine.own: options: expected reach: .* found no description"),
        ("mine.own", DefaultOutOfRange, "mine.own: reach: expected a number > 0.0, found 0.0"),
        ("mine.own", UnknownType, "mine.own: options: name 'Nothing' is not defined"),
    ],
)
def test_other_modules_are_refused(monkeypatch, name, learner, message):
    if learner is not None:
        in_module(monkeypatch, name, learner)
    with pytest.raises(InputError, match=f"learner.name: {message}"):
        learners.find(name)


def test_parts_without_a_learning_rate_are_named():
    with pytest.raises(InputError, match=r"the parts biases; expected .*: increment, head$"):
        training.descend({"biases": 0.0}, {"biases": 0.0}, {"increment": 1.0, "head": 1.0}, 1.0)


def test_parameters_of_another_form_are_named():
    with pytest.raises(InputError, match=r"^encoder: expected .*, found cls, embedding$"):
        vit.encode(None, {}, np.zeros((1, 8, 8, 3), np.uint8), {"cls": 0.0, "embedding": 0.0})


def test_an_error_in_a_users_file_names_its_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text, message in (
        ("of_the_user", "text = 'Mine'\n\nvalue = 1 / 0\n", "line 3: ZeroDivisionError: division"),
        ("misspelt_by_the_user", "text = (\n", "line 1: '.' was never closed"),
        ("imports_what_is_not_there", "import not_there\n", "line 1: ModuleNotFoundError"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(InputError, match=rf"learner.name: {name}: .*{name}.py, {message}"):
            learners.find(name)


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
    file = (tmp_path / name.replace(".", "/")).with_suffix(".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(PROBE.format(1))
    monkeypatch.chdir(tmp_path)
    assert learners.find(name).title == learners.title(name) == "Probe 1"
    with pytest.raises(InputError, match=f"did you mean {name}"):
        learners.find(str(file.relative_to(tmp_path)))


def test_a_missing_learner_names_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("absent", "absent.probe", "", "..", "absent/probe.py"):
        with pytest.raises(InputError, match=r"config\.learner\.name: expected one of ") as error:
            learners.find(name)
        if name.startswith("absent"):
            dotted = name.removesuffix(".py").replace("/", ".")
            assert str(tmp_path / f"{dotted.replace('.', '/')}.py") in str(error.value)


def test_a_learners_file_imports_nothing_beside_it(tmp_path, monkeypatch, forgotten):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_it.py").write_text("")
    (tmp_path / "of_a_user.py").write_text("import beside_it\n" + PROBE)
    with pytest.raises(InputError, match=r"of_a_user.py, line 1: ModuleNotFoundError"):
        learners.find("of_a_user")
    assert "of_a_user" not in sys.modules
    monkeypatch.syspath_prepend(tmp_path)
    learners.find("of_a_user")


def test_bytecode_beside_a_learner_is_not_run(tmp_path, monkeypatch, forgotten):
    file = tmp_path / "with_bytecode.py"
    file.write_text(PROBE.format("other"))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(file), invalidation_mode=mode)
    file.write_text(PROBE.format("source"))
    monkeypatch.chdir(tmp_path)
    assert learners.find("with_bytecode").title == "Probe source"


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


STATE = {"heads": jnp.zeros((3, 4)), "host": np.zeros(2, np.float32)}


@pytest.mark.parametrize(
    ("state", "found"),
    [
        (None, r"heads: expected float32\[3, 4\], found nothing"),
        (STATE | {"heads": jnp.zeros((4, 4))}, r"found float32\[4, 4\]"),
        (STATE | {"more": 0.0}, r"more: expected nothing, found float32\[\]"),
    ],
)
def test_another_state_is_named(state, found):
    line = rf"^config.learner.name: mine: after_task must return .*{found}"
    with pytest.raises(InputError, match=line):
        check_state("mine", "after_task", STATE, state)


def test_the_page_lists_the_methods_and_a_working_loss(backbone):
    page = (Path(__file__).parents[2] / "docs" / "learners.md").read_text()
    methods = re.findall(r"\| `(\w+)\((.*)\)` \|", page)
    assert len(methods) == 8
    for name, given in methods:
        declared = inspect.signature(getattr(Learner, name)).parameters.values()
        required = [p.name for p in declared if p.default is p.empty]
        assert given.split(", ") == required, name
    (code,) = re.findall("```python\n(.*?)```", page, re.DOTALL)
    made = {"__name__": "lwf"}
    exec(code, made)
    learner = made["LwF"](toy.make_learner().setup, strength=2.0, temperature=4.0)
    state, batch = toy.random_like(learner.initial_state(), 0), toy.make_batch(seed=1, padding=1)
    frozen, trained = learner.start_task(backbone, state, 1, jax.random.key(1))

    @jax.jit
    def distillation(leaves):
        plain = Learner.loss(learner, backbone, frozen, leaves, batch)
        return learner.loss(backbone, frozen, leaves, batch) - plain

    # A new increment changes no feature, so that the cost is the entropy of the earlier answers.
    features = toy.reference_features(batch.images[:3], frozen["kernels"])
    head = toy.float64(learner.heads(state, 1)[0])
    answers = scipy.special.softmax((features @ head.weight.T + head.bias) / 4.0, axis=1)
    expected = 2.0 * np.mean(scipy.stats.entropy(answers, axis=1))
    assert distillation(trained) == pytest.approx(expected, rel=1e-3)
