"""Programs as TPUs and GPUs get them, checked where there is neither; and what is read of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ahead_of_time
from tests import small_runs


@pytest.mark.ci
def test_programs_of_all_learners_for_tpus_and_gpus():
    done = subprocess.run(
        [sys.executable, "-m", "tests.lowered_programs"],
        cwd=Path(__file__).resolve().parents[1],
        env=small_runs.with_devices(4),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "no program surprises\n"


def test_a_product_is_float32_if_an_operand_is():
    text = """
#loc7 = loc("jit(f)/Transformer/dot_general"(#loc1))
  %1 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<4x8xbf16>, tensor<8x2xbf16>) -> tensor<4x2xf32> loc(#loc7)
  %2 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<4x8xf32>, tensor<8x2xbf16>) -> tensor<4x2xf32> loc(#loc7)
  %3 = stablehlo.dot_general %a, %b, contracting_dims = [0] x [0], precision = [HIGHEST, HIGHEST] : (tensor<8xf32>, tensor<8x2xf32>) -> tensor<2xf32> loc(#loc)
"""  # noqa: E501
    assert ahead_of_time.float32_products(text) == [
        ([[4, 8], [8, 2]], "jit(f)/Transformer/dot_general"),
        ([[8], [8, 2]], ""),
    ]


def test_exchanged_arrays_are_counted_each():
    text = """
  %all-reduce.1 = (f32[10,2]{1,0}, bf16[3]{0}) all-reduce(%a, %b), channel_id=1
  ROOT %gather = f32[12,128]{1,0} all-gather(%c), dimensions={0}
  %add = f32[2]{0} add(%d, %e)
"""
    expected = [("all-reduce", 80), ("all-reduce", 6), ("all-gather", 12 * 128 * 4)]
    assert ahead_of_time.collectives(text) == expected


def test_cycles_of_loops_count_every_turn():
    text = """
%body (p: f32[2]) -> f32[2] {
  ROOT %sine = f32[2] sine(%p), metadata={op_name="jit(f)/MlpBlock_3/erf"}, backend_config={"estimated_cycles":"7"}
}

%condition (q: s32[]) -> pred[] {
  %bound = s32[]{:T(128)} constant(4)
  ROOT %less = pred[]{:T(512)} compare(%q, %bound), direction=LT
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %copy.1 = f32[2] copy(%a), backend_config={"estimated_cycles":"5"}
  ROOT %while = f32[2] while(%copy.1), condition=%condition, body=%body
}
"""  # noqa: E501
    assert ahead_of_time.cycles(text) == {"GELU": 28, "copies": 5}


def test_names_of_a_compiled_program_tell_the_part_of_the_encoder():
    program = """
%fused (p: f32[2]) -> f32[2] {
  %p = f32[2] parameter(0)
  ROOT %sine = f32[2] sine(%p), metadata={op_name="jit(f)/MlpBlock_3/Dense_0/dot_general"}
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2] parameter(0)
  ROOT %fusion.1 = f32[2] fusion(%a), kind=kLoop, calls=%fused
}
"""
    found = ahead_of_time.names(program)
    assert found["fusion.1"] == found["sine"]
    assert ahead_of_time.part_of(found["sine"]) == "products of the MLP"
    assert ahead_of_time.part_of("jit(step)/sqrt") == ahead_of_time.PARTS[-1][0]
