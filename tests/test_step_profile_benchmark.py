import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import step_profile
from tests import benchmark_runs

STEP = "jit(step)/jvp(VisionTransformer)/Transformer/encoderblock_1"
ATTENTION = f"{STEP}/MultiHeadDotProductAttention_1"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (f"{STEP}/MlpBlock_3/Dense_0/dot_general", "products of the MLP"),
        (f"{STEP}/MlpBlock_3/erf", "GELU"),
        (f"{ATTENTION}/key/dot_general", "query, key, value, out"),
        (f"{ATTENTION}/bqhd,bkhd->bhqk/dot_general", "products of attention"),
        (f"{ATTENTION}/reduce_max", "softmax"),
        (f"{STEP}/LayerNorm_2/rsqrt", "norms"),
        (f"{STEP}/add", "residuals"),
        ("jit(step)/jvp(VisionTransformer)/embedding/dot_general", "embedding"),
        ("jit(step)/sqrt", step_profile.OTHER),
        ("", step_profile.OTHER),
    ],
)
def test_operations_belong_to_parts(name, part):
    assert step_profile.part_of(name) == part


def test_names_of_a_compiled_program_tell_what_was_asked_for():
    def function(x):
        with jax.named_scope("first"):
            y = x @ x
        with jax.named_scope("second"):
            return jnp.sin(y) + 1.0

    compiled = jax.jit(function).lower(jnp.ones((8, 8))).compile()
    found = step_profile.names(compiled.as_text())
    assert any("first/dot_general" in name for name in found.values())
    assert any("second" in name for name in found.values())


def test_an_instruction_without_a_name_has_that_of_what_it_calls():
    program = """
%fused (p: f32[2]) -> f32[2] {
  %p = f32[2] parameter(0)
  ROOT %sine = f32[2] sine(%p), metadata={op_name="jit(f)/sin"}
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2] parameter(0)
  ROOT %fusion.1 = f32[2] fusion(%a), kind=kLoop, calls=%fused
}
"""
    assert step_profile.names(program) == {"sine": "jit(f)/sin", "fusion.1": "jit(f)/sin"}


def test_a_profile_of_a_small_encoder(tmp_path):
    small = ("--variant=digits", "--image_size=32", "--batch_size=8")
    done = benchmark_runs.bench(
        "step_profile", tmp_path, *small, "--warm_up=1", "--repeats=2", "--output=p.json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "p.json").read_text())["milliseconds"]
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [*found, "a step"]
    expected = {"products of the MLP", "query, key, value, out", "products of attention", "norms"}
    assert expected < found.keys()
    assert all(found[part] > 0 for part in expected)
