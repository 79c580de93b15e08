"""Exported runs: the same answers without the images and the file of the encoder."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fdc_jax
from fdc_jax import calibration, export
from fdc_jax.data import task_stream
from fdc_jax.errors import InputError
from fdc_jax.heads import LinearHead
from fdc_jax.model import weights
from fdc_jax.run import configuration
from tests import small_runs

ROWS = np.arange(0, 60, 5)
OTHERS = [pytest.param(name, marks=pytest.mark.ci) for name in ("rsiat", "slca")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cache, finished_run):
    """Returns work directories by learner, each made once."""
    made = {"cumulative_lora": finished_run}

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
    """Returns features of E_0 and E_T, and what calibrators say of them."""
    actual = {"adapted": run.features(images, run.num_tasks), "pretrained": run.features(images, 0)}
    views = [*actual.values()]
    for name in ("fdc", "gaussians"):
        scores = run.calibrator(name).score(*views)
        actual |= {f"{name} scores": scores.task_scores, f"{name} label": scores.label}
    return actual


@pytest.mark.parametrize(
    "learner",
    [
        "cumulative_lora",
        *OTHERS,
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("inflora_ca", "sd_lora")),
    ],
)
def test_an_export_answers_alone_as_the_run_does(runs, tmp_path, monkeypatch, learner):
    workdir = small_runs.copied(runs(learner), tmp_path / "run")
    file = str(shutil.copy(weights.DIGITS_WEIGHTS, tmp_path / "encoder.npz"))
    run = fdc_jax.open_run(workdir, weights=file)
    images = run.test_images(ROWS)
    expected, heads = answers(run, images), run.heads()
    export.write(workdir, tmp_path / "out", weights_file=file)

    shutil.rmtree(workdir)
    (tmp_path / "encoder.npz").unlink()
    monkeypatch.setattr(weights, "DIGITS_WEIGHTS", tmp_path / "encoder.npz")
    monkeypatch.setattr(task_stream, "build", lambda *_, **__: pytest.fail("images are read"))
    exported = fdc_jax.open_run((tmp_path / "out").rename(tmp_path / "moved"))
    small_runs.assert_equal(answers(exported, images), expected)
    assert_array_equal(exported.predictions["fdc_label"][ROWS], expected["fdc label"])
    assert (exported.num_tasks, exported.class_names) == (2, run.class_names)
    assert exported.results.accuracy == run.results.accuracy
    for head, other in zip(exported.heads(), heads, strict=True):
        for part, same in zip(head, other, strict=True):
            assert_array_equal(part, same)
    assert (exported.folder / "timm").exists() == (learner != "rsiat")  # which has adapters
    for t in (1, 3):
        with pytest.raises(InputError, match=r"is an export, .* but E_0 and E_2"):
            exported.encoder(t)


def test_changed_files_of_an_export_are_refused(finished_run, tmp_path):
    out = tmp_path / "out"
    export.write(finished_run, out)
    known = json.loads((out / "manifest.json").read_text())["sha256"]
    assert {*known, "manifest.json"} == {*contents(out)}
    for name in ("merged.safetensors", "results.json"):
        content = (out / name).read_bytes()
        (out / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(InputError, match=rf"{name}: is not what was written; export the run"):
            fdc_jax.open_run(out)
        (out / name).write_bytes(content)
    for name in ("predictions.npz", "manifest.json"):
        (out / name).unlink()
        with pytest.raises(InputError, match=name):
            fdc_jax.open_run(out)


@pytest.mark.parametrize("kind", ["file", "link", "folder link", "no checksums"])
def test_a_file_that_the_manifest_does_not_name_is_refused(finished_run, tmp_path, kind):
    out = tmp_path / "out"
    export.write(finished_run, out)
    (out / ".DS_Store").touch()
    fdc_jax.open_run(out)
    extra = out / "calibrators" / "ncm.npz"
    if kind == "no checksums":
        (out / "manifest.json").write_text('{"sha256": {}}')
    elif kind == "link":
        (content := extra.with_name("gaussians.npz")).rename(tmp_path / "elsewhere.npz")
        content.symlink_to(tmp_path / "elsewhere.npz")
    elif kind == "folder link":
        (out / "calibrators").rename(tmp_path / "calibrators")
        (out / "calibrators").symlink_to(tmp_path / "calibrators")
    else:
        shutil.copy(extra.with_name("gaussians.npz"), extra)
    with pytest.raises(InputError, match=r"is not in manifest.json|is not what was written"):
        fdc_jax.open_run(out)


def fitted_elsewhere(width, sizes=(5, 5)):
    """Returns class Gaussians of another run."""
    rng, made = np.random.default_rng(0), calibration.make("gaussians")
    for task, size in enumerate(sizes):
        labels = np.repeat(np.arange(size), 8) + sum(sizes[:task])
        features = rng.normal(size=(len(labels), width)).astype(np.float32)
        head = LinearHead(rng.normal(size=(size, width)).astype(np.float32))
        made.fit_task(features, labels, head, pretrained=features)
    made.finalize()
    return made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("damaged", r"gaussians.npz: not a readable .npz file"),
        ("under another name", r"fdc.npz: expected a calibrator fdc, found Gaussians"),
        ("absent", r"run: expected the calibrator fdc, found none"),
        ("other width", r"gaussians.npz: is of another run: expected features of width"),
        ("other classes", r"gaussians.npz: is of another run: other classes or tasks"),
        ("other heads", r"gaussians.npz: is of another run: other heads"),
        ("no predictions", r"predictions.npz: no such file"),
        ("fewer predictions", r"predictions.npz: .*: expected 60 whole numbers below"),
        ("other predictions", r"predictions.npz: is of another run: expected an accuracy of"),
    ],
)
def test_files_of_another_run_are_not_exported(finished_run, tmp_path, change, message):
    workdir = small_runs.copied(finished_run, tmp_path / "run")
    calibrators, predictions = workdir / "calibrators", workdir / "predictions.npz"
    columns = small_runs.predictions(workdir)
    if change == "damaged":
        (calibrators / "gaussians.npz").write_bytes(b"PK")
    elif change == "under another name":
        shutil.copy(calibrators / "gaussians.npz", calibrators / "fdc.npz")
    elif change == "absent":
        for path in calibrators.glob("fdc*"):
            path.unlink()
    elif change == "other width":
        fitted_elsewhere(7).save(calibrators / "gaussians.npz")
    elif change == "other classes":
        fitted_elsewhere(small_width(finished_run), (4, 6)).save(calibrators / "gaussians.npz")
    elif change == "other heads":
        fitted_elsewhere(small_width(finished_run)).save(calibrators / "gaussians.npz")
    elif change == "no predictions":
        predictions.unlink()
    elif change == "fewer predictions":
        np.savez(predictions, **{name: column[:-1] for name, column in columns.items()})
    else:
        np.savez(predictions, **columns | {"fdc_label": (columns["fdc_label"] + 1) % 10})
    with pytest.raises(InputError, match=message):
        export.write(workdir, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def small_width(finished_run):
    return small_runs.results(finished_run)["encoder"]["architecture"]["width"]


def test_the_same_run_gives_the_same_bytes(finished_run, tmp_path, capsys):
    workdir = small_runs.copied(finished_run, tmp_path / "run")
    for name in ("config.json", "results.json"):
        actual = json.loads((workdir / name).read_text())
        actual.get("config", actual)["data.source"] = str(tmp_path / "images")
        (workdir / name).write_text(json.dumps(actual))
    for name in ("one", "two"):
        assert export.main([str(workdir), str(tmp_path / name)]) == 0
    assert f"wrote {tmp_path / 'two'}" in capsys.readouterr().out
    one = contents(tmp_path / "one")
    assert one == contents(tmp_path / "two")
    # Nothing tells of the machine.
    assert all(str(tmp_path.parent).encode() not in content for content in one.values())
    assert not configuration.OF_A_HOST & json.loads(one["config.json"]).keys()


def test_encoder_in_timms_layout_gives_features_of_the_run(finished_run, tmp_path):
    export.write(finished_run, tmp_path / "out")
    path = tmp_path / "out" / "timm" / "model.safetensors"
    run = fdc_jax.open_run(finished_run)
    _, variant = weights.recognise(str(path), "")
    model = run.encoders.learner.setup.model.clone(variant=variant, input_range="model")
    images = run.test_images(ROWS)
    params = weights.load(path, variant, 32).params
    actual = jax.jit(model.apply)({"params": params}, images)
    assert_allclose(actual, run.features(images, 2), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ("exists", (), r"out: exists already; name a folder that does not"),
        ("results.json", (), r"/run: unfinished: no results.json, 2 tasks done"),
        ("checkpoints", (), r"expected a checkpoint of the run"),
        (None, ("--weights=absent.npz",), r"found no file absent.npz"),
        ("fewer tasks", (), r"results are of 1 task, and it has learned 2; let"),
    ],
)
def test_unsupported_exports_are_one_line(finished_run, tmp_path, capsys, change, flags, message):
    workdir, out = small_runs.copied(finished_run, tmp_path / "run"), tmp_path / "out"
    if change == "exists":
        out.mkdir()
    elif change == "fewer tasks":
        results = small_runs.results(workdir)
        results |= {"num_tasks": 1, "curve": results["curve"][:1]}
        (workdir / "results.json").write_text(json.dumps(results))
    elif change:
        (workdir / change).rename(tmp_path / "elsewhere")
    before = {path.name for path in tmp_path.iterdir()}
    assert export.main([str(workdir), str(out), *flags]) == 2
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1 and printed.out == ""
    assert re.search(message, printed.err)
    assert {path.name for path in tmp_path.iterdir()} == before
