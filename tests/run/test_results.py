"""What of `results.json` no whole run shows."""

import pytest

from fdc_jax.run import results


@pytest.mark.parametrize(
    ("per_task", "training", "beyond"),
    [
        ([{"training": 700, "task": 710}, {"training": 710, "task": 725}], 700, 25),
        ([{"training": None, "task": None}], None, None),
        ([{}, {"training": 1, "task": 2}], None, None),
    ],
)
def test_memory_is_that_of_the_first_training_and_what_came_on_top(per_task, training, beyond):
    assert results._peak_memory(per_task) == {"training": training, "fdc_and_evaluation": beyond}
