"""The detector in the real pytorch-ood, on scanned digits of which some classes are unknown."""

import copy
import pickle

import numpy as np
import pytest
from numpy.testing import assert_allclose

from fdc_jax import calibration, heads
from tests.integrations.conftest import run_program

torch = pytest.importorskip("torch", reason="needs PyTorch, which the package does not require")
ood = pytest.importorskip("pytorch_ood", reason="needs pytorch-ood", exc_type=ImportError)

from pytorch_ood.metrics import OODMetrics  # noqa: E402


def test_outlier_scores_equal_the_negative_task_scores(digits):
    from fdc_pytorch_ood import FDCDetector

    train, test, train_labels, test_labels = map(torch.tensor, digits)
    known = train_labels < 6
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU())
    head = torch.nn.Linear(32, 6)
    model = torch.nn.Sequential(body, head)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    images = train[known]
    labels = train_labels[known]
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    tasks = [[0, 3], [5, 1, 2], [4]]
    detector = FDCDetector(body, head, tasks)
    with pytest.raises(ood.api.RequiresFittingException):
        detector.predict(images)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 50)
    assert detector.to("cpu").fit(batches) is detector
    scores = detector(test)
    metrics = OODMetrics()
    metrics.update(scores, test_labels.where(test_labels < 6, -1))
    assert metrics.compute()["AUROC"] > 0.85

    with torch.no_grad():
        z = body(images)
        z_test = body(test)
    torch.testing.assert_close(detector.predict_features(z_test), scores)
    calibrator = calibration.FDC()
    for task in tasks:
        rows = torch.isin(labels, torch.tensor(task))
        linear = heads.LinearHead(head.weight[task], head.bias[task])
        calibrator.fit_task(z[rows].numpy(), labels[rows].numpy(), linear, classes=np.array(task))
    calibrator.finalize()
    expected = -calibrator.score(z_test.numpy()).task_scores.max(axis=1)
    assert_allclose(scores, expected, atol=1e-5 * abs(expected).max())
    # Features of inputs that are unknown while fitting have no effect.
    extra_labels = torch.cat([labels, torch.full((9,), -1)])
    again = FDCDetector(None, head, tasks).fit_features(torch.cat([z, 5 + z[:9]]), extra_labels)
    torch.testing.assert_close(again.predict_features(z_test), scores)
    with pytest.raises(ood.api.ModelNotSetException):
        again.predict(images)


@pytest.mark.parametrize("name", ["fdc", "gaussians"])
def test_copies_and_pickles_score_equally(digits, name):
    from fdc_pytorch_ood import FDCDetector

    images = torch.tensor(digits[0])
    labels = torch.tensor(digits[2])
    torch.manual_seed(0)
    encoder = torch.nn.Linear(64, 32)
    head = torch.nn.Linear(32, 10)
    tasks = [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 100)
    detector = FDCDetector(encoder, head, tasks, name).fit(batches)
    scores = detector(images)
    for read in (copy.deepcopy(detector), pickle.loads(pickle.dumps(detector))):
        assert torch.equal(read(images), scores)
        assert torch.equal(read.fit(batches)(images), scores)
    if name == "gaussians":  # All tasks in one, since the encoder does not move.
        together = FDCDetector(encoder, head, calibrator=name).fit(batches)
        torch.testing.assert_close(together(images), scores, rtol=1e-3, atol=0)


def test_program_of_the_page(capsys):
    defined = run_program("pytorch-ood")
    unknown = defined["labels"][defined["test"]] >= 6
    for name, outlier in defined["outlier"].items():
        pairs = outlier[unknown][:, None] - outlier[~unknown]
        auroc = ((pairs > 0).float() + (pairs == 0).float() / 2).mean()
        assert defined["found"][name] == pytest.approx(float(auroc), abs=1e-4)
        assert auroc > 0.85
    assert str(defined["found"]) in capsys.readouterr().out
