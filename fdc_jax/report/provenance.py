"""Where the numbers of a group come from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fdc_jax.configuration import WITHOUT_EFFECT
from fdc_jax.report.runs import Group, RunFolder


def describe(
    groups: Sequence[Group], missing: Mapping[str, Sequence[str]] | None = None
) -> list[dict[str, Any]]:
    """Returns one dict per group, ready for JSON and for a page.

    Args:
        groups: of the report.
        missing: by path of a run, what could not be computed from it, and why.

    Returns:
        For each group `group`, its name, and `parts`: by title a dict of fields. Where the runs of
        a group differ, as in device or commit, a field is a dict by seed.
    """
    return [{"group": each.name, "parts": _parts(each, missing or {})} for each in groups]


def _parts(group: Group, missing: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    def of(read: Callable[[dict[str, Any]], Any]) -> Any:
        return _common({run.seed: read(run.results) for run in group.runs})

    def section(name: str, leave_out: Sequence[str] = ()) -> dict[str, Any]:
        keys = sorted({key for run in group.runs for key in _section(run, name)})
        return {
            key: _common({run.seed: _section(run, name).get(key) for run in group.runs})
            for key in keys
            if key not in leave_out
        }

    parts = {
        "runs": {
            "benchmark": group.benchmark,
            "learner": group.learner,
            "settings": group.title or "the paper's protocol",
            "follows_protocol": group.follows_protocol,
            "preset": group.settings.get("learner.preset"),
            "input_range": group.settings.get("data.input_range"),
            "seeds": group.seeds,
            "class_order_seed": of(lambda results: results.get("class_order_seed")),
            # Their ends alone: a page that is passed on should not tell of a machine.
            "folders": ["/".join(run.path.absolute().parts[-2:]) for run in group.runs],
            "commit": of(lambda results: (results.get("versions") or {}).get("commit")),
            "device": of(lambda results: results.get("device")),
        },
        "weights": section("encoder", ("input_range",)),
        "data": {"split": of(lambda results: results.get("split")), **section("data")},
        "versions": section("versions", ("commit",)),
        # Where things lie on a machine is nobody's business and moves no number.
        "configuration": section("config", ("seed", *WITHOUT_EFFECT)),
    }
    absent = {
        f"seed {run.seed}": list(missing[str(run.path)])
        for run in group.runs
        if missing.get(str(run.path))
    }
    return parts | ({"not computed": absent} if absent else {})


def _section(run: RunFolder, name: str) -> dict[str, Any]:
    found = run.results.get(name)
    return found if isinstance(found, dict) else {}


def _common(by_seed: dict[int, Any]) -> Any:
    values = list(by_seed.values())
    if all(value == values[0] for value in values):
        return values[0]
    return {f"seed {seed}": value for seed, value in by_seed.items()}
