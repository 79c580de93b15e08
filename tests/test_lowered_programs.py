"""Programs as TPUs and GPUs get them, checked where there is neither."""

import pytest

from tests import small_runs


@pytest.mark.ci
def test_programs_of_all_learners_for_tpus_and_gpus():
    output = small_runs.python("-m", "tests.lowered_programs", env=small_runs.with_devices(4))
    assert output == "no program surprises\n"
