"""The plugin in the real Avalanche, on scanned digits in five experiences."""

import copy
import pickle
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fdc_jax import calibration
from tests.integrations.conftest import Refitted, run_program, surpasses

torch = pytest.importorskip("torch", reason="needs PyTorch, which the package does not require")
pytestmark = pytest.mark.filterwarnings("ignore:::avalanche", "ignore:No loggers specified")


@pytest.fixture(scope="module")
def avalanche():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of its own imports.
        return pytest.importorskip("avalanche", reason="needs avalanche-lib", exc_type=ImportError)


def network(growing):
    """A small network that ends in Avalanche's growing classifier, or in a fixed one."""
    from avalanche.models import IncrementalClassifier, SimpleMLP

    torch.manual_seed(0)
    if not growing:
        return SimpleMLP(input_size=64, hidden_size=32, drop_rate=0.2), "classifier"
    layers = {"body": torch.nn.Linear(64, 32), "act": torch.nn.ReLU()}
    layers["classifier"] = IncrementalClassifier(32)
    return torch.nn.Sequential(OrderedDict(layers)), "classifier.classifier"


TASKS = [[3, 8], [0, 1], [2, 9], [5, 7], [4, 6]]


def trained(digits, plugins, model, experiences=5):
    """Trains on so many of five experiences; returns the strategy and the benchmark."""
    from avalanche.benchmarks.scenarios.supervised import class_incremental_benchmark
    from avalanche.benchmarks.utils import as_classification_dataset
    from avalanche.evaluation.metrics import accuracy_metrics
    from avalanche.training import Naive
    from avalanche.training.plugins import EvaluationPlugin

    datasets = {}
    for name, images, labels in zip(("train", "test"), digits[:2], digits[2:], strict=True):
        dataset = torch.utils.data.TensorDataset(torch.tensor(images), torch.tensor(labels))
        dataset.targets = labels.tolist()
        datasets[name] = as_classification_dataset(dataset)
    order = np.concatenate(TASKS).tolist()
    benchmark = class_incremental_benchmark(datasets, class_order=order, num_experiences=5)
    torch.manual_seed(1)
    strategy = Naive(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        train_mb_size=32,
        eval_mb_size=64,
        train_epochs=4,
        plugins=plugins,
        evaluator=EvaluationPlugin(accuracy_metrics(stream=True), loggers=[]),
    )
    for experience in benchmark.train_stream[:experiences]:
        strategy.train(experience)
    return strategy, benchmark


def accuracy(strategy, benchmark):
    """The accuracies of one evaluation, with and without calibration."""
    from fdc_avalanche import RAW

    metrics = strategy.eval(benchmark.test_stream)
    (value,) = [value for name, value in metrics.items() if "eval_phase" in name]
    return value, metrics[RAW]


def copier(networks):
    """Returns a plugin that keeps the model at the start and after each experience."""
    from avalanche.training.plugins import SupervisedPlugin

    class Copier(SupervisedPlugin):
        def before_training_exp(self, strategy, **kwargs):
            if not networks:
                self.after_training_exp(strategy)

        def after_training_exp(self, strategy, **kwargs):
            networks.append(copy.deepcopy(strategy.model).eval())

    return Copier()


