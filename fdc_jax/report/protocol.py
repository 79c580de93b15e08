"""What a run's numbers depend on, and in what it departs from the paper's protocol."""

import fnmatch
from typing import Any

from fdc_jax.configuration import WITHOUT_EFFECT
from fdc_jax.report import paper

# Fields of a configuration that no accuracy depends on.
_IGNORED = WITHOUT_EFFECT | {
    "seed",
    "report",
    "save_features",
    "evaluation.batch_size",
    "evaluation.every_task",
    # The whitened affinity stands beside the paper's numbers and leaves them as they are.
    "fdc.affinity_metric",
    "fdc.affinity_evidence",
    "fdc.affinity_scope",
    "fdc.affinity_shrinkage",
}

# Options that a learner reads besides its own.
_READS = {"inflora_ca": ("inflora", "inflora_ca")}

_PHRASES = {
    "encoder.variant": "{}",
    "encoder.image_size": "{} px",
    "classes_per_task": "{} classes a task",
    "class_order_seed": "class order {}",
    "learner.preset": "{} preset",
    "train.epochs": "{} epochs",
    "train.first_epochs": "{} epochs in the first task",
    "train.batch_size": "batches of {}",
    "train.rank": "rank {}",
    "train.increment_learning_rate": "increment learning rate {}",
    "train.head_learning_rate": "head learning rate {}",
    "train.schedule": "{} schedule",
    "precision": "{} precision",
    "data.input_range": "{} inputs",
}


def settings(results: dict[str, Any]) -> dict[str, Any]:
    """Returns everything that the numbers of a run depend on but its seed, by field.

    Options of other learners are left out; a field that an older run does not know has the value
    that it had then, the paper's.

    Args:
        results: content of a `results.json`.
    """
    learner = results["learner"]
    options = tuple(f"learner.{name}." for name in _options(learner))
    found = _expected(results["benchmark"], learner)
    for field, value in results["config"].items():
        of_a_learner = field.startswith("learner.") and field.count(".") > 1
        if field not in _IGNORED and (not of_a_learner or field.startswith(options)):
            found[field] = value
    if found["fdc.affinity_reference"] == "pooled":  # Of the whitened affinity alone.
        found["fdc.affinity_reference"] = "own"
    encoder, data = results.get("encoder") or {}, results.get("data") or {}
    found |= {
        "split": results.get("split"),
        "encoder.sha256": encoder.get("sha256"),
        "encoder.weights": encoder.get("weights"),
        "data.train_sha256": data.get("train_sha256"),
        "data.test_sha256": data.get("test_sha256"),
        "num_train_images": results.get("num_train_images"),
        "num_test_images": results.get("num_test_images"),
    }
    return dict(sorted(found.items()))


def deviations(benchmark: str, learner: str, found: dict[str, Any]) -> list[str]:
    """Says in words what differs from the paper's protocol; choices it leaves open included.

    Args:
        benchmark: name of the benchmark.
        learner: name of the learner.
        found: settings of a run, as `settings` returns them.
    """
    expected, phrases = _expected(benchmark, learner), []
    for field, value in expected.items():
        if field == "data.train_per_class":
            phrases += _images(benchmark, found)
        elif field != "data.test_per_class" and found.get(field, value) != value:
            phrase = _PHRASES.get(field, field.split(".")[-1].replace("_", " ") + " {}")
            phrases.append(phrase.format(_words(found[field])))
    weights, known = found["encoder.weights"], paper.numbers()["protocol"]["weights"]
    same_size = found["encoder.variant"] == expected["encoder.variant"]
    if weights and same_size and not any(fnmatch.fnmatch(weights, p) for p in known):
        phrases.append(f"weights {weights}")
    return phrases


def _expected(benchmark: str, learner: str) -> dict[str, Any]:
    """The paper's settings by field and what it leaves open by default, one learner's included."""
    known = paper.numbers()["protocol"]
    own = {
        f"learner.{name}.{option}": value
        for name in _options(learner)
        for option, value in known["learners"].get(name, {}).items()
    }
    of_benchmark = known["learners_by_benchmark"].get(benchmark, {})
    own |= {field: value for field, value in of_benchmark.items() if field in own}
    return {**known["fields"], **known["unstated"], **own}


def _options(learner: str) -> tuple[str, ...]:
    """Learners whose options one reads."""
    return _READS.get(learner, (learner,))


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " to ".join(_words(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _images(benchmark: str, found: dict[str, Any]) -> list[str]:
    """Fewer images of each class than there are, or another number in all than the paper's."""
    asked = [
        f"{found[f'data.{part}_per_class']} {word}"
        for part, word in (("train", "training"), ("test", "test"))
        if found[f"data.{part}_per_class"]
    ]
    if asked:
        return [f"{' and '.join(asked)} images a class"]
    expected = paper.partition(benchmark)
    return [
        f"{found[field]:,} of {expected[name]:,} {word} images"
        for field, name, word in (
            ("num_train_images", "train", "training"),
            ("num_test_images", "test", "test"),
        )
        if expected and found[field] is not None and found[field] != expected[name]
    ]
