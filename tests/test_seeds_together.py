"""Seeds trained by one program: what each leaves is what it leaves alone, killed or not."""

import json

import pytest

from tests import interruptions
from tests.test_several_processes import nearly_same, start

SEEDS = "--config.seed=1,2"
TOGETHER = (SEEDS, "--config.train.seeds_together=True")


@pytest.fixture(scope="module")
def apart(tmp_path_factory, cache):
    """Two seeds, one after the other."""
    workdir = tmp_path_factory.mktemp("runs") / "apart"
    interruptions.finish(start(workdir, SEEDS, "--quiet", cache=cache))
    return workdir


@pytest.mark.slow
def test_seeds_together_leave_what_each_leaves_alone(apart, tmp_path, cache):
    _, errors = interruptions.finish(start(tmp_path / "run", *TOGETHER, cache=cache))
    for seed in (1, 2):
        nearly_same(tmp_path / "run" / f"seed_{seed}", apart / f"seed_{seed}")
        assert f"seed {seed}, after task 2/2" in errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    expected = json.loads((apart / "summary.json").read_text())
    assert summary["accuracy"]["fdc"]["mean"] == pytest.approx(
        expected["accuracy"]["fdc"]["mean"], abs=1.0
    )


@pytest.mark.slow
def test_killed_together_and_resumed(apart, tmp_path, cache):
    """Begun one after the other, killed in the first seed, stopped together, finished apart."""
    workdir = tmp_path / "run"
    process = start(workdir, SEEDS, "--quiet", cache=cache)
    interruptions.wait_for(workdir / "seed_1", "statistics", process)
    process.kill()
    process.communicate()
    process = start(workdir, *TOGETHER, "--quiet", cache=cache)
    interruptions.wait_for(workdir / "seed_2", "statistics", process)
    process.terminate()
    interruptions.finish(process, expected=75)
    interruptions.finish(start(workdir, *TOGETHER, "--quiet", cache=cache))
    for seed in (1, 2):
        nearly_same(workdir / f"seed_{seed}", apart / f"seed_{seed}")
        interruptions.nothing_done_twice(workdir / f"seed_{seed}")
