"""PyTorch models: features as arrays, and modules that score with a calibrator."""

import copy
import functools
import itertools
from pathlib import Path

import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.errors import InputError
from tests.calibration import streams

torch = pytest.importorskip("torch", reason="needs PyTorch, which the package does not require")

from fdc_jax import torch as fdc_torch  # noqa: E402


class Split(torch.nn.Module):
    """A model whose images are both features, one after the other."""

    def forward(self, images):
        return images[:, :16], images[:, 16:]


def fitted(name, dual=True):
    """Returns a calibrator of labels out of order, one of them without images, and inputs."""
    calibrator, tasks = calibration.make(name), streams.stream(9, offset=1.0)
    for task, names in zip(tasks, ([7, 3, 5], [8, 2, 9, 0], [4, 6]), strict=True):
        labels, names = np.array(names)[task.rows], np.array(names)
        kept = labels != 3
        adapted, head = task.adapted[kept], streams.head_of(task, "linear")
        pretrained = task.pretrained[kept] if dual else None
        calibrator.fit_task(adapted, labels[kept], head, pretrained, names, adapted)
    calibrator.finalize()
    return calibrator, streams.probe_inputs(tasks)


@pytest.mark.parametrize("name", ["fdc", "gaussians", "mahalanobis"])
def test_a_module_scores_as_its_calibrator_and_so_do_its_copies(name, tmp_path):
    calibrator, views = fitted(name)
    expected = calibrator.class_scores(*views)[:, np.argsort(np.concatenate(calibrator.classes))]
    model, images = fdc_torch.Calibrated(Split(), calibrator), torch.tensor(np.hstack(views))
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    for each in (model, copy.deepcopy(model), again):
        found = each(images)
        assert found.dtype == torch.float32 and each.classes.tolist() == [0, *range(2, 10)]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        labels = each.classes[found.argmax(dim=1)].numpy()
        np.testing.assert_array_equal(labels, calibrator.score(*views).label)
    wide = fdc_torch.by_label(found, model.classes, 12)
    assert wide[:, [1, 10, 11]].max() <= found.min()


def test_one_view_and_what_is_refused():
    calibrator, (adapted, pretrained) = fitted("fdc", dual=False)
    model = fdc_torch.Calibrated(torch.nn.Identity(), calibrator)
    np.testing.assert_allclose(
        model(torch.tensor(adapted).double()).max(dim=1).values,
        calibrator.score(adapted).task_scores.max(axis=1),
        rtol=1e-6,
    )
    both = torch.tensor(np.hstack([adapted, pretrained]))
    with pytest.raises(InputError, match="adapted features: expected width 16, found 28"):
        model(both)
    with pytest.raises(InputError, match=r"features: expected one row per image, .* \[40, 4, 4\]"):
        model(torch.tensor(adapted).reshape(-1, 4, 4))
    with pytest.raises(InputError, match="expected fitted tasks, found none"):
        fdc_torch.Calibrated(Split(), calibration.FDC())
    with pytest.raises(InputError, match=r"batches \(images, labels"):
        fdc_torch.collect(Split(), [both])
    with pytest.raises(InputError, match="loader: labels: expected integers, found float32"):
        fdc_torch.collect(
            Split(), [(both, torch.full((len(both),), 1.5))], lambda model, rows: rows
        )


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
        calibrator = calibration.FDC()
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
    assert list(found["accuracies"]) == ["raw", "fdc", "gaussians"]
    assert str(found["accuracies"]) in capsys.readouterr().out
    features = fdc_torch.collect(found["both"], [(found["images"], found["labels"])])[:2]
    for name, calibrator in found["calibrators"].items():
        expected = calibrator.score(*(each[found["test"]] for each in features)).label
        assert np.mean(expected == found["predicted"][name].numpy()) > 0.99  # but for rounding
    # More than three standard errors of a paired difference each.
    labels, order = found["labels"][found["test"]], ("raw", "fdc", "gaussians")
    right = [(found["predicted"][name] == labels).numpy() for name in order]
    for worse, better in itertools.pairwise(right):
        assert np.sum(better) - np.sum(worse) > 3 * np.sqrt(np.sum(better != worse))
