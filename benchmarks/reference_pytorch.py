"""Reference numbers from PyTorch and NumPy: Cumulative-LoRA on the scanned digits, and FDC.

    python -m benchmarks.reference_pytorch --output=results/reference_pytorch_digits.csv

PyTorch trains by the paper's protocol, with the settings of `configs/digits.py`. NumPy computes FDC
in float64 from the paper's equations. No learner and no calibrator of the package takes part. With
--random=shared, batches and initial values are those of the run of the same seed, so that
differences are paired by seed; with --random=own, all random numbers are PyTorch's, and the file
has means over seeds.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from benchmarks import measure
from configs import digits as settings
from fdc_jax.data import digits
from fdc_jax.data.batches import TrainBatches, evaluation_images
from fdc_jax.data.images import NUM_UNIFORMS, train_transform
from fdc_jax.machine.files import csv_text, write_text
from fdc_jax.model import increments, layouts, vit, weights

try:
    import torch  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]
    from torch.nn import functional  # pyright: ignore[reportMissingImports]

    from benchmarks.pytorch import VisionTransformer
except ImportError as error:
    raise measure.Skipped("PyTorch is not installed") from error

PROGRAM = "benchmarks.reference_pytorch"
TASKS, CLASSES = 5, 2
ETA, GAMMA, FLOOR = 0.75, 0.5, 1e-6
WEIGHTS = Path(digits.__file__).parents[1] / "assets" / "digits_vit.npz"


# Cumulative-LoRA in PyTorch -----------------------------------------------------------------------


def encoder(rank: int) -> Any:
    """Returns E_0 with increments of zero; only the increments are trainable."""
    variant = vit.VARIANTS["digits"]
    parameters = weights.load(WEIGHTS, variant, 32).params
    arrays, _ = layouts.as_timm(parameters, variant, vit.pretrained_kernels(parameters), 32)
    net = VisionTransformer(variant, 32, rank, expert=False)
    net.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()}, strict=False)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(".A." in name or ".B." in name)
        if ".B." in name:
            nn.init.zeros_(parameter)
    return net


def start(net: Any, head: Any, seed: int, task: int, rank: int, shared: bool) -> None:
    """Sets A and the head to random values, by JAX's or PyTorch's generator, and B to zero."""
    width = head.in_features
    key = jax.random.fold_in(jax.random.key(seed), task)
    key_of_increment, key_of_head = jax.random.split(key)
    drawn: Any = increments.initialise(key_of_increment, vit.VARIANTS["digits"], rank)
    bound = width**-0.5
    for block, part in itertools.product(range(len(net.blocks)), ("key", "value")):
        layer = getattr(net.blocks[block].attn, part)
        nn.init.uniform_(layer.A.weight, -bound, bound)
        nn.init.zeros_(layer.B.weight)
        if shared:
            layer.A.weight.data = torch.tensor(np.asarray(drawn[part]["A"][block]).T.copy())
    if shared:
        key_of_weight, key_of_bias = jax.random.split(key_of_head)
        limits = {"minval": -bound, "maxval": bound}
        weight = jax.random.uniform(key_of_weight, (CLASSES, width), **limits)
        bias = jax.random.uniform(key_of_bias, (CLASSES,), **limits)
        head.weight.data = torch.tensor(np.array(weight))
        head.bias.data = torch.tensor(np.array(bias))


def merge(net: Any) -> None:
    """Adds the increments to the kernels of keys and values."""
    width = net.cls_token.shape[-1]
    for block in net.blocks:
        for place, layer in ((1, block.attn.key), (2, block.attn.value)):
            update = (layer.B.weight @ layer.A.weight).detach()
            block.attn.qkv.weight.data[place * width : (place + 1) * width] += update
            nn.init.zeros_(layer.B.weight)


def batches(images: Any, rows: Any, labels: Any, seed: int, task: int, shared: bool) -> Any:
    """Yields images and labels of all batches of a task, from the run's or PyTorch's numbers."""
    config: Any = settings.get_config()
    size, epochs, scale = config.train.batch_size, config.train.epochs, config.data.crop_scale
    if shared:
        options: Any = {"seed": seed, "task": task, "epochs": epochs, "crop_scale": scale}
        made = TrainBatches(images, rows, labels, size, image_size=32, flip=False, **options)
        for batch in made:
            present = batch.weights > 0
            yield batch.images[present], batch.labels[present]
        return
    for _ in range(epochs):
        order = torch.randperm(len(rows)).numpy()
        uniforms = torch.rand(len(rows), NUM_UNIFORMS, dtype=torch.float64).numpy()
        for first in range(0, len(rows), size):
            chosen = order[first : first + size]
            pixels = [
                train_transform(images.image(int(rows[i])), 32, uniforms[i], scale, flip=False)
                for i in chosen
            ]
            yield np.stack(pixels), labels[chosen]


def train(net: Any, head: Any, made: Any) -> None:
    """Trains increments and head by Adam with the paper's two learning rates."""
    config: Any = settings.get_config()
    rates = config.train
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(
        [
            {"params": trained, "lr": rates.increment_learning_rate},
            {"params": [*head.parameters()], "lr": rates.head_learning_rate},
        ]
    )
    for images, labels in made:
        optimizer.zero_grad()
        logits = head(net(torch.from_numpy(images)))
        functional.cross_entropy(logits, torch.from_numpy(labels).long()).backward()
        optimizer.step()


