"""The learner that docs/learners.md shows, and the two learners that bound a table."""

import re
import sys

import pytest

from fdc_jax.report import runs, tables
from tests import small_runs

PAGE = small_runs.REPOSITORY / "docs" / "learners.md"


@pytest.mark.ci
def test_the_learner_of_the_page_runs_and_resumes(tmp_path, cache, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "lwf.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "lwf", None)
    del sys.modules["lwf"]  # restored, hence removed, after the test
    config = small_runs.config(cache, learner__name="lwf")
    small_runs.stopped(config, tmp_path / "stopped", 22)
    assert small_runs.events(tmp_path / "stopped", "training")[-1]["task"] == 1
    small_runs.run(config, tmp_path / "stopped")
    small_runs.run(config, tmp_path / "finished")
    small_runs.same_outcome(tmp_path / "stopped", tmp_path / "finished")


@pytest.mark.ci
def test_joint_training_is_a_row_of_the_table_of_its_stream(tmp_path, cache, finished_run):
    config = small_runs.config(cache, learner__name="joint")
    results = small_runs.run(config, tmp_path / "joint")
    assert results["num_tasks"] == 1
    for field in ("num_classes", "num_test_images", "benchmark", "class_order_seed"):
        assert results[field] == small_runs.results(finished_run)[field]
    groups, skipped = runs.load([finished_run, tmp_path / "joint"])
    assert not skipped and len(groups) == 2
    titles = {table.name: table.frame.to_string() for table in tables.build(groups)}
    assert "Joint training" in titles["benchmark"] and "Cumulative-LoRA" in titles["benchmark"]
