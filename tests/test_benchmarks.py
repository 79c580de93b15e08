"""Every benchmark runs at a tiny size and writes what it says; wrong arguments are one line."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import calibration, flops
from fdc_jax.model import increments, vit
from tests import small_runs

ENCODER = ("--variant=digits", "--image_size=32", "--batch_size=4")
STEP = (*ENCODER, "--warm_up=1", "--repeats=2")
PYTORCH = ("--pytorch=eager",) if importlib.util.find_spec("torch") else ()
SIZES = ("--tasks=2,3", "--images=330", "--classes=22", "--width=16", "--repeats=1")


def tiny(name, *arguments, slow=True):
    return pytest.param(name, arguments, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        tiny("calibration", *SIZES, slow=False),
        tiny("training_step", *STEP, *PYTORCH),
        tiny("extraction", *STEP, "--batches=3", *PYTORCH),
        tiny("learners", *ENCODER, "--learners=inflora", "--classes=2", "--images=6"),
    ],
)
def test_a_benchmark_prints_lines_and_writes_numbers(tmp_path, name, arguments):
    output = tmp_path / "out" / "found.json"
    assert small_runs.python("-m", f"benchmarks.{name}", *arguments, f"--output={output}")
    found = json.loads(output.read_text())
    assert {"fdc_jax", "jax", "commit"} <= found["versions"].keys()
    if name == "calibration":
        check_calibration(found)


def check_calibration(found):
    for result, tasks in zip(found["results"], (2, 3), strict=True):
        assert (result["tasks"], result["images"], result["views"]) == (tasks, 330, 2)
        point = calibration.Point(tasks, 330, 22, 16, 2)
        scalars = sum(2 * task * point.of_task(task)[0] for task in range(tasks))
        assert result["foreign_residual_bytes"] == (4 + 8) * scalars
        # The paper's accounting: bases, prototypes, means and scalars in float32.
        numbers = (tasks * (result["mean_rank"] + 1) + 22) * 16 + 4 * tasks + 3
        assert result["storage_bytes"] == round(4 * (2 * numbers + 2 * tasks))
        assert min(result["fit_seconds"].values()) > 0
        assert min(result["score_milliseconds"]["64"].values()) > 0


# The formula for operations against what the compiler counts --------------------------------------

# Wide enough that the products, which alone the formula counts, are nearly everything.
SMALL = vit.Variant(width=192, depth=3, heads=3)


@pytest.mark.parametrize("rank", [0, 4])
def test_operations_of_a_forward_pass_and_of_a_training_step(rank):
    model, images = vit.VisionTransformer(SMALL), np.zeros((4, 64, 64, 3), np.uint8)
    params = jax.tree.map(
        lambda leaf: jnp.ones(leaf.shape, leaf.dtype), vit.parameter_shapes(model, 64)
    )

    def forward(increment, params, images):
        return model.apply({"params": params}, images, None, increment)

    if rank:
        increment = increments.initialise(jax.random.key(0), SMALL, rank)
        function = jax.grad(lambda *each: forward(*each).sum())
        expected = flops.training_step(SMALL, 64, rank, 4)
    else:
        increment, function, expected = None, forward, 4 * flops.forward(SMALL, 64)
    analysis = jax.jit(function).lower(increment, params, images).compile().cost_analysis()
    assert analysis is not None
    assert analysis["flops"] == pytest.approx(expected, rel=0.03)
