"""The numbers that a device must reproduce: features, calibrated scores, training steps, a run.

PyTorch and timm computed the features of the checkpoint in `tests/model/golden`. Labels and scores
are in `tests/golden`, all other numbers in `golden.json`, which `python -m benchmarks.accelerator
--make_golden` writes on a processor. The error of a number is the largest norm of a row's error
divided by the largest norm of a row.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure, synthetic
from fdc_jax import calibration, learners
from fdc_jax.heads import LinearHead
from fdc_jax.machine import devices
from fdc_jax.model import vit, weights

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
# Precision, attention, and tolerance of features against a processor's float32. The error of TF32,
# which parity mode must not use, is 1e-3.
MODES = (("parity", "xla", 1e-4), ("fast", "xla", 0.05), ("fast", "cudnn", 0.05))

# Tolerances: training amplifies rounding, so accuracies differ by device, the raw one the most.
ACCURACIES = {"oracle": 0.01, "fdc": 0.02, "gaussians": 0.02, "raw": 0.1}


class Number(NamedTuple):
    """An array that a device computed, and the expected array or its name in `golden.json`."""

    name: str
    actual: Any
    tolerance: float
    expected: Any = ""  # "" stands for the number's own name
    least: float = 1e-12  # lower bound of the error's divisor


def compare(number: Number, committed: dict[str, Any]) -> dict[str, Any]:
    """Returns the record of a comparison, with the largest error of a row, and `right`."""
    expected = number.expected
    if isinstance(expected, str):
        expected = committed.get(expected or number.name, [])
    record = {"check": number.name, "tolerance": number.tolerance, "error": None, "right": False}
    actual, expected = np.asarray(number.actual, float), np.asarray(expected, float)
    record |= {"found": str(actual.ravel()[:4]), "expected": str(expected.ravel()[:4])}
    if actual.shape != expected.shape:
        return record
    arrays = [np.atleast_1d(array) for array in (actual - expected, expected)]
    error, scale = (np.linalg.norm(array, axis=-1).max() for array in arrays)
    error = float(error / max(scale, number.least))
    return record | {"error": float(f"{error:.3g}"), "right": error <= number.tolerance}


def features(options: Any) -> Iterator[Number]:
    """Yields features of the small checkpoint, and of two blocks of ViT-B/16 at 224 pixels."""
    folder = TESTS / "model" / "golden"
    golden = np.load(folder / "features.npz")
    vit.VARIANTS |= {"golden": vit.Variant(width=24, depth=2, heads=3, patch=8)}
    vit.VARIANTS |= {"two blocks": vit.Variant(width=768, depth=2, heads=12)}
    cudnn, wide = devices.have_cudnn(devices.data_mesh()), synthetic.noise(2, 224, 1, seed=0).images
    tree = synthetic.parameters(vit.build("two blocks", 224), 224)
    sides = (32,) if measure.is_trial(options) else (32, 48)
    small = {side: weights.load(folder / "augreg.npz", "golden", side).params for side in sides}
    for precision, attention, tolerance in MODES:
        if attention == "cudnn" and not cudnn:
            continue
        kind: Any = {"precision": precision, "attention": attention, "cudnn": cudnn}
        for side, loaded in small.items():
            model = vit.build("golden", side, **kind)
            outputs = jax.jit(model.apply)({"params": loaded}, golden[f"images_{side}"])
            name = f"AugReg checkpoint, {side} pixels, {precision}, {attention}"
            yield Number(name, outputs, tolerance, golden[f"pilot01_{side}"])
        outputs = jax.jit(vit.build("two blocks", 224, **kind).apply)({"params": tree}, wide)
        outputs, name = np.asarray(outputs)[:, :100], "two blocks of ViT-B/16"
        yield Number(f"{name}, {precision}, {attention}", outputs, tolerance, name)


def scores(options: Any) -> Iterator[Number]:
    """Yields an eigendecomposition, and labels and scores of calibrators fitted on the device."""
    file, expected = (np.load(TESTS / "golden" / f"{name}.npz") for name in ("features", "scores"))
    rows = np.random.default_rng(0).standard_normal((600, 256)) * np.linspace(0.1, 2.0, 256)
    values, vectors = np.linalg.eigh(rows.T @ rows)
    scatter = jnp.asarray(rows.T @ rows, jnp.float32)
    if jax.default_backend() != "tpu":  # it compiles for minutes; FDC decomposes on the host there
        eigenvalues, basis = jax.jit(jnp.linalg.eigh)(scatter)
        yield Number("eigenvalues", eigenvalues, 1e-5, values)
        axes, right = np.asarray(basis, float)[:, -64:], vectors[:, -64:]
        yield Number("projector on 64 principal axes", axes @ axes.T, 1e-4, right @ right.T)

    def head(task: int, prefix: str = "") -> LinearHead:
        parts = [f"head_{part}_{task}" for part in ("weight", "bias")]
        return LinearHead(*(jnp.asarray(file.get(prefix + part, file[part])) for part in parts))

    for method in ("fdc", "gaussians"):
        calibrator: Any = calibration.make(method)
        for task in range(5):
            views: dict[str, Any] = {
                name: jnp.asarray(file[key])
                for name in ("adapted", "pretrained", "previous")
                if (key := f"train_{name}_{task}") in file
            }
            views |= {"labels": file[f"train_labels_{task}"], "head": head(task)}
            calibrator.fit_task(classes=file.get(f"head_classes_{task}"), **views)
        calibrator.finalize()
        calibrator.replace_heads([head(task, "final_") for task in range(5)])
        test = [jnp.asarray(file[f"test_{name}"]) for name in ("adapted", "pretrained")]
        for part, result in calibrator.components(*test).items():
            name = method if part == "full" else f"{method} {part}"
            yield Number(f"{name}: labels", result.label, 0.0, expected[f"{name}: labels"])
            right = expected[f"{name}: scores"]
            yield Number(f"{name}: scores", result.task_scores, 1e-4, right)


_BOUNDS = ("finetune", "joint")  # take the step of Cumulative-LoRA


def gradients(options: Any) -> Iterator[Number]:
    """Yields the loss and gradients of a step of every learner in its second task.

    State and trained leaves are noise; gradients are the optimiser's first moments after the step.
    A gradient is compared by its norm and by its inner product with noise, since rounding of single
    entries, for example by TF32, hardly changes the norm.
    """
    model = vit.build(vit.Variant(width=48, depth=2, heads=3, patch=8, image_size=32), 32)
    mesh, tree = devices.data_mesh(), synthetic.parameters(model, 32)
    backbone = devices.replicate(mesh, jax.tree.map(jnp.asarray, tree))
    batch = devices.split(mesh, synthetic.noise(8, 32, 4, seed=0))
    names = [name for name in learners.names(trained=True) if name not in _BOUNDS]
    for name in names[: 1 if measure.is_trial(options) else None]:
        learner, update, rate = synthetic.learning(name, model, (4, 4))
        rng = np.random.default_rng(0)

        def noisy(path: Any, leaf: Any, rng: Any = rng) -> Any:
            if jnp.result_type(leaf) != "f4":
                return leaf
            noise = 0.05 * rng.standard_normal(jnp.shape(leaf), np.float32)
            # EWC's penalty of strength 1e7 would hide the cross-entropy.
            return 1e-5 * abs(noise) if "importance" in jax.tree_util.keystr(path) else leaf + noise

        state = jax.tree_util.tree_map_with_path(noisy, learner.initial_state())
        frozen, trained = learner.start_task(backbone, state, 1, jax.random.key(1))
        trained = jax.tree_util.tree_map_with_path(noisy, trained)
        frozen, trained = devices.replicate(mesh, (frozen, trained))
        progress = devices.replicate(mesh, update.initialise(trained))
        _, progress, loss = update.step(backbone, frozen, trained, progress, batch, rate)
        yield Number(f"{name}: loss", loss, 1e-4)
        gradients = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(devices.to_host(progress)):
            key = jax.tree_util.keystr(path, simple=True, separator="/")
            if np.ndim(leaf) and "nu" not in key.split("/"):  # no counts, no second moments
                product = np.vdot(leaf, np.random.default_rng(2).standard_normal(leaf.shape))
                gradients[key] = float(np.linalg.norm(leaf.ravel())), float(product)
        # Some gradients are rounding errors around zero, for example that of the keys' bias.
        least = 1e-4 * float(np.linalg.norm([norm for norm, _ in gradients.values()]))
        for key, numbers in gradients.items():
            yield Number(f"{name}: gradient of {key}", numbers, 1e-4, least=least)


def digits(options: Any) -> Iterator[Number]:
    """Yields accuracies of the run on scanned digits, stopped by SIGTERM and resumed."""
    short = measure.is_trial(options) or options.make_golden
    fields: dict[str, Any] = {"classes_per_task": 5, "train.epochs": 3} if short else {}
    fields |= {"data.train_per_class": 36, "data.test_per_class": 24} if short else {}
    folder = Path(options.output).resolve()
    workdir = folder / "digits_run"
    shutil.rmtree(workdir, ignore_errors=True)
    command = [sys.executable, "main.py", "--config=configs/digits.py", f"--workdir={workdir}"]
    command += [f"--config.cache_dir={folder / 'cache'}"]
    fields |= {"report": False}
    command += [f"--config.{name}={value}" for name, value in fields.items()]
    events, results = workdir / "metrics.jsonl", workdir / "results.json"
    first = subprocess.Popen(command, cwd=ROOT)
    while first.poll() is None and not (events.exists() and '"epoch"' in events.read_text()):
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    first.wait()
    yield Number("the run ends at SIGTERM before its end", results.exists(), 0.0, False)
    subprocess.run(command, cwd=ROOT, check=True)
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    epochs = [(line["task"], line["epoch"]) for line in lines if line["event"] == "epoch"]
    yield Number("epochs that were trained twice", len(epochs) - len(set(epochs)), 0.0, 0)
    accuracy, whole = (
        json.loads(path.read_text())["accuracy"]
        for path in (results, TESTS / "golden" / "digits.json")
    )
    for name, tolerance in ACCURACIES.items():
        yield Number(f"accuracy, {name}", accuracy[name], tolerance, "" if short else whole[name])
