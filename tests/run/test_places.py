"""The JSON of a work directory: whatever stands there, opening says one line or goes on."""

import copy
import json
import shutil

import pytest

import fdc_jax
from fdc_jax.errors import InputError
from fdc_jax.machine.files import check_form

WRONG = (None, True, -1, 10**400, float("nan"), "x\x00\n", [], [[1]], {}, {"a": None})


@pytest.fixture
def opened(whole, tmp_path):
    """A copy of a run without its manifest, which would name every change."""
    for name in ("config.json", "results.json", "tasks/task_000.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(whole / name, tmp_path / name)
    return tmp_path


def places(tree, path=()):
    """Yields the keys that lead to every value."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if path else ():
        yield (*path, key)
        if isinstance(tree[key], dict | list):
            yield from places(tree[key], (*path, key))


def look(folder):
    """Reads what a reader of a run reads first."""
    run = fdc_jax.open_run(folder)
    return run.records, run.num_tasks, run._configuration()


@pytest.mark.parametrize("name", ["config.json", "results.json", "tasks/task_000.json"])
def test_any_value_of_another_kind_is_one_line_or_read(opened, name):
    content, refused = json.loads((opened / name).read_text()), 0
    for number, place in enumerate(places(content)):
        changed = copy.deepcopy(content)
        *above, last = place
        inner = changed
        for key in above:
            inner = inner[key]
        inner[last] = WRONG[number % len(WRONG)]
        (opened / name).write_text(json.dumps(changed))
        try:
            look(opened)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 600 and name in str(error)
    assert refused > 10
    for text in ("[]", "3", "{", "[" * 10**5, "\x00", '{"a": ' * 10**5):
        (opened / name).write_text(text)
        with pytest.raises(InputError, match=rf"{name}: ") as caught:
            look(opened)
        assert "\n" not in str(caught.value)


def test_a_form_says_where_a_value_is_another():
    form = {"a": {"*": (0.0, 100.0)}, "b?": [(1, 9)], "c": (str, bool)}
    check_form({"a": {}, "c": "x", "d": object()}, form, "f: ")
    check_form({"a": {"x": 3, "y": 0.5}, "b": [1, 9], "c": True}, form, "f: ")
    for value, message in (
        ([], "f: expected a JSON object, found list"),
        ({"c": ""}, "f: a: expected a JSON object, found none"),
        ({"a": {"x\n": 101}, "c": ""}, r"f: a.x\\n: expected a number from 0 to 100, found 101"),
        ({"a": {}, "b": [1, 2.0], "c": ""}, "f: b.1: expected a whole number from 1 to 9, found 2"),
        ({"a": {}, "b": [True], "c": ""}, "f: b.0: expected a whole number from 1 to 9, found Tru"),
        ({"a": {}, "c": 3}, "f: c: expected str or bool, found 3"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            check_form(value, form, "f: ")


def test_a_finished_run_is_what_was_written(whole, tmp_path):
    """One bit of any file that others read, and opening names the file."""
    known = json.loads((whole / "manifest.json").read_text())["sha256"]
    assert {"config.json", "results.json", "predictions.npz", "tasks/task_001.json"} < known.keys()
    assert {"calibrators/fdc.npz", "calibrators/gaussians.npz"} < known.keys()
    copied = shutil.copytree(whole, tmp_path / "copy")
    for name in known:
        content = (copied / name).read_bytes()
        changed = bytearray(content)
        changed[len(content) // 3] ^= 4
        (copied / name).write_bytes(changed)
        with pytest.raises(InputError, match=f"{name}: is not what was written"):
            fdc_jax.open_run(copied)
        (copied / name).write_bytes(content)
    fdc_jax.open_run(copied)


@pytest.mark.parametrize(
    "field",
    ["num_tasks", "classes of planned tasks", "encoder.image_size", "evaluation.batch_size"],
)
def test_a_number_that_would_take_all_memory_is_refused_at_once(opened, field):
    config = json.loads((opened / "config.json").read_text())
    config[field] = [10**9] if isinstance(config[field], list) else 10**9
    (opened / "config.json").write_text(json.dumps(config))
    (opened / "results.json").unlink()
    with pytest.raises(InputError, match=rf"config.json.*{field}|{field}.*config.json"):
        look(opened)
