"""The learner that docs/learners.md shows, and the two learners that bound a table."""

import re
import sys

import numpy as np
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
    small_runs.run(config, tmp_path / "whole")
    small_runs.same_outcome(tmp_path / "stopped", tmp_path / "whole")
    free = small_runs.config(cache, learner__name="lwf", learner__lwf__strength=0.0)
    small_runs.run(free, tmp_path / "free")
    losses = [
        [event["loss"] for event in small_runs.events(tmp_path / name, "training")]
        for name in ("whole", "free")
    ]
    assert np.greater(*losses).all()


@pytest.mark.ci
def test_joint_training_is_a_row_of_the_table_of_its_stream(tmp_path, cache, whole):
    config = small_runs.config(cache, learner__name="joint")
    small_runs.stopped(config, tmp_path / "joint", 12)
    results = small_runs.run(config, tmp_path / "joint")
    assert results["num_tasks"] == 1
    for field in ("num_classes", "num_test_images", "benchmark", "class_order_seed"):
        assert results[field] == small_runs.results(whole)[field]
    groups, skipped = runs.load([whole, tmp_path / "joint"])
    assert not skipped and len(groups) == 2
    titles = {table.name: table.frame.to_string() for table in tables.build(groups)}
    assert "Joint training" in titles["benchmark"] and "Cumulative-LoRA" in titles["benchmark"]
