import json

import jax
import numpy as np

from benchmarks import encoder_forms, synthetic
from tests import benchmark_runs

SMALL = ("--variant=digits", "--image_size=32", "--batch_size=4", "--warm_up=1", "--repeats=2")


def test_three_forms_with_the_same_gradients(tmp_path):
    done = benchmark_runs.bench("encoder_forms", tmp_path, *SMALL, "--output=f.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "f.json").read_text())["contenders"]
    assert list(found) == ["unrolled", "scanned", "rematerialised"]
    for each in list(found.values())[1:]:
        # Another order of sums, so other forms did run, and the same gradients.
        assert 0.0 < each["largest_difference"] < 1e-4
    for each in found.values():
        assert each["compile_seconds"] > 0 and each["temporary_bytes"] > 0
        assert each["images_per_second"] > 0


def test_stacked_parameters_hold_all_blocks_but_the_last():
    problem = synthetic.problem("digits", 32, 1, "parity")
    stacked = encoder_forms.stacked(problem.parameters, 4)["Transformer"]
    assert sorted(stacked) == ["encoder_norm", "encoderblock_3", "posembed_input", "stacked"]
    expected = problem.parameters["Transformer"]
    for block in range(3):
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.tree.map(lambda leaf, at=block: leaf[at], stacked["stacked"]),
            expected[f"encoderblock_{block}"],
        )


def test_fused_attention_needs_a_gpu(tmp_path):
    done = benchmark_runs.bench("encoder_forms", tmp_path, *SMALL, "--precision=fast", "--cudnn")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("benchmarks.encoder_forms: encoder.attention: cudnn needs")
