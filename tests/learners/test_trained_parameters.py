"""How many numbers a task trains on ViT-B/16 with a head of ten classes, as the authors count."""

import jax
import pytest

from configs import base
from fdc_jax import learners
from fdc_jax.learners import training
from fdc_jax.model import vit

FACTORS, HEAD = 12 * 2 * 768 * 10, 10 * 769
TASKS = 5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cumulative_lora", 376_330),
        ("ewc_lora", 376_330),
        ("lora_subtraction", 376_330),
        # A is not trained.
        ("inflora", 184_320 + HEAD),
        ("splitlora", 184_320 + HEAD),
        # A magnitude for every task to come, too, whose gradients are zero.
        ("sd_lora", 368_640 + TASKS + HEAD),
    ],
)
def test_parameters_of_a_task(name, expected):
    assert 2 * FACTORS + HEAD == 376_330
    learner, config = learners.find(name), base.get_config()
    config.encoder.variant = "B/16"
    setup = training.Setup(vit.build("B/16", 224), (10,) * TASKS, config)
    _, trained = jax.eval_shape(
        lambda backbone: learner.start(
            setup, backbone, learner.initial_state(setup), 0, jax.random.key(0)
        ),
        vit.parameter_shapes(setup.model, 224),
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(trained)) == expected