@pytest.mark.parametrize("name, growing", [("fdc", False), ("gaussians", True)])
def test_calibrated_accuracy_is_that_of_the_refitted_calibrator(avalanche, digits, name, growing):
    from fdc_avalanche import FDCPlugin

    model, layer = network(growing)
    plugin = FDCPlugin(name if growing else calibration.make(name), layer)
    networks = []
    strategy, benchmark = trained(digits, [plugin, copier(networks)], model)
    calibrated, raw = accuracy(strategy, benchmark)
    fitted, plugin.calibrated = plugin.calibrator, None
    assert accuracy(strategy, benchmark) == pytest.approx((raw, raw))
    assert [classes.tolist() for classes in fitted.classes] == TASKS

    def features(model, images):
        body = model[:2] if growing else model.features
        with torch.no_grad():
            return body(torch.tensor(images)).numpy()

    def layer_of(model, classes):
        return model.get_submodule(layer), classes

    train, images, train_labels, labels = digits
    refitted = Refitted(name, networks, train, train_labels, TASKS, features, layer_of)
    refitted.assert_scores(fitted.class_scores(*refitted.views(images)), images)
    right = fitted.score(*refitted.views(images)).label == labels
    with torch.no_grad():
        logits = model.eval()(torch.tensor(images)).numpy()
    before = logits.argmax(axis=1) == labels
    assert calibrated == pytest.approx(right.mean())
    assert raw == pytest.approx(before.mean())
    assert surpasses(right, before)
    if name == "fdc":  # Training goes as it would without the plugin.
        other, _ = network(growing)
        trained(digits, [], other)
        with torch.no_grad():
            assert_array_equal(other.eval()(torch.tensor(images)), logits)


def test_one_view_and_classes_not_seen_yet(avalanche, digits):
    from fdc_avalanche import FDCPlugin

    model, layer = network(growing=False)
    plugin = FDCPlugin(calibration.FDC(), layer, pretrained=False)
    trained(digits, [plugin], model)
    assert len(plugin.calibrator.widths) == 1
    images = torch.tensor(digits[1][:5])
    output = torch.zeros(5, 14)  # the least of one
    strategy = SimpleNamespace(mb_x=images, mb_output=output, mb_y=torch.zeros(5))
    with torch.no_grad():
        plugin.after_eval_forward(strategy)
        scores = plugin.calibrated(images)
    output = strategy.mb_output
    assert output.shape == (5, 14) and output.isfinite().all()
    assert torch.equal(output[:, :10], scores)
    assert output[:, 10:].max() < scores.min()


@pytest.mark.parametrize("route", ["pickle", "copy", "state_dict"])
def test_a_plugin_that_was_read_resumes_equally(avalanche, digits, route):
    from fdc_avalanche import FDCPlugin

    model, layer = network(growing=False)
    other, _ = network(growing=False)
    plugin = FDCPlugin("gaussians", layer)
    read = FDCPlugin("fdc", layer)
    strategy, benchmark = trained(digits, [plugin], model, experiences=3)
    if route == "pickle":
        read = pickle.loads(pickle.dumps(plugin))
    elif route == "copy":
        read = copy.deepcopy(plugin)
    else:
        read.start(other)
        read.calibrated.load_state_dict(plugin.calibrated.state_dict())
    other.load_state_dict(model.state_dict())
    resumed, _ = trained(digits, [read], other, 0)
    images = torch.tensor(digits[1])
    for experiences in ([], benchmark.train_stream[3:]):
        for trainer in (strategy, resumed):
            torch.manual_seed(5)
            for experience in experiences:
                trainer.train(experience)
        scores = [module.calibrated.eval()(images) for module in (plugin, read)]
        assert torch.equal(*scores)
        weights = [dict(module.state_dict()) for module in (model, other)]
        torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert len(read.calibrated.classes) == 10
    # What is evaluated is what was trained, not the copy that was read.
    assert read.calibrated.module[0] is resumed.model


def test_program_of_the_page(avalanche, capsys):
    defined = run_program("Avalanche")
    images, labels = (defined[name][defined["test"]] for name in ("images", "labels"))
    printed = defined["metrics"]["Top1_Acc_Stream/eval_phase/test_stream/Task000"]
    raw = defined["metrics"]["Top1_Acc_Stream/without_calibration"]
    assert str({"raw": raw, "gaussians": printed}) in capsys.readouterr().out
    with torch.no_grad():
        right = defined["model"].eval()(images).argmax(dim=1) == labels
    assert raw == pytest.approx(right.float().mean().item())
    assert printed > raw + 0.5
