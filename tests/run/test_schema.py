"""Values of results that contradict each other, or that no measurement gives."""

import pytest

from fdc_jax.errors import InputError
from fdc_jax.run import schema

COMPONENTS = {"raw": 1.0, "full": 2.0, "pac+rlc": 3.0}
POINTS = [{"task": task, "accuracy": {"raw": 100.0005}} for task in (0, 1)]
RESULTS = {
    **dict(benchmark="a", learner="b", seed=2**32 - 1, num_tasks=2, num_classes=2),
    **dict(accuracy={"raw": 0.0}, components=COMPONENTS, class_names=["x", "y"]),
    **dict(curve=POINTS, config={}),
}
WRONG = {
    "curve: expected tasks below 1": {"num_tasks": 1},
    "curve: expected tasks below 2": {"curve": POINTS[::-1]},
    "accuracy: expected raw": {"accuracy": {}},
    "accuracy: expected raw among": {"accuracy": {"fdc": 1.0, "oracle": 2.0}},
    "accuracy: expected raw among the": {"curve": [POINTS[0], {"task": 1, "accuracy": {}}]},
    "components: expected raw": {"components": {"raw": 1.0, "full": 2.0}},
    "class_names: expected 2, found 1": {"class_names": ["x"]},
    "<= 100.001 - at `\\$.accuracy": {"accuracy": {"raw": 100.01}},
    ">= 0.0 - at `\\$.accuracy": {"accuracy": {"raw": -0.01}},
    "< 4294967296.0? - at `\\$.seed|<= 4294967295 - at `\\$.seed": {"seed": 2**32},
    "matching regex .* - at `\\$.class_names": {"class_names": ["a\u202e", "b"]},
    "length >= 1 - at `\\$.curve": {"curve": []},
}


def read(results):
    schema.check_results(schema.check(results, schema.Results))


@pytest.mark.parametrize("message", WRONG)
def test_results_that_cannot_be(message):
    read(RESULTS)
    with pytest.raises(InputError, match=message):
        read(RESULTS | WRONG[message])
