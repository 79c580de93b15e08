"""Precision: products of post-hoc methods, in the programs they compile, and JAX's 64-bit mode."""

import re

import jax
import numpy as np
import pandas as pd
import pytest

import fdc_jax
from fdc_jax import export
from fdc_jax.posthoc.command import main
from tests import small_runs
from tests.learners import toy


@pytest.mark.ci
def test_a_program_in_64_bit_mode_gets_the_same_numbers(whole, half, cache, tmp_path):
    """Also of a run that began in 32 bits."""

    def answers(folder):
        run = fdc_jax.open_run(folder)
        return run.predict(run.test_images(np.arange(8)))

    with jax.enable_x64(True):
        small_runs.run(small_runs.config(cache), small_runs.copied(half, tmp_path / "run"))
        found = answers(tmp_path / "run")
        export.write(tmp_path / "run", tmp_path / "out")
        exported = fdc_jax.open_run(tmp_path / "out")
        again = exported.predict(fdc_jax.open_run(whole).test_images(np.arange(8)))
    small_runs.same_outcome(whole, tmp_path / "run")
    pd.testing.assert_frame_equal(found, answers(whole))
    pd.testing.assert_frame_equal(again, answers(whole))


@pytest.mark.ci
def test_no_product_of_a_post_hoc_method_is_left_to_a_device():
    """GPUs would round the factors to 10 bits, TPUs to 7; a CPU never shows it."""
    jax.clear_caches()  # Other tests may have compiled the same.
    with toy.programs_compiled() as programs:
        assert main(["example", "--method=all", "--projections=100", "--quiet"]) == 0
    products = re.findall(r".*stablehlo\.(?:dot_general|convolution).*", "\n".join(programs))
    assert products
    for line in products:
        assert "[HIGHEST, HIGHEST]" in line or "f64" in line, line
