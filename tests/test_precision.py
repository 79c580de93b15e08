"""What post-hoc methods leave to the precision of a device, seen in the programs they compile."""

import re

import jax
import pytest

from fdc_jax.posthoc.__main__ import main
from tests.learners import toy


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
