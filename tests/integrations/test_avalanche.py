"""The plugin in the real Avalanche, on scanned digits in five experiences."""

import copy
import pickle
from collections import OrderedDict

import numpy as np
import pytest

from fdc_jax import calibration, heads
from fdc_jax.errors import InputError

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


def trained(digits, plugins, model, experiences=5):
    """Trains on so many of five experiences; returns the strategy and the benchmark."""
    from avalanche.benchmarks.scenarios.supervised import class_incremental_benchmark
    from avalanche.benchmarks.utils import as_classification_dataset
    from avalanche.evaluation.metrics import accuracy_metrics
    from avalanche.training import Naive
    from avalanche.training.plugins import EvaluationPlugin

    train, test, train_labels, test_labels = digits

    def dataset(images, labels):
        found = torch.utils.data.TensorDataset(torch.tensor(images), torch.tensor(labels))
        found.targets = labels.tolist()
        return as_classification_dataset(found)

    benchmark = class_incremental_benchmark(
        {"train": dataset(train, train_labels), "test": dataset(test, test_labels)},
        class_order=[3, 8, 1, 0, 9, 2, 7, 5, 4, 6],
        num_experiences=5,
    )
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
    (found,) = [v for k, v in strategy.eval(benchmark.test_stream).items() if "Stream" in k]
    return found


class Copies:
    """The model before and after each experience, as a plugin keeps them."""

    def __init__(self):
        self.before, self.after = [], []

    def plugin(self):
        from avalanche.training.plugins import SupervisedPlugin

        class Watch(SupervisedPlugin):
            def before_training_exp(_, strategy, **kwargs):
                self.before.append(copy.deepcopy(strategy.model).eval())

            def after_training_exp(_, strategy, **kwargs):
                self.after.append(copy.deepcopy(strategy.model).eval())

        return Watch()


def fitted_again(name, digits, copies, layer, body):
    """Fits from the arrays of copies of the model, with no part of the adapter."""
    calibrator = calibration.make(name)
    for task, classes in enumerate([[3, 8], [0, 1], [2, 9], [5, 7], [4, 6]]):
        rows = np.isin(digits[2], classes)
        models = copies.after[task], copies.before[0], copies.before[task]
        adapted, frozen, previous = (body(each)(torch.tensor(digits[0][rows])) for each in models)
        last = copies.after[task].get_submodule(layer)
        head = heads.LinearHead(last.weight[classes].numpy(), last.bias[classes].numpy())
        named = {"classes": np.array(classes), "previous": previous.numpy()}
        calibrator.fit_task(adapted.numpy(), digits[2][rows], head, frozen.numpy(), **named)
    calibrator.finalize()
    return calibrator


@pytest.mark.parametrize(("name", "growing"), [("fdc", False), ("gaussians", True)])
def test_calibrated_accuracy(avalanche, digits, name, growing):
    from fdc_avalanche import FDCPlugin

    model, layer = network(growing)
    given = name if growing else calibration.make(name)
    plugin, copies = FDCPlugin(given, layer), Copies()
    strategy, benchmark = trained(digits, [plugin, copies.plugin()], model)
    calibrated = accuracy(strategy, benchmark)
    fitted, plugin.calibrated = plugin.calibrator, None
    raw = accuracy(strategy, benchmark)
    assert [c.tolist() for c in fitted.classes] == [[3, 8], [0, 1], [2, 9], [5, 7], [4, 6]]

    def body(each):
        return each[:2] if growing else each.features

    images, labels = torch.tensor(digits[1]), digits[3]
    with torch.no_grad():
        again = fitted_again(name, digits, copies, layer, body)
        probe = [body(each)(images).numpy() for each in (copies.after[-1], copies.before[0])]
        logits = model.eval()(images).numpy()
    expected = again.class_scores(*probe)
    scale = abs(expected[np.isfinite(expected)]).max()
    np.testing.assert_allclose(fitted.class_scores(*probe), expected, atol=1e-3 * scale)
    right, before = fitted.score(*probe).label == labels, logits.argmax(axis=1) == labels
    assert calibrated == pytest.approx(right.mean())
    assert raw == pytest.approx(before.mean())
    # More than three standard errors of a paired difference.
    assert np.sum(right) - np.sum(before) > 3 * np.sqrt(np.sum(right != before))
    if name == "fdc":  # Training goes as it would without the plugin.
        other, _ = network(growing)
        trained(digits, [], other)
        with torch.no_grad():
            np.testing.assert_array_equal(other.eval()(images), logits)


