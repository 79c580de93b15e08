"""The table at the end of a run."""

from fdc_jax.report import console


def results(seed=1, raw=70.0, fdc=80.0, chosen="full", every_task=True, **more):
    """The part of a results.json that is shown."""
    return {
        "benchmark": "digits",
        "learner": "splitlora",
        "seed": seed,
        "num_tasks": 5,
        "num_classes": 10,
        "num_test_images": 596,
        "accuracy": {"raw": raw, "fdc": fdc, "oracle": 99.0},
        "routing_accuracy": {"raw": raw + 1, "fdc": fdc + 2},
        "average_incremental_accuracy": {"raw": 85.0 if every_task else None, "fdc": 91.5},
        "components": {"raw": raw, "full": fdc, "pac+rlc": fdc - 3},
        "selected": {"components": chosen},
        **more,
    }


def shown(capsys, *per_seed):
    """Lines without what surrounds them, the first cell as a key."""
    console.show(per_seed)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines, {line.split("  ")[0]: line.split()[1:] for line in lines}


def test_one_seed(capsys):
    lines, rows = shown(capsys, results())
    assert lines[0] == "digits, SplitLoRA, seed 1: 5 tasks, 10 classes, 596 test images"
    assert rows["final accuracy"][1:] == ["70.00", "80.00", "+10.00", "99.00"]
    assert rows["right task chosen"][2:] == ["71.00", "82.00", "+11.00"]
    assert rows["average over tasks"][2:] == ["85.00", "91.50", "+6.50"]
    assert len(lines) == 6
