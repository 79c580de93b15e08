"""Numbers of runs and published numbers as rows, and their comparison.

A number of a run is a row `benchmark, learner, settings, seed, calibrator, quantity, value`; the
settings are the title of its group (`runs.Group`). Published numbers have no settings.
"""

# The stubs of pandas take columns for arrays, scalars or series.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false

import numpy as np
import pandas as pd
import scipy.special

from fdc_jax.report import quantities

MATCH = ["benchmark", "learner", "calibrator", "quantity"]  # columns of published numbers
KEY = [*MATCH, "settings"]  # columns that are the same for all seeds
_QUANTILE = 0.975  # of two-sided 95 % intervals


def over_seeds(numbers: pd.DataFrame, column: str = "value") -> pd.DataFrame:
    """Returns `mean, std, n, low, high` over seeds by `KEY`, with Student's 95 % interval.

    The interval is NaN for one seed, and if all seeds have the same number.
    """
    by_key = numbers.groupby(KEY, sort=False)[column]
    table = by_key.agg(["mean", "std", "count", "nunique"]).rename(columns={"count": "n"})
    reach = scipy.special.stdtrit(table["n"] - 1, _QUANTILE) * table["std"] / table["n"] ** 0.5
    reach = reach.where(table.pop("nunique") > 1)
    return table.assign(low=table["mean"] - reach, high=table["mean"] + reach)


def summarise(numbers: pd.DataFrame) -> pd.DataFrame:
    """Returns `over_seeds` with intervals cut to the range of the quantity."""
    table = over_seeds(numbers)
    ranges = [quantities.row_of(name) for name in table.index.get_level_values("quantity")]
    table["low"] = np.maximum(table["low"], [of.low for of in ranges])
    table["high"] = np.minimum(table["high"], [of.high for of in ranges])
    return table


def with_published(
    summary: pd.DataFrame, numbers: pd.DataFrame, published: pd.DataFrame
) -> pd.DataFrame:
    """Adds published means, deviations and differences with 95 % intervals to a summary.

    The interval is Welch's. If published numbers have seeds of ours, both means are over these
    seeds, and the difference is paired.

    Args:
        summary: of `summarise`.
        numbers: the rows that it is of.
        published: columns `MATCH`, `seed` (NaN for a mean), `value`, `std` and `n`.
    """
    seeds = published[published["seed"].notna()]
    means = seeds.groupby(MATCH)["value"].agg(["mean", "std", "count"])
    given = published[published["seed"].isna()].set_index(MATCH)[["value", "std", "n"]]
    other = pd.concat([means.set_axis(given.columns, axis=1), given])
    other = other[~other.index.duplicated()].rename(columns={"value": "mean"})
    table = summary.join(other.add_prefix("paper_"), on=MATCH)
    table = _differences(table)
    pairs = numbers.merge(seeds[[*MATCH, "seed", "value"]], on=[*MATCH, "seed"])
    if len(pairs):
        pairs = pairs.rename(columns={"value_x": "own", "value_y": "paper"})
        pairs["difference"] = pairs["own"] - pairs["paper"]
        own, paper, gap = (over_seeds(pairs, name) for name in ("own", "paper", "difference"))
        gap = gap.add_prefix("difference_").rename(columns={"difference_mean": "difference"})
        paired = own.join([paper.add_prefix("paper_"), gap])[table.columns]
        table = pd.concat([table.drop(paired.index), paired]).reindex(table.index)
    return table


def _differences(table: pd.DataFrame) -> pd.DataFrame:
    """Adds ours minus the published mean with Welch's interval, NaN without both deviations."""
    own, paper = (table[f"{side}std"] ** 2 / table[f"{side}n"] for side in ("", "paper_"))
    total = (own + paper).where(own + paper > 0)
    freedom = total**2 / (own**2 / (table["n"] - 1) + paper**2 / (table["paper_n"] - 1))
    reach = scipy.special.stdtrit(freedom, _QUANTILE) * total**0.5
    gap = table["mean"] - table["paper_mean"]
    return table.assign(difference=gap, difference_low=gap - reach, difference_high=gap + reach)
