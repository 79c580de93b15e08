"""PyTorch models: features as arrays, and the scores of calibrators computed by PyTorch alone."""

import copy
import functools
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fdc_jax.calibration.components import CALIBRATORS, TRANSPORTED, WHITENED_CLASSES

from fdc_jax import calibration
from fdc_jax.errors import InputError
from tests.calibration import streams

# PyTorch advises against its own tracing, which many still use.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
torch = pytest.importorskip("torch", reason="needs PyTorch, which the package does not require")

from fdc_jax import torch as fdc_torch  # noqa: E402


def fitted(tasks, kind="linear", dual=True, device=False, **settings):
    """As `streams.fitted`; the encoder before a task gave about what the one after it gives."""
    calibrator, rng = streams.new(device, **settings), np.random.default_rng(3)
    noise = [0.2 * rng.normal(size=task.adapted.shape).astype(np.float32) for task in tasks]
    before = [task.adapted + each for task, each in zip(tasks, noise, strict=True)]
    previous = before if calibrator.follows_encoder else None
    return streams.fit(calibrator, tasks, kind, dual, previous)


class Split(torch.nn.Module):
    """A model whose images are both features, one after the other."""

    def forward(self, images):
        return images[:, :16], images[:, 16:]


class First(torch.nn.Module):
    """A model whose images are its features."""

    def forward(self, images):
        return images


def check(calibrator, module, adapted, pretrained=None):
    expected = calibrator.class_scores(adapted, pretrained)
    labels = np.concatenate(calibrator.classes)
    both = adapted if pretrained is None else np.concatenate([adapted, pretrained], axis=1)
    model = fdc_torch.Calibrated(module, calibrator)
    found, names = model(torch.tensor(both)).numpy(), model.classes.numpy()
    np.testing.assert_array_equal(names, np.sort(labels))
    expected = expected[:, np.argsort(labels)]
    scale = abs(expected[np.isfinite(expected)]).max()
    np.testing.assert_allclose(found, expected, atol=1e-5 * scale)
    choice = calibrator.score(adapted, pretrained).label
    np.testing.assert_array_equal(names[found.argmax(axis=1)], choice)
    return model, both, found


@pytest.mark.parametrize("method", CALIBRATORS)
def test_scores_are_those_of_jax(method):
    tasks = streams.stream(5, offset=1.0)
    check(fitted(tasks, device=True, **CALIBRATORS[method]), Split(), *streams.probe_inputs(tasks))


@pytest.mark.parametrize("method", ["fdc", "whitened-classes", "transported"])
def test_one_view(method):
    tasks = streams.stream(6)
    adapted, _ = streams.probe_inputs(tasks)
    check(fitted(tasks, dual=False, **CALIBRATORS[method]), First(), adapted)


@pytest.mark.parametrize("kind", ["normalised_linear", "cosine", "nearest_mean"])
@pytest.mark.parametrize("method", ["fdc", "whitened-classes"])
def test_heads(kind, method):
    tasks = streams.stream(7)
    calibrator = fitted(tasks, kind, **CALIBRATORS[method])
    check(calibrator, Split(), *streams.probe_inputs(tasks))


@pytest.mark.parametrize(
    "settings",
    [
        {"neighbours": 2, "affinity_reference": "nearest", "attenuation": 0.3, "rlc_weight": 0.5},
        {"affinity_evidence": "linear", "pac_weight": 2.0, "adapted_view_weight": 0.4},
        {"affinity_metric": "whitened", "affinity_reference": "pooled"},
        WHITENED_CLASSES | {"pac_weight": 0.0},
        TRANSPORTED | {"adapted_view_weight": 0.0, "pretrained_view_weight": 2.0},
    ],
)
def test_settings(settings):
    tasks = streams.stream(8)
    check(fitted(tasks, **settings), Split(), *streams.probe_inputs(tasks))


