"""Exported runs: the same answers without the images and the file of the encoder."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import fdc_jax
from fdc_jax import export
from fdc_jax.data import task_stream
from fdc_jax.errors import InputError
from fdc_jax.model import weights
from tests import small_runs

ROWS = np.arange(0, 60, 5)
RSIAT = pytest.param("rsiat", marks=pytest.mark.ci)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cache, whole):
    """Returns work directories by learner, each made once."""
    made = {"cumulative_lora": whole}

    def find(learner):
        if learner not in made:
            made[learner] = tmp_path_factory.mktemp("runs") / learner
            small_runs.run(small_runs.config(cache, learner__name=learner), made[learner])
        return made[learner]

    return find


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def answers(run, images):
    """Returns features of E_0 and E_T, and what FDC says of them."""
    adapted, pretrained = (run.features(images, t) for t in (run.num_tasks, 0))
    scores = run.calibrator().score(adapted, pretrained)
    found = {"adapted": adapted, "pretrained": pretrained, "scores": scores.task_scores}
    return found | {"task": scores.task, "label": scores.label}


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(
    "learner",
    [
        "cumulative_lora",
        RSIAT,
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("inflora_ca", "sd_lora")),
    ],
)
def test_an_export_answers_alone_as_the_run_does(runs, tmp_path, monkeypatch, learner, merge):
    workdir = small_runs.copied(runs(learner), tmp_path / "run")
    file = str(shutil.copy(weights.DIGITS_WEIGHTS, tmp_path / "encoder.npz"))
    run = fdc_jax.open_run(workdir, weights=file)
    images = run.test_images(ROWS)
    expected, heads = answers(run, images), run.heads()
    keeps_all = learner != "rsiat"
    earlier = run.features(images, 1) if keeps_all else None
    export.write(workdir, tmp_path / "out", merge=merge, weights_file=file)

    shutil.rmtree(workdir)
    (tmp_path / "encoder.npz").unlink()
    monkeypatch.setattr(weights, "DIGITS_WEIGHTS", tmp_path / "encoder.npz")
    monkeypatch.setattr(task_stream, "build", lambda *_, **__: pytest.fail("images are read"))
    exported = fdc_jax.open_run((tmp_path / "out").rename(tmp_path / "moved"))
    small_runs.assert_equal(answers(exported, images), expected)
    np.testing.assert_array_equal(exported.predictions["fdc_label"][ROWS], expected["label"])
    assert (exported.num_tasks, exported.class_names) == (2, run.class_names)
    assert exported.results["accuracy"] == run.results["accuracy"]
    for head, other in zip(exported.heads(), heads, strict=True):
        for part, same in zip(head, other, strict=True):
            np.testing.assert_array_equal(part, same)
    if merge:
        with pytest.raises(InputError, match=r"with --merge and keeps E_0 and E_2 alone"):
            exported.encoder(1)
    elif keeps_all:
        np.testing.assert_array_equal(exported.features(images, 1), earlier)
    with pytest.raises(InputError, match="E_3" if not merge else "alone"):
        exported.encoder(3)


def test_a_damaged_export_is_refused_in_a_line(whole, tmp_path):
    export.write(whole, tmp_path / "out")
    for name in ("state.safetensors", "pretrained/model.safetensors", "results.json"):
        (tmp_path / "out" / name).rename(tmp_path / "elsewhere")
        with pytest.raises(InputError, match=f"{name}: expected this file of an export, found no"):
            fdc_jax.open_run(tmp_path / "out")
        (tmp_path / "elsewhere").rename(tmp_path / "out" / name)


@pytest.mark.parametrize("learner", [RSIAT, pytest.param("inflora_ca", marks=pytest.mark.slow)])
def test_what_only_training_reads_is_left_out(runs, tmp_path, learner):
    export.write(runs(learner), tmp_path / "out")
    arrays = load_file(tmp_path / "out" / "state.safetensors")
    assert [name for name, array in arrays.items() if not array.size] == ["gaussians/factors"]


def test_the_same_run_gives_the_same_bytes_also_by_way_of_an_export(whole, tmp_path):
    for name, source in (("one", whole), ("two", whole), ("three", tmp_path / "one")):
        export.write(source, tmp_path / name, timm=True)
    one = contents(tmp_path / "one")
    assert one == contents(tmp_path / "two") == contents(tmp_path / "three")
    assert {*one} == {*export.WHAT} - {"merged.safetensors"} | {"README.md"}
    export.write(tmp_path / "one", tmp_path / "merged", merge=True)
    export.write(whole, tmp_path / "directly", merge=True)
    assert contents(tmp_path / "merged") == contents(tmp_path / "directly")
    with pytest.raises(InputError, match="with --merge and keeps E_0 and E_2 alone"):
        export.write(tmp_path / "merged", tmp_path / "back")
    # Nothing tells of the machine.
    assert all(str(tmp_path.parent).encode() not in content for content in one.values())
    assert json.loads(one["config.json"])["cache_dir"] == ""


def test_the_encoder_in_timms_layout_gives_the_features_of_the_run(whole, tmp_path):
    export.write(whole, tmp_path / "out", timm=True)
    path = tmp_path / "out" / "timm" / "model.safetensors"
    run = fdc_jax.open_run(whole)
    _, variant = weights.recognise(str(path), "")
    model = run.encoders.learner.setup.model.clone(variant=variant, input_range="model")
    images = run.test_images(ROWS)
    params = weights.load(path, variant, 32).params
    found = jax.jit(model.apply)({"params": params}, images)
    np.testing.assert_allclose(found, run.features(images, 2), rtol=0, atol=2e-5)


def test_the_command_says_what_it_wrote(whole, tmp_path, capsys):
    assert export.main([str(whole), str(tmp_path / "out"), "--merge"]) == 0
    printed = capsys.readouterr().out.splitlines()
    sizes = {name: len(content) for name, content in contents(tmp_path / "out").items()}
    assert [line.split()[2] for line in printed] == [*sorted(sizes), str(tmp_path / "out")]
    assert float(printed[-1].split()[0]) == round(sum(sizes.values()) / 1e6, 2)
    card = (tmp_path / "out" / "README.md").read_text()
    accuracy = small_runs.results(whole)["accuracy"]
    raw, fdc, oracle = (f"{accuracy[name]:.2f}" for name in ("raw", "fdc", "oracle"))
    assert f"| all classes | {raw} | {fdc} | {oracle} |" in card
    assert "license: apache-2.0" in card and "digits_vit.npz" in card


@pytest.mark.parametrize(
    ("learner", "change", "flags", "message"),
    [
        ("cumulative_lora", "exists", (), r"out: exists already; name a folder that does not"),
        ("cumulative_lora", "results.json", (), r"expected a finished run, found no results.json"),
        ("cumulative_lora", "checkpoints", (), r"expected the checkpoints of a run"),
        ("cumulative_lora", None, ("--weights=absent.npz",), r"found no file absent.npz"),
        ("cumulative_lora", "fewer tasks", (), r"results are of 1 task, and it has learned 2; let"),
        pytest.param(
            *("rsiat", None, ("--timm",), r"no plain Vision Transformer of timm has an adapter"),
            marks=pytest.mark.ci,
        ),
    ],
)
def test_what_cannot_be_exported_is_refused_in_a_line(
    runs, tmp_path, capsys, learner, change, flags, message
):
    workdir, out = small_runs.copied(runs(learner), tmp_path / "run"), tmp_path / "out"
    if change == "exists":
        out.mkdir()
    elif change == "fewer tasks":
        results = small_runs.results(workdir) | {"num_tasks": 1}
        (workdir / "results.json").write_text(json.dumps(results))
    elif change:
        (workdir / change).rename(tmp_path / "elsewhere")
    before = {path.name for path in tmp_path.iterdir()}
    assert export.main([str(workdir), str(out), *flags]) == 2
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1 and printed.out == ""
    assert re.search(message, printed.err)
    assert {path.name for path in tmp_path.iterdir()} == before
