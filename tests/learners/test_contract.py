"""What a learner's answers must be like is checked where it is easily missed."""

import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax import command
from fdc_jax.errors import InputError
from fdc_jax.learners import check_state
from tests import small_runs

STATE = {"heads": jnp.zeros((3, 4)), "host": np.zeros(2, np.float32)}


@pytest.mark.parametrize(
    ("state", "found"),
    [
        (None, r"expected float32\[3, 4\] at \['heads'\], found nothing"),
        (STATE | {"heads": jnp.zeros((4, 4))}, r"found float32\[4, 4\]"),
        (STATE | {"heads": jnp.zeros((3, 4), int)}, r"found int32\[3, 4\]"),
        (STATE | {"more": 0.0}, r"expected nothing at \['more'\], found float32\[\]"),
    ],
)
def test_another_state_is_named(state, found):
    with pytest.raises(InputError, match=rf"^learner.name: mine: after_task must return .*{found}"):
        check_state("mine", "after_task", STATE, state)


def test_a_state_may_move_between_host_and_devices():
    check_state(
        "mine", "after_task", STATE, {name: np.asarray(each) for name, each in STATE.items()}
    )


def test_a_run_stops_at_a_state_that_grows(cache, tmp_path):
    config = small_runs.config(cache, train_per_class=4, test_per_class=2)
    config.learner.name = "tests.learners.grows"
    with pytest.raises(InputError, match=r"tests\.learners\.grows: after_task must "):
        command.run(config, str(tmp_path / "run"), quiet=True)