def features(net: Any, images: np.ndarray) -> np.ndarray:
    """Returns features [n, d] in float64."""
    with torch.no_grad():
        return net(torch.from_numpy(images)).double().numpy()


# FDC in NumPy -------------------------------------------------------------------------------------


class View:
    """The statistics of a task in one view (Algorithm 1, line 6)."""

    def __init__(self, train: np.ndarray, labels: np.ndarray):
        self.mean = train.mean(axis=0)
        centred = train - self.mean
        energies, directions = np.linalg.eigh(centred.T @ centred / len(train))
        shares = np.cumsum(energies[::-1]) / energies.sum()
        rank = int(np.argmax(shares >= ETA)) + 1
        self.basis = directions[:, ::-1][:, :rank]
        unit = train / np.linalg.norm(train, axis=1, keepdims=True)
        means = np.array([unit[labels == label].mean(axis=0) for label in range(CLASSES)])
        self.prototypes = means / np.linalg.norm(means, axis=1, keepdims=True)
        residuals, affinities = self.residuals(train), self.affinities(train)
        self.residual = residuals.mean(), max(residuals.std(), FLOOR)
        self.affinity = affinities.mean(), max(affinities.std(), FLOOR)

    def residuals(self, inputs: np.ndarray) -> np.ndarray:
        """Returns rho_t (Eq. residual)."""
        centred = inputs - self.mean
        outside = centred - centred @ self.basis @ self.basis.T
        return np.sum(outside**2, axis=1) / np.maximum(np.sum(centred**2, axis=1), 1e-12)

    def affinities(self, inputs: np.ndarray) -> np.ndarray:
        """Returns A_t (Eq. par)."""
        unit = inputs / np.linalg.norm(inputs, axis=1, keepdims=True)
        return np.max(unit @ self.prototypes.T, axis=1)

    def standardised(self, inputs: np.ndarray) -> np.ndarray:
        """Returns u_t."""
        return (self.residuals(inputs) - self.residual[0]) / self.residual[1]

    def terms(self, inputs: np.ndarray, foreign: tuple[float, float, float]) -> np.ndarray:
        """Returns tanh(q_t) - tanh(log(p_F / p_O) / tau) (Eq. par, Eq. llr)."""
        q = (self.affinities(inputs) - self.affinity[0]) / self.affinity[1]
        ratio = log_ratio(self.standardised(inputs), *foreign[:2]) / foreign[2]
        return np.tanh(q) - np.tanh(ratio)


def log_ratio(u: np.ndarray, mean: float, variance: float) -> np.ndarray:
    """Returns log(p_F(u) / p_O(u)) of two normal densities."""
    return 0.5 * (u**2 - np.log(variance) - (u - mean) ** 2 / variance)


def fit_foreign(pairs: list[np.ndarray]) -> tuple[float, float, float]:
    """Returns mu_F, V_F and tau from the residuals of all pairs of tasks (Eq. foreign)."""
    mean = float(np.mean([u.mean() for u in pairs]))
    variance = float(np.mean([u.var() + (u.mean() - mean) ** 2 for u in pairs]))
    variance = max(variance, FLOOR)
    sizes = np.abs(log_ratio(np.concatenate(pairs), mean, variance))
    return mean, variance, max(float(np.median(sizes)), FLOOR)


