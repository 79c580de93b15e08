"""Where the numbers of a group come from: seeds, data, encoder, code, machine, configuration."""

from collections.abc import Callable, Sequence
from typing import Any

from fdc_jax.report.runs import Group, RunFolder

# What is said beside the whole configuration: part, field, and where it stands in `results.json`.
_FIELDS = (
    ("runs", "class order seed", ("class_order_seed",)),
    ("runs", "learner preset", ("config", "learner.preset")),
    ("runs", "split", ("split",)),
    ("runs", "tasks", ("num_tasks",)),
    ("runs", "classes", ("num_classes",)),
    ("runs", "training images", ("num_train_images",)),
    ("runs", "test images", ("num_test_images",)),
    ("runs", "training data SHA-256", ("data", "train_sha256")),
    ("runs", "test data SHA-256", ("data", "test_sha256")),
    ("encoder", "variant", ("encoder", "variant")),
    ("encoder", "weights", ("encoder", "weights")),
    ("encoder", "weights SHA-256", ("encoder", "sha256")),
    ("encoder", "input range", ("encoder", "input_range")),
    ("encoder", "image size", ("config", "encoder.image_size")),
    ("encoder", "position embeddings resized", ("encoder", "resized_positions")),
    ("code and machine", "commit", ("versions", "commit")),
    ("code and machine", "device", ("device",)),
    ("code and machine", "precision", ("config", "precision")),
)


def describe(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Returns the origin of every group, fit for JSON.

    Returns:
        One dictionary per group: `group`, its name, and `parts`, from the title of a part to its
        fields. A value in which runs differ is a dictionary from "seed s" to the value of that
        run; what a run does not record is None.
    """
    return [{"group": group.name, "parts": _parts(group.runs)} for group in groups]


def _parts(members: Sequence[RunFolder]) -> dict[str, dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {
        "runs": {
            "folders": [str(run.path) for run in members],
            "training seeds": [run.seed for run in members],
        }
    }
    for part, field, keys in _FIELDS:
        parts.setdefault(part, {})[field] = _by_seed(members, _reader(*keys))
    packages = (name for run in members for name in run.results.get("versions") or {})
    for name in dict.fromkeys(packages):
        if name != "commit":
            parts["code and machine"][name] = _by_seed(members, _reader("versions", name))
    fields = {field for run in members for field in run.results["config"]} - {"seed"}
    parts["configuration"] = {
        field: _by_seed(members, _reader("config", field)) for field in sorted(fields)
    }
    return parts


def _reader(*keys: str) -> Callable[[RunFolder], Any]:
    def read(run: RunFolder) -> Any:
        found: Any = run.results
        for key in keys:
            if not isinstance(found, dict) or key not in found:
                return None
            found = found[key]
        return found

    return read


def _by_seed(members: Sequence[RunFolder], value: Callable[[RunFolder], Any]) -> Any:
    """Returns the value that all runs share, or each seed's."""
    found = [value(run) for run in members]
    if all(each == found[0] for each in found):
        return found[0]
    return {f"seed {run.seed}": each for run, each in zip(members, found, strict=True)}
