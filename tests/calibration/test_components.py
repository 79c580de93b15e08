import re

import numpy as np
import pytest

from fdc_jax import learners
from fdc_jax.calibration.components import COMPONENTS, fuse_all
from fdc_jax.calibration.fdc import Settings, TaskLogits, Terms, ViewEvidence

# What Table plugin calls the learners.
_NAMES = {
    "EWC-LoRA": "ewc_lora",
    "SD-LoRA": "sd_lora",
    "SplitLoRA": "splitlora",
    "InfLoRA": "inflora",
    "InfLoRA+CA": "inflora_ca",
    "LoRA-": "lora_subtraction",
    "LoDA": "loda",
    "RSIAT": "rsiat",
}


def make_terms(pretrained=True):
    rng = np.random.default_rng(0)

    def noise():
        return rng.normal(size=(5, 3)).astype(np.float32)

    rows = np.zeros((5, 3), np.int64)
    return Terms(
        raw_logits=TaskLogits(noise(), rows),
        filtered_logits=TaskLogits(noise(), rows),
        adapted=ViewEvidence(noise(), noise()),
        pretrained=ViewEvidence(noise(), noise()) if pretrained else None,
        raw_scale=np.ones(3, np.float32),
        filtered_scale=np.full(3, 2, np.float32),
        settings=Settings(),
        classes=tuple(np.array([task]) for task in range(3)),
        raw_rows=None,
        filtered_rows=None,
    )


def test_every_combination_is_another_score():
    scores = fuse_all(make_terms())
    assert scores.keys() == COMPONENTS.keys()
    assert len({each.task_scores.tobytes() for each in scores.values()}) == len(COMPONENTS)


def test_combinations_of_one_view_need_two():
    assert not [name for name in fuse_all(make_terms(pretrained=False)) if "view" in name]


def test_the_selection_is_that_of_the_paper(shared_asset):
    text = shared_asset("../paper.tex").read_text()
    table = text[text.index(r"\label{tab:plugin}") :]
    name, first_rows = "", {}
    for line in table[: table.index(r"\bottomrule")].splitlines():
        name = next((n for n in _NAMES if re.search(re.escape(n) + r"(\W|$)", line)), name)
        name = "InfLoRA+CA" if "InfLoRA+CA" in line else name
        switches = re.search(r"& ([01]) & ([01]) & ([01]) &", line)
        if switches:
            first_rows.setdefault(name, tuple(digit == "1" for digit in switches.groups()))
    assert first_rows.keys() == _NAMES.keys()
    for name, (tsf, pretrained_view, adapted_view) in first_rows.items():
        chosen = {"tsf": True, "rlc": True, "pac": True}
        chosen |= {"adapted_view": True, "pretrained_view": True}
        chosen |= COMPONENTS[learners.selected(_NAMES[name])]
        assert chosen["rlc"] and chosen["pac"]
        found = chosen["tsf"], chosen["pretrained_view"], chosen["adapted_view"]
        assert found == (tsf, pretrained_view, adapted_view), name


@pytest.mark.parametrize("learner", ["cumulative_lora", "a.learner.outside"])
def test_other_learners_take_everything(learner):
    assert learners.selected(learner) == "full"
    assert set(_NAMES.values()) <= set(learners.names())
