"""Tasks fitted apart and joined: the same arrays, byte by byte, for any number of shards."""

import re

import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.calibration.confidence import Confidence
from fdc_jax.features import feature_files
from fdc_jax.machine.files import write_npz
from fdc_jax.posthoc.__main__ import main
from fdc_jax.posthoc.template import example

TASKS = 7


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """A file of seven tasks, heads of which change later."""
    arrays = example(num_tasks=TASKS, classes_per_task=3, width=16, per_class=20)
    for t in range(TASKS):
        arrays[f"final_head_weight_{t}"] = np.float32(1.5) * arrays[f"head_weight_{t}"]
        arrays[f"final_head_bias_{t}"] = arrays[f"head_bias_{t}"]
    path = tmp_path_factory.mktemp("features") / "features.npz"
    write_npz(path, arrays)
    return path


def succeeds(*arguments):
    assert main([*map(str, arguments)]) == 0


def whole(features, tmp_path, method):
    path = tmp_path / f"whole_{method}.npz"
    succeeds(features, f"--method={method}", f"--calibrator={path}")
    return content(path)


def content(path):
    with np.load(path) as file:
        return {name: file[name].tobytes() for name in file.files}


def in_shards(features, folder, shards, *more, name="part"):
    parts = [folder / f"{name}_{i}.npz" for i in range(shards)]
    for i, part in enumerate(parts):
        succeeds(features, f"--shard={i}/{shards}", f"--output={part}", *more)
    return parts


@pytest.mark.parametrize("shards", [1, 3, 7, 64])
def test_one_pass_gives_three_calibrators_byte_by_byte(features, tmp_path, shards, capsys):
    parts = in_shards(features, tmp_path, shards)
    # In whatever order they are named; and one that was lost is fitted again alone.
    before = content(parts[0])
    parts[0].unlink()
    assert main(["--merge", *map(str, parts), f"--output={tmp_path / 'no.npz'}"]) == 2
    assert not (tmp_path / "no.npz").exists()
    succeeds(features, f"--shard=0/{shards}", f"--output={parts[0]}")
    assert content(parts[0]) == before
    succeeds("--merge", *reversed(parts), f"--output={tmp_path / 'calibrator.npz'}")
    names = {"gaussians": "", "mahalanobis": "_mahalanobis", "ncm": "_ncm"}
    for method, ending in names.items():
        path, expected = tmp_path / f"calibrator{ending}.npz", whole(features, tmp_path, method)
        if method == "gaussians":  # No confidence is learned in shards.
            one = calibration.load(tmp_path / "whole_gaussians.npz")
            assert one.confidence.losses.any()
            one.confidence = Confidence()
            one.save(tmp_path / "without.npz")
            expected = content(tmp_path / "without.npz")
        assert content(path) == expected, method


@pytest.mark.parametrize("shards", [1, 3, 7, 64])
def test_fdc_takes_two_passes(features, tmp_path, shards, capsys):
    parts = in_shards(features, tmp_path, shards, "--method=fdc")
    basis, end = tmp_path / "basis.npz", tmp_path / "fdc.npz"
    succeeds("--merge", *parts, f"--output={basis}")
    assert f"second pass: all shards with --basis={basis}" in capsys.readouterr().out
    more = "--method=fdc", f"--basis={basis}"
    parts = in_shards(features, tmp_path, shards, *more, name="second")
    succeeds("--merge", *parts, f"--basis={basis}", f"--output={end}")
    assert content(end) == whole(features, tmp_path, "fdc")


def test_a_dry_run_says_what_would_be_read(features, tmp_path, capsys):
    more = "--dry_run", "--method=fdc"
    succeeds(features, "--shard=1/3", *more)
    said = capsys.readouterr().out
    stored = feature_files.load(features)
    chosen = stored.tasks[2:4]
    size = sum(
        each.adapted.nbytes + each.pretrained.nbytes + each.previous.nbytes for each in chosen
    )
    assert f"2 tasks, 120 rows, {size:,} bytes, 2 passes, about 0.0" in said
    succeeds(features, "--shard=1/64", *more)
    assert "more shards than tasks" in capsys.readouterr().out


def test_what_does_not_fit_is_one_line(features, tmp_path, capsys):
    one, three = (in_shards(features, tmp_path, n, "--method=ncm", name=f"of{n}") for n in (1, 3))
    other = in_shards(features, tmp_path, 3, "--method=mahalanobis", name="other")
    output = f"--output={tmp_path / 'merged.npz'}"
    basis = tmp_path / "basis.npz"
    succeeds("--merge", *in_shards(features, tmp_path, 1, "--method=fdc"), f"--output={basis}")
    capsys.readouterr()
    wrong = [
        (["--merge", three[0], three[2], output], "expected task 2 .* found task 4"),
        (["--merge", three[0], three[0], output], "expected task 2 .* found task 0"),
        (["--merge", three[0], three[1], output], "task 4 and those after it are in no part"),
        (["--merge", three[0], other[1], three[2], output], "of the same features and methods"),
        (["--merge", *one, output, f"--basis={basis}"], "--basis: expected parts of a second pass"),
        (["--merge", features, output], "expected a file of kind"),
        (["--merge", basis, output], "expected a part, as --shard writes it"),
        (["--merge", *one], "--output: expected"),
        ([features, "--shard=3/3", output], "expected i/n with 0 <= i < n, found '3/3'"),
        ([features, "--shard=x", output], "expected i/n"),
        (["--shard=0/1", output], "expected a feature file"),
        ([features, "--shard=0/1", "--method=anacp", output], "--method: expected one of"),
    ]
    for arguments, message in wrong:
        assert main([*map(str, arguments)]) == 2, arguments
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(message, line), line
