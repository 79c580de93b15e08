"""Programs as TPUs and GPUs get them, checked where there is neither; and what is read of them."""

import pytest

from tests import lowered_programs, small_runs


@pytest.mark.ci
def test_programs_of_all_learners_for_tpus_and_gpus():
    said = small_runs.python("-m", "tests.lowered_programs", env=small_runs.with_devices(4))
    assert said == "no program surprises\n"


def test_a_product_is_float32_if_an_operand_is():
    text = """
#loc7 = loc("jit(f)/Transformer/dot_general"(#loc1))
  %1 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<4x8xbf16>, tensor<8x2xbf16>) -> tensor<4x2xf32> loc(#loc7)
  %2 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<4x8xf32>, tensor<8x2xbf16>) -> tensor<4x2xf32> loc(#loc7)
  %3 = stablehlo.dot_general %a, %b, contracting_dims = [0] x [0], precision = [HIGHEST, HIGHEST] : (tensor<8xf32>, tensor<8x2xf32>) -> tensor<2xf32> loc(#loc)
"""  # noqa: E501
    assert lowered_programs.float32_products(text) == [
        ([[4, 8], [8, 2]], "jit(f)/Transformer/dot_general"),
        ([[8], [8, 2]], ""),
    ]
