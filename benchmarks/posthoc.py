"""Speed of FDC on features: fitting and scoring, against a plain loop over tasks.

    python benchmarks/posthoc.py --output=posthoc.json
    python benchmarks/posthoc.py --cases=20x100 --forward_ms=2.7     # share of an encoder's forward
    python benchmarks/posthoc.py --cases=20x100 --whitened           # the whitened affinity, too

Each case is TASKSxCLASSES, with @WIDTH behind it for features other than --width wide. The loop
follows Algorithm 1 line by line in float32 NumPy, and in PyTorch for scoring where that is
installed; both run in the same process on the same features, and the share of equal labels is
reported. Beyond --loop_fit_tasks the loop takes over the fitted statistics. Times are medians after
a warm-up call; the first task and the first scoring call, which compile, are reported apart.
"""

import argparse
import platform
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Run as a file, the repository's root is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import check_numbers, run, write_report
from fdc_jax import calibration, heads
from fdc_jax.calibration.components import WHITENED, WHITENED_CLASSES
from fdc_jax.errors import InputError

# One forward of ViT-B/16 at 224 pixels.
FORWARD_FLOPS = 35.1e9


def features(
    rng: np.random.Generator, axes: np.ndarray, centres: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Class centres plus noise: about 80 % of its energy in an eighth of the axes, as in a ViT.

    `axes` permutes the axes, which is a cheap rotation, so that tasks differ in their subspaces.
    """
    strong = len(axes) // 8
    scale = np.full(len(axes), np.sqrt(0.25 * strong / (len(axes) - strong)), np.float32)
    scale[:strong] = 1.0
    noise = rng.standard_normal((len(rows), len(axes)), np.float32) * scale
    return centres[rows] + noise[:, axes]


def make_tasks(
    num_tasks: int, num_classes: int, width: int, per_class: int, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Yields training arrays and a few test features of one task at a time."""
    rng = np.random.default_rng(seed)
    per_task = num_classes // num_tasks
    for t in range(num_tasks):
        centres = 0.2 * rng.standard_normal((per_task, width), np.float32)
        axes = rng.permutation(width)
        rows = np.repeat(np.arange(per_task), per_class)
        test_rows = np.arange(max(per_task, 2048 // num_tasks)) % per_task
        pretrained, test = (features(rng, axes, centres, each) for each in (rows, test_rows))
        turn = np.float32(1.0 + 0.01 * t)
        weight = centres / np.linalg.norm(centres, axis=1, keepdims=True)
        yield {
            "adapted": turn * pretrained,
            "pretrained": pretrained,
            "labels": t * per_task + rows,
            "head": heads.LinearHead(jnp.asarray(8 * weight), jnp.zeros(per_task)),
            "test": test,
        }


class Loop:
    """FDC with its default settings as a plain NumPy loop over tasks."""

    def __init__(self):
        self.tasks: list[dict[str, Any]] = []
        self.foreign: list[list[np.ndarray]] = [[], []]
        self.references: list[tuple[float, float, float]] = []

    def fit_task(self, task: dict[str, Any]) -> None:
        """Lines 5 to 11 of Algorithm 1."""
        stored: dict[str, Any] = {"views": []}
        for view, g in enumerate((task["adapted"], task["pretrained"])):
            mean = g.mean(axis=0)
            values, vectors = np.linalg.eigh((g - mean).T @ (g - mean) / len(g))
            energy = np.cumsum(values[::-1].clip(0)) / values.clip(0).sum()
            basis = vectors[:, ::-1][:, : min(int(np.sum(energy < 0.75)) + 1, len(g) - 1)]
            unit = g / np.linalg.norm(g, axis=1, keepdims=True)
            labels = np.unique(task["labels"])
            prototypes = np.stack([unit[task["labels"] == c].mean(axis=0) for c in labels])
            prototypes /= np.linalg.norm(prototypes, axis=1, keepdims=True)
            entry = {"mean": mean, "basis": basis, "prototypes": prototypes}
            residual, affinity = self.measure(entry, g, unit)
            entry |= {"residual": (residual.mean(), residual.std())}
            entry |= {"affinity": (affinity.mean(), affinity.std())}
            for earlier in self.tasks:
                other = earlier["views"][view]
                u = self.measure(other, g, unit)[0] - other["residual"][0]
                self.foreign[view].append(u / other["residual"][1])
            stored["views"].append(entry)
        basis, head = stored["views"][0]["basis"], task["head"]
        weight = np.asarray(head.weight)
        stored["weight"] = 0.5 * weight + 0.5 * (weight @ basis) @ basis.T
        stored["bias"] = np.asarray(head.bias)
        stored["scale"] = (task["adapted"] @ stored["weight"].T + stored["bias"]).max(axis=1).std()
        self.tasks.append(stored)

    def borrow(self, fdc: calibration.FDC) -> None:
        """Takes the statistics of a finalized calibrator instead of fitting."""
        for task, head in zip(fdc.tasks, fdc.heads, strict=True):
            views = [
                {
                    "mean": view.mean,
                    "basis": view.basis.T,
                    "prototypes": view.prototypes,
                    "residual": (view.residual_mean, view.residual_std),
                    "affinity": (1.0 - view.distance_mean, view.distance_std),
                }
                for view in task.views
            ]
            basis, weight = views[0]["basis"], np.asarray(head.weight)
            self.tasks.append(
                {
                    "views": views,
                    "weight": 0.5 * weight + 0.5 * (weight @ basis) @ basis.T,
                    "bias": np.asarray(head.bias),
                    "scale": np.float32(task.filtered_scale),
                }
            )
        self.references = [
            (each.mean, each.variance, each.scale) for each in fdc.references if each is not None
        ]

    @staticmethod
    def measure(entry: dict[str, Any], g: np.ndarray, unit: np.ndarray) -> tuple[Any, Any]:
        """Residual ratio and affinity of features against one task."""
        centred = g - entry["mean"]
        total = (centred**2).sum(axis=1)
        inside = ((centred @ entry["basis"]) ** 2).sum(axis=1)
        return (total - inside) / total, (unit @ entry["prototypes"].T).max(axis=1)

    def finalize(self) -> None:
        """Line 13."""
        for pairs in self.foreign:
            means = np.array([pair.mean() for pair in pairs])
            spread = np.array([pair.var() for pair in pairs])
            mean, variance = means.mean(), np.mean(spread + (means - means.mean()) ** 2)
            u = np.concatenate(pairs)
            ratio = 0.5 * (u**2 - (u - mean) ** 2 / variance - np.log(variance))
            self.references.append((mean, variance, np.median(np.abs(ratio))))

    def score(self, adapted: np.ndarray, pretrained: np.ndarray) -> np.ndarray:
        """Lines 14 to 24; returns labels, which are consecutive over tasks."""
        units = [g / np.linalg.norm(g, axis=1, keepdims=True) for g in (adapted, pretrained)]
        scores, classes, first = [], [], 0
        for task in self.tasks:
            logits = adapted @ task["weight"].T + task["bias"]
            score = logits.max(axis=1)
            for view, g in enumerate((adapted, pretrained)):
                entry = task["views"][view]
                residual, affinity = self.measure(entry, g, units[view])
                u = (residual - entry["residual"][0]) / entry["residual"][1]
                q = (affinity - entry["affinity"][0]) / entry["affinity"][1]
                mean, variance, tau = self.references[view]
                ratio = 0.5 * (u**2 - (u - mean) ** 2 / variance - np.log(variance))
                score = score + task["scale"] * (np.tanh(q) - np.tanh(ratio / tau))
            scores.append(score)
            classes.append(first + logits.argmax(axis=1))
            first += logits.shape[1]
        best = np.argmax(scores, axis=0)
        return np.array(classes)[best, np.arange(len(best))]

    def torch_score(self, torch: Any, device: str) -> Callable[[Any, Any], Any]:
        """The same loop over tensors on a device, without gradients."""
        names = ("weight", "bias")

        def tensor(array: Any) -> Any:
            return torch.as_tensor(np.asarray(array), device=device)

        tasks: list[dict[str, Any]] = [
            {name: tensor(task[name]) for name in names}
            | {"scale": float(task["scale"])}
            | {
                "views": [
                    {name: tensor(view[name]) for name in ("mean", "basis", "prototypes")}
                    | {"residual": view["residual"], "affinity": view["affinity"]}
                    for view in task["views"]
                ]
            }
            for task in self.tasks
        ]

        def score(adapted: Any, pretrained: Any) -> Any:
            with torch.no_grad():
                views = [tensor(adapted), tensor(pretrained)]
                units = [g / g.norm(dim=1, keepdim=True) for g in views]
                scores, classes, first = [], [], 0
                for task in tasks:
                    logits = views[0] @ task["weight"].T + task["bias"]
                    score, local = logits.max(dim=1)
                    for view, g in enumerate(views):
                        entry = task["views"][view]
                        centred = g - entry["mean"]
                        total = (centred**2).sum(dim=1)
                        inside = ((centred @ entry["basis"]) ** 2).sum(dim=1)
                        affinity = (units[view] @ entry["prototypes"].T).max(dim=1).values
                        u = ((total - inside) / total - entry["residual"][0]) / entry["residual"][1]
                        q = (affinity - entry["affinity"][0]) / entry["affinity"][1]
                        mean, variance, tau = (float(x) for x in self.references[view])
                        ratio = 0.5 * (u**2 - (u - mean) ** 2 / variance - np.log(variance))
                        score = score + task["scale"] * (q.tanh() - (ratio / tau).tanh())
                    scores.append(score)
                    classes.append(first + local)
                    first += logits.shape[1]
                best = torch.stack(scores).argmax(dim=0)
                return torch.stack(classes)[best, torch.arange(len(best), device=device)].cpu()

        return score


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median time of a call; the caller has warmed it up."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def flops_per_image(calibrator: calibration.FDC, width: int) -> float:
    """Multiply-adds times two of scoring one image in both views."""
    num_classes = sum(len(rows) for rows in calibrator.classes)
    ranks = sum(len(view.basis) for task in calibrator.tasks for view in task.views)
    views = calibrator.num_views
    # The whitened metric maps the feature once and compares it with every class once more.
    whitened = views * (width + num_classes) if calibrator.shared else 0
    return 2.0 * width * (num_classes + ranks + views * num_classes + whitened) + (
        6.0 * width * views * calibrator.num_tasks
    )


def whitened_scorers(calibrator: calibration.FDC) -> dict[str, Callable[[Any, Any], Any]]:
    """Both variants of the whitened affinity over the same statistics."""
    by_class = calibration.FDC(**WHITENED_CLASSES).settings.affinity
    return {
        "whitened": calibrator.score,
        "whitened_classes": lambda g, h: calibrator.terms(g, h).fuse(affinity=by_class),
    }


def run_case(
    num_tasks: int, num_classes: int, width: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Measures one case."""
    per_class = options.images_per_class
    shape = (num_tasks, num_classes, width, per_class)
    fdc, loop = calibration.FDC(), Loop()
    whitened = calibration.FDC(**WHITENED) if options.whitened else None
    fits_loop = num_tasks <= options.loop_fit_tasks
    seconds: dict[str, float] = {"fdc": 0.0, **({"loop": 0.0} if fits_loop else {})}
    if whitened is not None:
        seconds["whitened"] = 0.0
    first_task, tests = None, []
    for task in make_tasks(*shape):
        tests.append(task["test"])
        start = time.perf_counter()
        fdc.fit_task(task["adapted"], task["labels"], task["head"], task["pretrained"])
        middle = time.perf_counter()
        if fits_loop:
            loop.fit_task(task)
        end = time.perf_counter()
        if whitened is not None:
            whitened.fit_task(task["adapted"], task["labels"], task["head"], task["pretrained"])
        last = time.perf_counter()
        if first_task is None:  # Compiles.
            first_task = middle - start
        else:
            seconds["fdc"] += middle - start
            if fits_loop:
                seconds["loop"] += end - middle
            if whitened is not None:
                seconds["whitened"] += last - end
    start = time.perf_counter()
    fdc.finalize()
    middle = time.perf_counter()
    seconds["fdc"] += middle - start
    if fits_loop:
        loop.finalize()
        seconds["loop"] += time.perf_counter() - middle
    else:
        loop.borrow(fdc)
    if whitened is not None:
        start = time.perf_counter()
        whitened.finalize()
        seconds["whitened"] += time.perf_counter() - start
    pretrained = np.concatenate(tests)
    pretrained = pretrained[np.random.default_rng(1).permutation(len(pretrained))[:1024]]
    adapted = np.float32(1.0 + 0.01 * num_tasks) * pretrained
    result: dict[str, Any] = {
        "tasks": num_tasks,
        "classes": num_classes,
        "width": width,
        "images_per_class": per_class,
        "mean_rank": float(np.mean([len(v.basis) for t in fdc.tasks for v in t.views])),
        "fdc_storage_bytes": fdc.storage_bytes,
        "fit_seconds_without_first_task": seconds,
        "fit_seconds_first_task": first_task,
        "fit_speedup": seconds["loop"] / seconds["fdc"] if fits_loop else None,
        "batches": {},
    }
    start = time.perf_counter()
    equal = np.mean(fdc.score(adapted, pretrained).label == loop.score(adapted, pretrained))
    result["first_score_seconds"] = time.perf_counter() - start
    result["equal_labels"] = float(equal)
    flops = flops_per_image(fdc, width)
    result["flops_per_image"] = flops
    result["flops_share_of_forward"] = flops / FORWARD_FLOPS
    scorers: dict[str, Callable[[Any, Any], Any]] = {"fdc": fdc.score, "loop": loop.score}
    if whitened is not None:
        scorers |= whitened_scorers(whitened)
        result["whitened"] = {
            "storage_bytes": whitened.storage_bytes,
            "storage_ratio": whitened.storage_bytes / fdc.storage_bytes,
            "flops_share_of_forward": flops_per_image(whitened, width) / FORWARD_FLOPS,
        }
    torch = import_torch()
    if torch is not None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        scorers[f"torch_{device}"] = loop.torch_score(torch, device)
    for size in (64, 1024):
        g, h = adapted[:size], pretrained[:size]
        entry = {}
        for name, score in scorers.items():
            score(g, h)
            entry[name] = 1e3 * median_seconds(lambda s=score: s(g, h), options.repeats)  # noqa: B023
        result["batches"][str(size)] = {
            "milliseconds": entry,
            "speedup": entry["loop"] / entry["fdc"],
        }
        if options.forward_ms:
            result["batches"][str(size)]["share_of_forward"] = {
                name: each / size / options.forward_ms for name, each in entry.items()
            }
    result["peak_memory_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return result


def import_torch() -> Any:
    """PyTorch, or None where it is not installed."""
    try:
        import torch  # pyright: ignore
    except ImportError:
        return None
    return torch


def line(result: dict[str, Any]) -> str:
    """A result for the screen."""
    fit, batches = result["fit_seconds_without_first_task"], result["batches"]
    score = batches["1024"]
    loop = f" (loop {fit['loop']:.2f} s)" if "loop" in fit else ""
    whitened = ""
    if "whitened" in result:
        of, small = result["whitened"], batches["64"]["milliseconds"]
        whitened = (
            f"; whitened: fit {fit['whitened']:.2f} s, {small['whitened']:.2f} ms per 64 "
            f"({small['whitened_classes']:.2f} ms class by class), "
            f"{100 * of['flops_share_of_forward']:.3f}% of a forward's operations, "
            f"{of['storage_bytes'] / 2**20:.2f} MiB, {of['storage_ratio']:.2f} times FDC's"
        )
    return (
        f"{result['tasks']} tasks, {result['classes']} classes, width {result['width']}, rank "
        f"{result['mean_rank']:.0f}: "
        f"fit {fit['fdc']:.2f} s{loop}, score "
        f"{score['milliseconds']['fdc']:.1f} ms per 1024 (loop {score['milliseconds']['loop']:.1f} "
        f"ms, {score['speedup']:.1f}x), {batches['64']['milliseconds']['fdc']:.2f} ms per 64, "
        f"{100 * result['flops_share_of_forward']:.3f}% of the operations of a ViT-B/16 forward, "
        f"{100 * result['equal_labels']:.2f}% equal labels{whitened}"
    )


def main() -> None:
    """Runs all cases, prints a line for each and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--cases", default="20x100,20x300,1000x10000")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--images_per_class", type=int, default=20)
    parser.add_argument(
        "--loop_fit_tasks", type=int, default=100, help="fit the loop up to this many tasks"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--whitened", action="store_true", help="measure the whitened affinity beside FDC"
    )
    parser.add_argument("--forward_ms", type=float, help="measured encoder forward per image")
    parser.add_argument("--output", help="a .json file for the measurements")
    options = parser.parse_args()
    check_numbers(options, "width", "images_per_class", "repeats")
    results = []
    for case in options.cases.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)(?:@(\d+))?", case)
        num_tasks, num_classes, width = (
            map(int, match.groups(options.width)) if match else (0, 0, 0)
        )
        if num_tasks < 2 or num_classes % num_tasks:
            raise InputError(f"--cases: expected tasks that divide the classes, found {case}")
        results.append(run_case(num_tasks, num_classes, width, options))
        print(line(results[-1]), flush=True)
    found = {
        "results": results,
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "processor": platform.machine(),
    }
    write_report("benchmarks.posthoc", options, found)


if __name__ == "__main__":
    sys.exit(run("benchmarks/posthoc.py", main))
