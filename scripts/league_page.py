"""Writes docs/league.md and its figure from the records of the league.

python scripts/league_page.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.ticker import LogLocator, NullLocator

from fdc_jax import bench, learners
from fdc_jax.calibration import METHODS
from fdc_jax.errors import counted
from fdc_jax.report import drawing

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "results", ROOT / "docs"
# What somebody else's code counts as, and the paper's, ours.
_TITLES = {"raw": "Raw", "fdc": "FDC", "gaussians": "class Gaussians"}
_COLUMNS = (
    *("method", "code", "head", "seeds", "accuracy", "behind the first", "mean over tasks"),
    *("right task", "among three", "passes", "processor s", "storage, MiB"),
)

INTRODUCTION = """# League

What the code of different authors reaches on the same images with the same weights, in a protocol
that two processor cores can do: CIFAR-100 in 20 tasks (class order 1993), of each class 60 training
and 20 test images, AugReg ViT-Ti/16 at 128 pixels, five epochs a task
([`configs/league.py`](../configs/league.py)). Every row is made from records in
[`results/league/`](../results/README.md), which carry their predictions; a test computes every
number from them again. `python scripts/league_page.py` makes this page. Small images, a small
encoder, few epochs: an order here is not an order at full size.

Percent; ± is the sample standard deviation over training seeds. *Behind the first* is the
difference to the first row, paired by test image over the seeds that both have, with its 95 %
interval over the 2,000 test images; what training seeds do is not in it. *Mean over tasks* averages
the accuracies after each task. *Right task* is how often the predicted class is of the true task,
*among three* how often the true task is among the best three. *Passes* of an encoder are per test
image; *processor s* are seconds of one run, with training, statistics and test images after each
task, on a busy machine of two cores; *storage* is what is kept beside encoders and heads. A dash:
not known. Learning rates are the methods' own and were searched for nobody.
"""

ADDING = """## Another row

Ours, or a learner in a file of yours: `fdc bench --learner=NAME --seed=1` with
`--config.data.dir` and `--config.encoder.weights`, or `fdc bench WORKDIR` of a finished run.

Other code: `fdc bench --images=FOLDER` writes the images in folders of classes, whose names begin
with their place in the order. Train on `train/`, task by task; after each task predict `test/` of
the classes seen so far, in the order of the file names. Write the labels (places in the order) as
`label_0` to `label_19` into an `.npz`, beside them, if there are any, `task_scores` [2000, 20]
after the last task; and what is to be known of the method as JSON:

```json
{"method": "simplecil", "calibrator": "raw", "code": "LAMDA-CL/LAMDA-PILOT", "commit": "5240714",
 "changes": "what was changed, in a paragraph", "seed": 1, "passes": 1, "processor_seconds": 140.0,
 "storage_bytes": null, "versions": {"torch": "2.13.0"}}
```

[`scripts/league_pilot.py`](../scripts/league_pilot.py) does that for methods of LAMDA-PILOT.
`fdc bench dump.npz --images=FOLDER --facts=facts.json` writes the record and
`fdc bench --check=results/league` checks all. `processor_seconds` is the processor time of the
whole process.
"""


def right(record: dict[str, Any]) -> Float[np.ndarray, " n"]:
    """Returns 1 for each test image whose class was predicted, 0 for the others."""
    label, task_of = bench.truth(record)
    text = record["predictions"]["label"]
    return (bench.unpack(text, len(label), len(task_of), "label") == label).astype(float)


def behind(first: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[float, float]:
    """Returns the difference of two rows in points, over common seeds, and half its interval."""
    rows = [{each["seed"]: right(each) for each in row} for row in (first, other)]
    common = rows[0].keys() & rows[1].keys()
    means = [np.mean([row[seed] for seed in common or row], axis=0) for row in rows]
    difference = 100 * (means[1] - means[0])
    return difference.mean(), 1.96 * difference.std(ddof=1) / len(difference) ** 0.5


def spread(values: list[float]) -> str:
    """Returns a mean, and its deviation where there are several values."""
    deviation = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{deviation}"


def mean(row: list[dict[str, Any]], *names: str) -> float | None:
    """Returns the mean of a number over seeds, None where a record lacks it."""
    values: list[Any] = row
    for name in names:
        values = [(each or {}).get(name) for each in values]
    return None if None in values else float(np.mean(values))


def cell(value: float | None, digits: int = 2) -> str:
    """Returns a number as text."""
    return "–" if value is None else f"{value:.{digits}f}"


def title(method: str, known: dict[str, Any]) -> str:
    """Returns what a method is called."""
    if method in known:
        return known[method]["title"]
    return learners.find(method).title if method in learners.names() else method


def head(record: dict[str, Any]) -> str:
    """Returns what decides: a calibrator of this package, or the method's own head."""
    if record["code"] != "fdc_jax":
        return "own"
    return METHODS[record["calibrator"]].title


