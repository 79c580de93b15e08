"""Analyses of the runs of a group, put together for figures."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from fdc_jax.report.runs import Group

# By path of the run, then by name of the analysis.
Analyses = Mapping[str, Mapping[str, Any]]


def of_group(group: Group, analyses: Analyses, name: str) -> list[dict[str, Any]]:
    """Returns an analysis of every run of the group that has it, by ascending seed."""
    found = (analyses.get(str(run.path), {}).get(name) for run in group.runs)
    return [each for each in found if each]


def having(
    groups: Sequence[Group], analyses: Analyses, name: str
) -> list[tuple[Group, list[dict[str, Any]]]]:
    """Returns the groups of which at least one run has an analysis, with its results."""
    found = [(group, of_group(group, analyses, name)) for group in groups]
    return [(group, results) for group, results in found if results]


def mean_over_seeds(rows: Sequence[Sequence[float | None]]) -> Float[np.ndarray, " n"]:
    """Mean of equally long lists, NaN where a seed has no number; only the first of other lengths.

    Runs of one group see the same tasks, so lengths differ in damaged results alone.
    """
    alike = [row for row in rows if len(row) == len(rows[0])]
    return np.array(alike, dtype=np.float64).mean(axis=0)
