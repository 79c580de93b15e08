"""The pipeline on a real Ray of two workers, one of which is killed amid its work."""

import copy
import functools
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from fdc_jax import calibration

ray = pytest.importorskip("ray.data", reason="needs Ray Data, which the package does not require")
pytestmark = pytest.mark.filterwarnings("ignore")

TASKS, PER_TASK, WIDTH = 4, 60, 16


def load(mark):
    """Returns encoders that change with the task; the first block kills the worker that has it."""

    def encode(block):
        if not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return by_hand(block["image"], block["task"])

    return encode


def by_hand(images, tasks):
    features = np.stack(images).reshape(len(tasks), -1)
    own = 1.0 + 0.1 * np.asarray(tasks, np.float32)[:, None]
    return {"adapted": features * own, "previous": features * (own - 0.1), "pretrained": features}


@pytest.fixture(scope="module")
def started():
    root = Path(__file__).parents[2]
    paths = root, root / "integrations"
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(map(str, paths))}}
    ray.DataContext.get_current().enable_progress_bars = False
    import ray as core

    # Workers find no module of tests, of which installed packages have their own.
    core.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    core.init(num_cpus=2, include_dashboard=False, runtime_env=environment, logging_level="ERROR")
    yield
    core.shutdown()


def test_a_killed_worker_changes_no_byte(started, tmp_path):
    import fdc_ray

    rng = np.random.default_rng(0)
    rows = [
        {
            "task": t,
            "row": i,
            "label": 5 * t + i % 5,
            "image": rng.normal(size=(4, 4)).astype(np.float32) + i % 5,
        }
        for t in range(TASKS)
        for i in range(PER_TASK)
    ]
    shuffled = [rows[i] for i in rng.permutation(len(rows))]
    images, mark = ray.from_items(shuffled, override_num_blocks=8), str(tmp_path / "killed")
    found = fdc_ray.fit(images, functools.partial(load, mark), workers=2, batch_size=16)
    assert os.path.exists(mark)
    assert list(found) == ["gaussians", "mahalanobis", "ncm"]
    for name, calibrator in found.items():
        whole = calibration.make(name)
        for t in range(TASKS):
            own = [row for row in rows if row["task"] == t]
            columns = {key: [row[key] for row in own] for key in own[0]}
            views = by_hand(columns["image"], columns["task"])
            if t == 0:
                views.pop("previous")
            whole.fit_task(labels=columns["label"], **views)
        whole.finalize()
        if name == "gaussians":  # How sure to be is not learned from joined tasks.
            assert not np.any(calibrator.confidence.losses) and np.any(whole.confidence.losses)
            whole.confidence = calibrator.confidence
        for end, each in (("ours", calibrator), ("whole", whole)):
            each.save(tmp_path / f"{end}.npz")
        ours, theirs = (np.load(tmp_path / f"{end}.npz") for end in ("ours", "whole"))
        assert ours.files == theirs.files
        for member in ours.files:
            np.testing.assert_array_equal(ours[member], theirs[member])


def test_program_of_the_page(started, program, tmp_path):
    found = program("Ray")
    labels, test = found["labels"], found["test"]
    by_hand = calibration.make("gaussians")
    for task in range(5):
        rows = ~test & (labels // 2 == task)
        own = found["images"][rows]
        by_hand.fit_task(own, labels[rows], previous=own if task else None)
    by_hand.finalize()
    expected = by_hand.score(found["images"][test]).label
    np.testing.assert_array_equal(found["predicted"]["gaussians"], expected)
    whole = found["fitted"]["gaussians"]
    whole.save(tmp_path / "calibrator.npz")
    others = [calibration.load(tmp_path / "calibrator.npz"), copy.deepcopy(whole)]
    for each in (whole, *others):  # A further task.
        each.fit_task(-own, labels[rows] + 10, previous=-own)
        each.finalize()
    for each in others:
        scores = each.class_scores(found["images"][test])
        np.testing.assert_array_equal(scores, whole.class_scores(found["images"][test]))
    ncm = found["predicted"]["ncm"] == labels[test]
    assert np.mean(expected == labels[test]) > np.mean(ncm)
