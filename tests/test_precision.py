"""Precision: products of post-hoc methods, in the programs they compile, and JAX's 64-bit mode."""

import jax
import numpy as np
import pandas as pd
import pytest

import fdc_jax
from fdc_jax.posthoc.posthoc_command import main
from tests import small_runs
from tests.learners import toy


@pytest.mark.ci
def test_a_program_in_64_bit_mode_gets_the_same_numbers(finished_run, stopped_run, cache, tmp_path):
    """Also of a run that began in 32 bits."""

    def answers(folder):
        run = fdc_jax.open_run(folder)
        return run.predict(run.test_images(np.arange(8)))

    with jax.enable_x64(True):
        small_runs.run(small_runs.config(cache), small_runs.copied(stopped_run, tmp_path / "run"))
        actual = answers(tmp_path / "run")
    small_runs.same_outcome(finished_run, tmp_path / "run")
    pd.testing.assert_frame_equal(actual, answers(finished_run))


@pytest.mark.ci
def test_products_of_posthoc_methods_have_stated_precision():
    """GPUs would round the factors to 10 bits, TPUs to 7; a CPU never shows it."""
    jax.clear_caches()  # Other tests may have compiled the same.
    with toy.products_compiled() as products:
        assert main(["example", "--method=all", "--projections=100", "--quiet"]) == 0
    assert products
    for line in products:
        assert "[HIGHEST, HIGHEST]" in line or "f64" in line, line