def test_one_view_and_classes_not_seen_yet(avalanche, digits):
    from fdc_avalanche import FDCPlugin

    model, layer = network(growing=False)
    plugin = FDCPlugin(calibration.FDC(), layer, pretrained=False)
    trained(digits, [plugin], model)
    assert len(plugin.calibrator.widths) == 1
    found = plugin.calibrated

    class Seen:  # The least of a strategy that the hook looks at.
        mb_x, mb_output = torch.tensor(digits[1][:5]), torch.zeros(5, 14)

    with torch.no_grad():
        plugin.after_eval_forward(Seen)
    assert Seen.mb_output.shape == (5, 14)
    np.testing.assert_array_equal(
        Seen.mb_output[:, :10], found(torch.tensor(digits[1][:5])).detach()
    )
    assert Seen.mb_output[:, 10:].max() < Seen.mb_output[:, :10].min()
    assert np.isfinite(Seen.mb_output.numpy()).all()


def test_a_wrong_calibrator_or_layer_is_one_line_before_training(avalanche, digits):
    from fdc_avalanche import FDCPlugin

    with pytest.raises(InputError, match=r"calibrator: expected one of .*, found dict"):
        FDCPlugin({"tsf": True}, "classifier").start(network(growing=False)[0])
    model, _ = network(growing=False)
    first = copy.deepcopy(model.state_dict())
    for layer, found in (("clasifier", "did you mean classifier"), ("features.1", "ReLU")):
        with pytest.raises(InputError, match=f"layer: expected .*{found}"):
            trained(digits, [FDCPlugin(calibration.FDC(), layer)], model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, first[name])


@pytest.mark.parametrize("route", ["pickle", "copy", "state_dict"])
def test_fitting_goes_on_after_reading(avalanche, digits, route):
    from fdc_avalanche import FDCPlugin

    def go_on(strategy):
        torch.manual_seed(5)
        for experience in benchmark.train_stream[3:]:
            strategy.train(experience)
        return strategy.model.state_dict()

    def scores(plugin):
        return plugin.calibrated.eval()(torch.tensor(digits[1]))

    model, layer = network(growing=False)
    plugin = FDCPlugin("gaussians", layer)
    strategy, benchmark = trained(digits, [plugin], model, experiences=3)
    other, _ = network(growing=False)
    read = FDCPlugin("fdc", layer)
    if route == "pickle":
        read = pickle.loads(pickle.dumps(plugin))
    elif route == "copy":
        read = copy.deepcopy(plugin)
    else:
        read.start(other)
        read.calibrated.load_state_dict(plugin.calibrated.state_dict())
    other.load_state_dict(model.state_dict())
    again, _ = trained(digits, [read], other, 0)
    assert torch.equal(scores(read), scores(plugin))
    weights, expected = go_on(again), go_on(strategy)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert torch.equal(scores(read), scores(plugin))
    assert len(read.calibrated.classes) == 10
    # What is evaluated is what was trained, not the copy that was read.
    assert read.calibrated.module[0] is again.model


def test_settings_go_with_a_name(avalanche):
    from fdc_avalanche import FDCPlugin

    assert FDCPlugin("fdc", "classifier", attenuation=0.25).calibrator.settings.attenuation == 0.25
    with pytest.raises(InputError, match="none beside a calibrator, found attenuation"):
        FDCPlugin(calibration.make("fdc"), "classifier", attenuation=0.25)


def test_program_of_the_page(avalanche, program, capsys):
    found = program("Avalanche")
    images, labels = (found[each][found["test"]] for each in ("images", "labels"))
    printed = found["metrics"]["Top1_Acc_Stream/eval_phase/test_stream/Task000"]
    assert str(printed) in capsys.readouterr().out
    with torch.no_grad():
        raw = found["model"].eval()(images).argmax(dim=1) == labels
    assert printed > raw.float().mean() + 0.5