@pytest.mark.parametrize("method", CALIBRATORS)
def test_a_class_without_images_and_labels_out_of_order(method):
    calibrator = streams.new(**CALIBRATORS[method])
    tasks = streams.stream(9)
    for task, names in zip(tasks, ([7, 3, 5], [8, 2, 9, 0], [4, 6]), strict=True):
        labels, names = np.array(names)[task.rows], np.array(names)
        kept = labels != 3
        adapted = task.adapted[kept]
        before = {"previous": adapted} if calibrator.follows_encoder else {}
        head = streams.head_of(task, "linear")
        calibrator.fit_task(adapted, labels[kept], head, task.pretrained[kept], names, **before)
    calibrator.finalize()
    check(calibrator, Split(), *streams.probe_inputs(tasks))


def test_a_view_of_no_weight_need_not_be_there():
    tasks = streams.stream(10)
    calibrator = fitted(tasks, pretrained_view_weight=0.0)
    adapted, pretrained = streams.probe_inputs(tasks)
    model = fdc_torch.Calibrated(First(), calibrator)
    found = model(torch.tensor(adapted)).max(dim=1).values
    expected = calibrator.score(adapted, pretrained).task_scores.max(axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize("method", CALIBRATORS)
def test_saved_moved_traced_and_exported(method, tmp_path):
    tasks = streams.stream(11)
    calibrator = fitted(tasks, **CALIBRATORS[method])
    model, both, expected = check(calibrator, Split(), *streams.probe_inputs(tasks))
    images = torch.tensor(both)

    def same(other, count=None):
        np.testing.assert_allclose(other(images[:count]), expected[:count], rtol=1e-5, atol=1e-5)

    other = fdc_torch.Calibrated(Split(), fitted(streams.stream(12), **CALIBRATORS[method]))
    with pytest.raises(AssertionError):
        same(other)
    if {k: v.shape for k, v in other.state_dict().items()} == {
        k: v.shape for k, v in model.state_dict().items()
    }:
        other.load_state_dict(model.state_dict())
        same(other)
    calibrator.save(tmp_path / "c.npz")
    fresh = fdc_torch.Calibrated(Split(), calibration.load(tmp_path / "c.npz"))
    fresh.load_state_dict(model.state_dict())
    same(fresh)
    assert {each.device.type for each in copy.deepcopy(model).to("meta").buffers()} == {"meta"}
    traced = torch.jit.trace(model, images[:4])
    same(traced)
    same(traced, 3)
    rows = {"images": {0: torch.export.Dim("rows", min=2)}}
    same(torch.export.export(model, (images[:4],), dynamic_shapes=rows).module())


def test_no_jax_and_no_calibration_at_inference(tmp_path):
    tasks = streams.stream(13)
    probe = streams.probe_inputs(tasks)
    calibrator = fitted(tasks, dual=False)
    model = fdc_torch.Calibrated(torch.nn.Flatten(), calibrator)
    images = torch.tensor(probe[0])
    torch.save(model, tmp_path / "model.pt")
    torch.save((images, model(images)), tmp_path / "expected.pt")
    torch.jit.trace(model, images).save(tmp_path / "traced.pt")
    script = """
import sys
sys.modules["jax"] = None
import torch
images, expected = torch.load("expected.pt")
torch.testing.assert_close(torch.jit.load("traced.pt")(images), expected)
assert "fdc_jax" not in sys.modules
model = torch.load("model.pt", weights_only=False)
torch.testing.assert_close(model(images), expected)
assert "fdc_jax.calibration" not in sys.modules
"""
    root = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        check=True,
        env={"PYTHONPATH": str(root), "PATH": "", "OMP_NUM_THREADS": "1"},
    )