# The stream ---------------------------------------------------------------------------------------


def run(seed: int, shared: bool) -> dict[str, float]:
    """Returns final accuracies in percent: of raw logits, of FDC, and with the task given."""
    torch.manual_seed(seed)
    images, test = digits.open_digits()
    order = np.random.RandomState(1993).permutation(TASKS * CLASSES)  # PILOT's
    position = np.argsort(order)
    config: Any = settings.get_config()
    rank = config.train.rank
    net, pretrained = encoder(rank), encoder(rank)
    heads, tasks, scales = [], [], []
    foreign: list[list[np.ndarray]] = [[], []]
    for task in range(TASKS):
        classes = order[CLASSES * task : CLASSES * (task + 1)]
        rows = np.concatenate([np.flatnonzero(images.labels == label) for label in classes])
        labels = position[images.labels[rows]] % CLASSES
        head = nn.Linear(net.cls_token.shape[-1], CLASSES)
        start(net, head, seed, task, rank, shared)
        train(net, head, batches(images, rows, labels, seed, task, shared))
        merge(net)
        pixels = evaluation_images(images, rows, 32)
        views = [features(net, pixels), features(pretrained, pixels)]
        for index, view in enumerate(views):
            foreign[index] += [earlier[index].standardised(view) for earlier in tasks]
        tasks.append([View(view, labels) for view in views])
        weight, bias = head.weight.detach().double().numpy(), head.bias.detach().double().numpy()
        basis = tasks[task][0].basis
        filtered = (1 - GAMMA) * weight + GAMMA * weight @ basis @ basis.T  # Eq. osp
        heads.append((weight, filtered, bias))
        scales.append(max(np.max(views[0] @ filtered.T + bias, axis=1).std(), FLOOR))
    pixels = evaluation_images(test, np.arange(len(test.labels)), 32)
    inputs = [features(net, pixels), features(pretrained, pixels)]
    expected = position[test.labels]
    references = [fit_foreign(pairs) for pairs in foreign]
    raw = np.stack([inputs[0] @ weight.T + bias for weight, _, bias in heads], axis=1)
    logits = np.stack([inputs[0] @ filtered.T + bias for _, filtered, bias in heads], axis=1)
    scores = logits.max(axis=2)
    for task, views in enumerate(tasks):  # Eq. dual-main
        for view, given, reference in zip(views, inputs, references, strict=True):
            scores[:, task] += scales[task] * view.terms(given, reference)
    everyone, routed = np.arange(len(expected)), scores.argmax(axis=1)
    answers = {
        "raw": raw.reshape(len(raw), -1).argmax(axis=1),
        "fdc": routed * CLASSES + logits[everyone, routed].argmax(axis=1),
        "oracle": expected // CLASSES * CLASSES + raw[everyone, expected // CLASSES].argmax(axis=1),
    }
    return {name: 100.0 * float(np.mean(labels == expected)) for name, labels in answers.items()}


def main() -> None:
    """Writes a row per number, of a seed or of the mean, and prints a line per seed."""
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__)
    parser.add_argument("--random", choices=("shared", "own"), default="shared")
    parser.add_argument("--seeds", default="1,2,3", help="training seeds")
    parser.add_argument("--output", default="", help="CSV file for `fdc report --reference`")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for seed in map(int, options.seeds.split(",")):
        numbers = run(seed, options.random == "shared")
        print(f"seed {seed}: {numbers}", flush=True)
        source = f"PyTorch {torch.__version__}, {options.random} random numbers"
        common = {"benchmark": "digits", "learner": "cumulative_lora", "seed": seed}
        rows += [
            common | {"quantity": name, "value": round(value, 2), "source": source}
            for name, value in numbers.items()
        ]
    frame = pd.DataFrame(rows)
    if options.random == "own":  # Seeds have nothing in common with those of our runs.
        names = ["benchmark", "learner", "quantity", "source"]
        means = frame.groupby(names, sort=False)["value"].agg(["mean", "std", "count"]).round(2)
        frame = means.set_axis(["value", "std", "n"], axis=1).reset_index()
    if options.output:
        write_text(options.output, csv_text(frame, index=False))


if __name__ == "__main__":
    sys.exit(measure.run(PROGRAM, main))