def table(rows: list[list[dict[str, Any]]], known: dict[str, Any]) -> str:
    """Returns the rows as Markdown, best first."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---|---|---|---" + "|--:" * (len(_COLUMNS) - 4) + "|"]
    for row in rows:
        record = row[0]
        low, half = behind(rows[0], row)
        storage = mean(row, "storage_bytes")
        name, code = title(record["method"], known), record["code"]
        cells = [
            f"[{name}](#{anchor(name)})",
            code.partition("/")[2] or "ours",
            head(record),
            ", ".join(str(each["seed"]) for each in row),
            spread([each["accuracy"] for each in row]),
            "" if row is rows[0] else f"{low:+.2f} ± {half:.2f}",
            spread([float(np.mean(each["curve"])) for each in row]),
            cell(mean(row, "routing_accuracy")),
            cell(mean(row, "task_recall", "3")),
            str(record["passes"]),
            cell(mean(row, "processor_seconds"), 0),
            cell(None if storage is None else storage / 2**20),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def anchor(name: str) -> str:
    """Returns where the page has a heading."""
    return "".join(each for each in name.lower().replace(" ", "-") if each.isalnum() or each == "-")


def section(method: str, rows: list[list[dict[str, Any]]], known: dict[str, Any]) -> str:
    """Returns what is said of a method."""
    about, own = known.get(method, {}), [row for row in rows if row[0]["method"] == method]
    lines = [f"### {title(method, known)}", "", about.get("what", "")]
    changes = dict.fromkeys(each["changes"] for row in own for each in row if each["changes"])
    for text in (about.get("differences"), *changes):
        lines += ["", text] if text else []
    command, record = about.get("command", ""), own[0][0]
    if command.startswith("fdc "):
        lines += ["", f"`{command}`"]
    if record["code"] != "fdc_jax":
        lines += ["", f"Code: {record['code']} at `{record['commit'][:7]}`."]
    lines += ["", "| here | accuracy | mean over tasks |", "|---|--:|--:|"]
    for row in own:
        accuracy = spread([each["accuracy"] for each in row])
        average = spread([float(np.mean(each["curve"])) for each in row])
        lines.append(f"| {head(row[0])} | {accuracy} | {average} |")
    if about.get("authors"):
        lines += ["", f"Elsewhere: {about['authors']}."]
    return "\n".join(lines)


def orders(record: dict[str, Any]) -> str:
    """Returns what is said of the order of classes."""
    seeds = [name for name in record["accuracy"] if name.isdigit() and name != "1993"]
    lines = [
        "## The order of classes",
        "",
        f"Closed-form heads on the frozen features of this protocol, in {len(seeds)} orders "
        f"(seeds 0 to {len(seeds) - 1} of PILOT's permutation) and "
        f"{record['processor_seconds'] / 60:.0f} minutes of one processor; all methods see one "
        "view and, per task, ridge regression as the head. *Similar* and *dissimilar* are orders "
        "by class means: a task takes in the class whose mean has the highest cosine to those that "
        "it has, or the lowest ([`scripts/league_orders.py`](../scripts/league_orders.py)). What "
        "keeps means and covariances of classes ends the same in every order; what decides between "
        "the heads of tasks does not.",
        "",
        "| | | mean ± deviation | least to most | 1993 | similar | dissimilar |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for index, name in enumerate(record["methods"]):
        for key, said in (("accuracy", "after the last task"), ("average", "mean over tasks")):
            values = [record[key][seed][index] for seed in seeds]
            named = [
                f"{record[key][each][index]:.2f}" for each in ("1993", "similar", "dissimilar")
            ]
            reach = f"{min(values):.2f} to {max(values):.2f}"
            cells = [METHODS[name].title, said, spread(values), reach, *named]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def figure(rows: list[list[dict[str, Any]]], known: dict[str, Any]) -> str:
    """Returns accuracy against processor seconds as SVG; the best row of a method has its name."""
    with drawing.style():
        made, (axes,) = drawing.panels(1, 3.2, 1)
        made.set_size_inches(drawing.PAGE, 3.2)
        matplotlib.rcParams["savefig.facecolor"] = "white"  # The page may be dark.
        said: set[str] = set()
        kinds = {"own": (drawing.INK, "^", "own head, others' code")}
        for name, (colour, marker) in drawing.looks(_TITLES).items():
            kinds[METHODS[name].title] = (colour, marker, f"{_TITLES[name]}, ours")
        for row in rows:
            seconds = mean(row, "processor_seconds")
            colour, marker, label = kinds.get(head(row[0]), (drawing.INK, "x", "other"))
            accuracy = mean(row, "accuracy")
            if seconds is None or accuracy is None:
                continue
            look = {"label": label, "alpha": 1.0, "markersize": 5.5}
            drawing.points(axes, [seconds], [accuracy], colour, marker, **look)
            name = title(row[0]["method"], known)
            axes.annotate(
                "" if name in said else name,
                (seconds, accuracy),
                xytext=(5, -2.5),
                textcoords="offset points",
                fontsize=7,
            )
            said.add(name)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.15)
        axes.set_xlabel("processor seconds of one run")
        axes.set_ylabel("accuracy after the last task, %")
        drawing.legend(made)
        return drawing.svg(made)


def page() -> tuple[str, str]:
    """Returns the page and its figure."""
    known = json.loads((RESULTS / "league_methods.json").read_text())
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in bench.read(RESULTS / "league").values():
        key = (record["code"], record["method"], record["calibrator"])
        groups.setdefault(key, []).append(record)
    rows = [sorted(row, key=lambda each: each["seed"]) for row in groups.values()]
    rows.sort(key=lambda row: -float(np.mean([each["accuracy"] for each in row])))
    methods = list(dict.fromkeys(row[0]["method"] for row in rows))
    drawn = (
        "[![Accuracy against processor seconds: the table in a picture](league.svg)](league.svg)"
    )
    parts = [INTRODUCTION, table(rows, known), "", drawn, ""]
    if (RESULTS / "league_orders.json").exists():
        parts.append(orders(json.loads((RESULTS / "league_orders.json").read_text())))
    parts += ["## Methods", "", counted(len(methods), "method") + ", best first.", ""]
    for method in methods:
        parts += [section(method, rows, known), ""]
    return "\n".join([*parts, ADDING]), figure(rows, known)


def main() -> None:
    """Writes the files."""
    text, drawn = page()
    (DOCS / "league.md").write_text(text)
    (DOCS / "league.svg").write_text(drawn)


if __name__ == "__main__":
    main()
