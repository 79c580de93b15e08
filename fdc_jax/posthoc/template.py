"""An example feature file, and how to dump one's own from PyTorch."""

import os
from pathlib import Path

import numpy as np

from fdc_jax.errors import InputError
from fdc_jax.machine.files import write_npz

HOW_TO = """\
wrote {path}: {num_tasks} tasks with {num_classes} classes of made-up features. Try it:

    python -m fdc_jax posthoc {path} --output=calibrated.npz

Dump the same arrays from PyTorch (encoder: images -> head-input features; in eval mode):

    arrays, cat = {{}}, lambda features: torch.cat(features).float().cpu().numpy()
    with torch.no_grad():                       # after training task t = 0, 1, ...; no augmentation
        arrays[f"train_adapted_{{t}}"] = cat([encoder(x) for x, y in task_loader])
        arrays[f"train_pretrained_{{t}}"] = cat([pretrained(x) for x, y in task_loader])  # optional
        arrays[f"train_labels_{{t}}"] = torch.cat([y for x, y in task_loader]).cpu().numpy()
        arrays[f"head_weight_{{t}}"] = head.weight.detach().cpu().numpy().copy()
        arrays[f"head_bias_{{t}}"] = head.bias.detach().cpu().numpy().copy()
    # after the last task: test_adapted, test_pretrained and test_labels likewise, then
    numpy.savez("features.npz", **arrays)

task_loader must not shuffle. Rows of a head stand in ascending order of their labels; of one head
that grows or covers all classes, save the task's own rows, such as weight[10:20]. They are copied,
since the head may be trained on. If it was, in later tasks or by an alignment of all heads,
add what it ended as, after the last task: final_head_weight_{{t}} and final_head_bias_{{t}}.
For --method=gaussians, train_previous_{{t}} is what encoder gives for the same images just before
training task t = 1, 2, ... All arrays are described in docs/features.md."""


def write_template(path: str | os.PathLike[str]) -> str:
    """Writes the example as an `.npz`; returns what to say.

    Raises:
        InputError: the path exists already, ends otherwise, or cannot be written.
    """
    path, arrays = Path(path), example()
    if path.exists():
        raise InputError(f"--template: {path} exists already")
    if path.suffix != ".npz":
        raise InputError(f"--template: expected a name that ends in .npz, found {path}")
    write_npz(path, arrays)
    tasks = sum(name.startswith("head_weight") for name in arrays)
    classes = sum(len(np.unique(arrays[f"train_labels_{t}"])) for t in range(tasks))
    return HOW_TO.format(path=path, num_tasks=tasks, num_classes=classes)


def example(
    num_tasks: int = 5,
    classes_per_task: int = 4,
    width: int = 48,
    per_class: int = 60,
    test_per_class: int = 25,
) -> dict[str, np.ndarray]:
    """Features with the structure that matters here: tasks in different, overlapping subspaces.

    A class is a centre plus noise that is strong within the task's subspace and weaker elsewhere.
    The adapted view drifts with every task, and each head is a ridge classifier of its own task
    alone, so that heads compete without ever having seen each other's inputs.

    Returns:
        The arrays of a feature file with two views, the same in each call.
    """
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    shared = 0.1 * rng.normal(size=width)
    drifts = 0.2 * rng.normal(size=(num_tasks, width, width)) / np.sqrt(width)
    tests: list[np.ndarray] = []

    def by_encoder(pretrained: np.ndarray, tasks: int) -> np.ndarray:
        """Returns features as the encoder after so many tasks has them."""
        return pretrained @ (np.eye(width) + drifts[:tasks].sum(axis=0))

    for t in range(num_tasks):
        basis = np.linalg.qr(rng.normal(size=(width, 8)))[0].T
        centre = shared + rng.normal(size=width) / np.sqrt(width)
        centres = centre + 3.5 * rng.normal(size=(classes_per_task, width)) / np.sqrt(width)

        def draw(count: int, centres=centres, basis=basis) -> tuple[np.ndarray, np.ndarray]:
            rows = np.repeat(np.arange(len(centres)), count)
            inside = 1.6 * rng.normal(size=(len(rows), len(basis))) @ basis
            return centres[rows] + inside + 0.8 * rng.normal(size=(len(rows), width)), rows

        pretrained, rows = draw(per_class)
        adapted = by_encoder(pretrained, t + 1)
        # Ridge regression; targets are 0 in the mean, so the bias has no penalty.
        targets = 10.0 * (np.eye(classes_per_task)[rows] - 1.0 / classes_per_task)
        centred = adapted - adapted.mean(axis=0)
        inner = centred.T @ centred + 10.0 * np.eye(width)
        weight = np.linalg.solve(inner, centred.T @ targets).T
        of_task = {"train_adapted": adapted, "train_pretrained": pretrained}
        of_task |= {"train_previous": by_encoder(pretrained, t)} if t else {}
        of_task |= {"head_weight": weight, "head_bias": -weight @ adapted.mean(axis=0)}
        of_task |= {"train_labels": t * classes_per_task + rows}
        arrays |= {f"{name}_{t}": array for name, array in of_task.items()}
        tests.append(draw(test_per_class)[0])
    pretrained = np.concatenate(tests)
    arrays |= {"test_adapted": by_encoder(pretrained, num_tasks), "test_pretrained": pretrained}
    arrays["test_labels"] = np.repeat(np.arange(num_tasks * classes_per_task), test_per_class)
    return {
        name: array.astype(np.float32) if array.dtype.kind == "f" else array
        for name, array in arrays.items()
    }