def test_refusals():
    tasks = streams.stream(14)
    calibrator = fitted(tasks, "function")
    with pytest.raises(InputError, match="heads: expected built-in ones, found functions"):
        fdc_torch.Calibrated(Split(), calibrator)
    transported = fitted(tasks, "function", **TRANSPORTED)  # Which asks no head.
    check(transported, Split(), *streams.probe_inputs(tasks))
    calibrator = fitted(tasks)
    both = torch.tensor(np.concatenate(streams.probe_inputs(tasks), axis=1))
    with pytest.raises(
        InputError, match=r"expected views of widths \[16, 12\], found \[28, None\]"
    ):
        fdc_torch.Calibrated(First(), calibrator)(both)
    with pytest.raises(InputError, match="finalize"):
        fdc_torch.Calibrated(Split(), calibration.FDC())
    with pytest.raises(InputError, match=r"batches \(images, labels"):
        fdc_torch.collect(First(), [both])


def test_any_timm_vit():
    timm = pytest.importorskip("timm", reason="needs timm, which the package does not require")
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
    variants = [{}, {"global_pool": "avg", "fc_norm": True}, {"num_classes": 0}]
    images = torch.randn(30, 3, 16, 16)
    labels = torch.arange(30) % 6
    batches = [(images[:16], labels[:16], None), (images[16:], labels[16:], None)]
    for variant in variants:
        model = timm.models.VisionTransformer(**(size | {"num_classes": 6} | variant))
        seen = []
        model.head.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        both = torch.nn.ModuleList([model, copy.deepcopy(model)])
        torch.nn.init.normal_(both[1].blocks[0].mlp.fc1.weight)
        model.train()
        adapted, pretrained, found = fdc_torch.collect(both, batches)
        assert model.training and model.blocks[0].training
        with torch.no_grad():
            model.eval()(images)
        np.testing.assert_allclose(adapted, seen[0], atol=1e-5)  # What the classifier saw.
        of_layer = functools.partial(fdc_torch.pooled, layer="head")
        np.testing.assert_allclose(fdc_torch.collect(model, batches, of_layer)[0], adapted)
        assert abs(adapted - pretrained).max() > 0.1
        np.testing.assert_array_equal(found, labels)
        calibrator = calibration.FDC().to_numpy()
        for part in (found < 3, found >= 3):
            task = streams.StreamTask(
                adapted[part], pretrained[part], found[part], np.ones((3, 24)), np.arange(3.0)
            )
            head = streams.head_of(task, "linear")
            calibrator.fit_task(adapted[part], found[part], head, pretrained[part])
        calibrator.finalize()
        with torch.no_grad():
            scores = fdc_torch.Calibrated(both, calibrator).eval()(images)
        expected = calibrator.score(adapted, pretrained)
        np.testing.assert_allclose(
            scores.max(dim=1).values, expected.task_scores.max(axis=1), rtol=1e-4, atol=1e-4
        )


def test_program_of_the_page(capsys):
    pytest.importorskip("timm", reason="needs timm, which the package does not require")
    page = (Path(__file__).parents[1] / "docs" / "integrations.md").read_text()
    program = page.split("```python\n")[1].split("```")[0]
    found = {}
    exec(compile(program, "docs/integrations.md", "exec"), found)
    assert set(found["accuracies"]) == {"raw", *CALIBRATORS} == set(found["predicted"])
    assert str(found["accuracies"]) in capsys.readouterr().out
    features = fdc_torch.collect(found["both"], [(found["images"], found["labels"])])[:2]
    for name, calibrator in found["calibrators"].items():
        expected = calibrator.score(*(each[found["test"]] for each in features)).label
        same = np.mean(expected == found["predicted"][name].numpy())
        assert same > 0.99  # But for ties within rounding.
    # More than three standard errors of a paired difference each.
    labels, order = found["labels"][found["test"]], ("raw", "fdc", "transported")
    right = [(found["predicted"][name] == labels).numpy() for name in order]
    for worse, better in itertools.pairwise(right):
        assert np.sum(better) - np.sum(worse) > 3 * np.sqrt(np.sum(better != worse))
