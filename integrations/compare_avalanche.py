"""Compares FDC with methods of Avalanche on scanned digits: `python compare_avalanche.py 1 2 3`.

Prints the accuracy after the last of five experiences for every seed, which draws the order of the
classes, the weights and the batches. Needs avalanche-lib; takes some seconds per seed.
"""

import copy
import sys
import warnings
from typing import Any

import numpy as np
import torch
from avalanche.benchmarks import nc_benchmark
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.models import FeCAMClassifier, TrainEvalModel
from avalanche.training import Naive, StreamingLDA
from avalanche.training.plugins import CurrentDataFeCAMUpdate, EvaluationPlugin
from fdc_avalanche import FDCPlugin
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from fdc_jax import calibration

WIDTH = 64


def benchmark(seed: int) -> Any:
    """Returns five experiences of two classes each; 40 % of the images are for testing."""
    digits = load_digits()
    split = train_test_split(digits.data / 16, digits.target, test_size=0.4, random_state=0)
    parts = []
    for x, y in (split[::2], split[1::2]):
        parts.append(torch.utils.data.TensorDataset(torch.tensor(x).float(), torch.tensor(y)))
        parts[-1].targets = y.tolist()  # Avalanche asks for them.
    # Unlike `class_incremental_benchmark`, gives the task labels that Avalanche's FeCAM unpacks.
    return nc_benchmark(*parts, n_experiences=5, task_labels=False, seed=seed)


def accuracy(strategy: Any, stream: Any) -> float:
    """Returns the accuracy over a whole stream, in percent."""
    return next(100 * v for k, v in strategy.eval(stream).items() if "eval_phase" in k)


def compare(seed: int) -> dict[str, float]:
    """Returns the accuracy of each method."""
    stream = benchmark(seed)
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU())
    network = nn.Sequential()
    network.add_module("body", body)
    network.add_module("classifier", nn.Linear(WIDTH, 10))
    common = {"train_mb_size": 32, "eval_mb_size": 128}

    def naive(model: nn.Module, plugins: list[Any]) -> Naive:
        torch.manual_seed(seed)
        parameters = [array for array in model.parameters() if array.requires_grad]
        strategy = Naive(
            model=model,
            optimizer=torch.optim.SGD(parameters, lr=0.05),
            train_epochs=4,
            plugins=plugins,
            evaluator=EvaluationPlugin(accuracy_metrics(stream=True), loggers=[]),
            **common,
        )
        for experience in stream.train_stream:
            strategy.train(experience)
        return strategy

    def fecam(train: bool) -> float:
        fresh = copy.deepcopy(network)
        fresh.body.requires_grad_(train)
        model = TrainEvalModel(fresh.body, fresh.classifier, FeCAMClassifier())
        return accuracy(naive(model, [CurrentDataFeCAMUpdate()]), stream.test_stream)

    plugins = {k: FDCPlugin(calibration.make(k), "classifier") for k in ("fdc", "gaussians")}
    trained = naive(copy.deepcopy(network), list(plugins.values()))
    fitted = {name: plugin.calibrated for name, plugin in plugins.items()}
    accuracies = {}
    for name in ("Naive", *plugins):  # One training, scored by one plugin or none.
        for other, plugin in plugins.items():
            plugin.calibrated = fitted[other] if other == name else None
        accuracies[name] = accuracy(trained, stream.test_stream)
    evaluator = EvaluationPlugin(accuracy_metrics(stream=True), loggers=[])
    loss = nn.CrossEntropyLoss()
    slda = StreamingLDA(
        slda_model=copy.deepcopy(body), criterion=loss, input_size=WIDTH, num_classes=10,
        evaluator=evaluator, **common,
    )  # fmt: skip
    for experience in stream.train_stream:
        slda.train(experience)
    accuracies["SLDA, first encoder"] = accuracy(slda, stream.test_stream)
    return accuracies | {"FeCAM, first encoder": fecam(False), "FeCAM": fecam(True)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    columns = [compare(int(seed)) for seed in sys.argv[1:]]
    for method in columns[0]:
        row = [column[method] for column in columns]
        print("|", method, "|", *(f"{v:.1f} |" for v in row), f"{np.mean(row):.1f} |")
