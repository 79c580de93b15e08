"""Tables, sections and figure of README.md, made from the records: `python -m league page`."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.ticker import LogLocator, NullLocator

from fdc_jax import evaluation
from fdc_jax.calibration import METHODS
from fdc_jax.errors import InputError, counted
from fdc_jax.machine.files import write_text
from fdc_jax.report import drawing, formatting
from league import records

ROOT = Path(__file__).parent
RECORDS, PAGE, FIGURE = ROOT / "records", ROOT / "README.md", ROOT / "league.svg"
METHODS_FILE = ROOT / "methods.json"
_COLUMNS = (
    *("method", "code", "head", "rates", "seeds", "accuracy", "behind the first"),
    *("mean over tasks", "right task", "among three", "passes", "processor s", "storage, MiB"),
)
_REACHED = ("after the last task", "mean over tasks")  # the columns of `reached`
_MADE = re.compile(r"(<!-- made: (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)

# What is said of a method: `title` and `what`; perhaps the others.
_ENTRY = {"title", "what", "differences", "command", "settings", "authors"}

# The records of one method, code and calibrator, by seed.
Row = list[dict[str, Any]]


def right(record: dict[str, Any]) -> Float[np.ndarray, " n"]:
    """Returns 1 for correctly classified test images, 0 for the others."""
    label, task_of = records.truth(record)
    text = record["predictions"]["label"]
    return (records.unpack(text, len(label), len(task_of), "label") == label).astype(float)


def behind(first: Row, other: Row) -> tuple[float, float]:
    """Returns the difference of two rows in points, by test image, and half its interval."""
    means = [np.mean([right(record) for record in row], axis=0) for row in (first, other)]
    difference = 100 * (means[1] - means[0])
    return difference.mean(), 1.96 * difference.std(ddof=1) / len(difference) ** 0.5


def reached(row: Row) -> list[str]:
    """Returns the accuracy after the last task and its mean over tasks."""
    averages = [float(np.mean(record["curve"])) for record in row]
    return [spread([record["accuracy"] for record in row]), spread(averages)]


def spread(values: Sequence[float]) -> str:
    """Returns mean and sample standard deviation over seeds as text."""
    gain = evaluation.student(values)
    return formatting.mean(gain.mean, gain.std)


def mean(row: Row, name: str) -> float | None:
    """Returns the mean of a number over seeds, None where a record lacks it."""
    values: list[Any] = [record.get(name) for record in row]
    return None if None in values else float(np.mean(values))


def cell(value: float | None, digits: int = 2) -> str:
    """Returns a number as text."""
    return "–" if value is None else f"{value:.{digits}f}"


def title(method: str, known: dict[str, Any]) -> str:
    """Returns the title of a method; raises InputError if its entry is missing or wrong."""
    if method not in known:
        raise InputError(f"{METHODS_FILE}: expected an entry for {method}")
    if not {"title", "what"} <= known[method].keys() <= _ENTRY:
        fields = f"title, what and perhaps {', '.join(sorted(_ENTRY - {'title', 'what'}))}"
        raise InputError(
            f"{METHODS_FILE}: {method}: expected {fields}; found {', '.join(known[method])}"
        )
    return known[method]["title"]


def searched(rows: list[Row]) -> str:
    """Returns a sentence with the held-out accuracy by learning rate, "" without a search."""
    found = [(head(row), row[0]) for row in rows if row[0].get("rates")]
    if not found:
        return ""
    heads = (
        f"{name} {', '.join(f'× {rate} {share:.1f}' for rate, share in record['rates'].items())}"
        for name, record in found
    )
    costs = dict.fromkeys(f"{record['search_seconds']:,.0f}" for _, record in found)
    cost = f"{' and '.join(costs)} processor seconds in all"
    whose = "ours" if (code := rows[0][0]["code"]) == "fdc_jax" else code
    return f"Learning rates of {whose} by held-out training images, %: {'; '.join(heads)} ({cost})."


def head(row: Row) -> str:
    """Returns the name of the head: a calibrator of this package, or "own" for others' code."""
    own = row[0]["code"] != "fdc_jax" and row[0]["calibrator"] == "raw"
    return "own" if own else METHODS[row[0]["calibrator"]].title


def lines(columns: Sequence[str], texts: int, rows: Iterable[Sequence[str]]) -> str:
    """Returns a table as Markdown; the first `texts` columns are text, the others numbers."""
    rule = "|---" * texts + "|--:" * (len(columns) - texts) + "|"
    return "\n".join([f"| {' | '.join(columns)} |", rule, *(f"| {' | '.join(r)} |" for r in rows)])


def cells(row: Row, first: Row, known: dict[str, Any]) -> list[str]:
    """Returns a row of the league."""
    record, name = row[0], title(row[0]["method"], known)
    place = re.sub(r"[^\w-]", "", name.lower().replace(" ", "-"))
    recalls: list[Any] = [(record.get("task_recall") or {}).get("3") for record in row]
    storage, (accuracy, average) = mean(row, "storage_bytes"), reached(row)
    return [
        f"[{name}](#{place})",
        record["code"].partition("/")[2] or "ours",
        head(row),
        ", ".join(
            dict.fromkeys(f"× {rate}" if (rate := record.get("rate")) else "–" for record in row)
        ),
        ", ".join(str(record["seed"]) for record in row),
        accuracy,
        "" if row is first else "{:+.2f} ± {:.2f}".format(*behind(first, row)),
        average,
        cell(mean(row, "routing_accuracy")),
        cell(None if None in recalls else float(np.mean(recalls))),
        str(record["passes"]),
        cell(mean(row, "processor_seconds"), 0),
        cell(None if storage is None else storage / 2**20),
    ]


def table(rows: list[Row], known: dict[str, Any]) -> str:
    """Returns the table of all rows."""
    return lines(_COLUMNS, 5, (cells(row, rows[0], known) for row in rows))


def changes(rows: Iterable[Row]) -> dict[str, None]:
    """Returns the sentences of what was changed in somebody else's code, in order."""
    texts = (record["changes"] for row in rows for record in row if record["changes"])
    return dict.fromkeys(said for text in texts for said in re.split(r"(?<=\.) ", text))


def shared(rows: list[Row]) -> list[str]:
    """Returns the changes that all code of others has in common."""
    others = [changes([[record]]) for row in rows for record in row if record["code"] != "fdc_jax"]
    return [said for said in changes(rows) if all(said in other for other in others)]


def section(method: str, rows: list[Row], about: dict[str, str], everywhere: list[str]) -> str:
    """Returns the section of a method, with its rows of the first protocol that has it."""
    every = [row for row in rows if row[0]["method"] == method]
    own = [row for row in every if row[0]["data"] == every[0][0]["data"]]
    said = [f"### {about['title']}", about["what"], about.get("differences", "")]
    by_code: dict[str, list[Row]] = {}
    for row in own:
        by_code.setdefault(row[0]["code"], []).append(row)
    if "command" in about:
        rates = sorted({row[0].get("rate") or "1" for row in by_code.get("fdc_jax", [])} - {"1"})
        more = (f"; rows × {rate} with [other rates](#learning-rates)" for rate in rates)
        said.append(f"`{about['command']}`{''.join(more)}")
    codes = {(row[0]["code"], row[0]["commit"]) for row in own if row[0]["code"] != "fdc_jax"}
    code = [f"Code: {code} at `{commit[:7]}`." for code, commit in sorted(codes)]
    once = everywhere if "settings" in about else []
    said.append(" ".join([*code, *(text for text in changes(own) if text not in once)]))
    if "settings" in about:
        said.append(f"`python league/pilot.py CLONE {about['settings']}`")
    said += map(searched, by_code.values())
    shown = slice(1, 8)  # but for the first column, up to the mean over tasks
    found = (cells(row, own[0], {method: about})[shown] for row in own)
    said.append(lines(_COLUMNS[shown], 4, found))
    if "authors" in about:
        said.append(f"Elsewhere: {about['authors']}.")
    return "\n\n".join(filter(None, said))


def one_pass(found: list[dict[str, Any]], first: Row, known: dict[str, Any]) -> str:
    """Returns the table of class Gaussians by one pass, best first.

    `found` has the labels of every learner and seed, for the test images of the first row.
    """
    rows = []
    for learner in found:
        labels = zip(learner["seeds"], learner["labels"], strict=True)
        row = [first[0] | {"seed": s, "predictions": {"label": text}} for s, text in labels]
        difference = "{:+.2f} ± {:.2f}".format(*behind(first, row))
        accuracy = [100 * float(right(record).mean()) for record in row]
        seeds = ", ".join(map(str, learner["seeds"]))
        said = [title(learner["learner"], known), seeds, spread(accuracy), difference]
        rows.append((-np.mean(accuracy), said))
    return lines(("learner", *_COLUMNS[4:7]), 2, (said for _, said in sorted(rows)))


def orders(record: dict[str, Any]) -> str:
    """Returns the table of orders of classes."""
    seeds = [name for name in record["accuracy"] if name.isdigit() and name != "1993"]
    columns = ("mean ± deviation", "least to most", *(named := ("1993", "similar", "dissimilar")))
    rows = []
    for index, name in enumerate(record["methods"]):
        for field, said in zip(("accuracy", "average"), _REACHED, strict=True):
            of = {order: values[index] for order, values in record[field].items()}
            values = [of[seed] for seed in seeds]
            reach = f"{min(values):.2f} to {max(values):.2f}"
            others = (f"{of[order]:.2f}" for order in named)
            rows.append([METHODS[name].title, said, spread(values), reach, *others])
    return lines(["", "", *columns], 2, rows)


def trained(by_order: dict[str, list[Row]], known: dict[str, Any]) -> str:
    """Returns the table of what was learned in every order, by seed 1."""
    found: list[dict[tuple[str, str, str], Row]] = [
        {key(record): [record] for row in rows for record in row if record["seed"] == 1}
        for rows in by_order.values()
    ]
    shown = []
    for name, row in found[0].items():
        if all(name in rows for rows in found):
            ends, averages = zip(*(reached(rows[name]) for rows in found), strict=True)
            shown.append([*cells(row, row, known)[:4], *ends, *averages])
    of = [f"{said}, {order}" for said in _REACHED for order in by_order]
    return lines([*_COLUMNS[:4], *of], 4, shown)


def figure(rows: list[Row], known: dict[str, Any]) -> str:
    """Returns accuracy against processor seconds as SVG; the best row of a method has its name."""
    kinds = {"own": (drawing.INK, "^", "own head, others' code")}
    for name, (colour, marker) in drawing.looks(("raw", "fdc", "gaussians")).items():
        said = METHODS[name].title
        kinds[said] = (colour, marker, said)
    with drawing.style():
        made, (axes,) = drawing.panels(1, 4.2, 1)
        made.set_size_inches(drawing.PAGE, 4.2)
        matplotlib.rcParams["savefig.facecolor"] = "white"  # The page may be dark.
        places = [(row, mean(row, "processor_seconds"), mean(row, "accuracy")) for row in rows]
        drawn: list[Any] = [place for place in places if place[1] is not None]
        middle = np.median([x for _, x, _ in drawn])
        names: dict[str, tuple[float, float]] = {}  # positions of the names, in data coordinates
        for row, x, y in drawn:
            name = title(row[0]["method"], known)
            colour, marker, label = kinds.get(head(row), (drawing.INK, "x", "other"))
            look = {"label": label, "alpha": 1.0, "markersize": 5.5}
            drawing.points(axes, [x], [y], colour, marker, **look)
            if name in names:
                continue
            # Names go outwards, and down where a higher one is near.
            side = -1 if x < middle else 1
            at = x * 1.04**side
            near = [level for other, level in names.values() if abs(np.log(at / other)) < 0.3]
            names[name] = at, min([y, *(level - 2.4 for level in near)])
            beside: Any = {"fontsize": 7, "va": "center", "ha": "left" if side > 0 else "right"}
            line = {"arrowstyle": "-", "linewidth": 0.4, "shrinkA": 0, "shrinkB": 3}
            axes.annotate(name, (x, y), names[name], arrowprops=line, **beside)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.15)
        axes.set_xlabel("processor seconds of one run")
        axes.set_ylabel("accuracy after the last task, %")
        drawing.legend(made)
        return drawing.svg(made)


def key(record: dict[str, Any]) -> tuple[str, str, str]:
    """Returns code, method and calibrator, which the records of a row share."""
    return record["code"], record["method"], record["calibrator"]


def read(folder: str) -> list[Row]:
    """Returns the rows of a folder of `records/`, best first."""
    groups: dict[tuple[str, str, str], Row] = {}
    for record in records.read(RECORDS / folder).values():
        groups.setdefault(key(record), []).append(record)
    rows = [sorted(row, key=lambda record: record["seed"]) for row in groups.values()]
    return sorted(rows, key=lambda row: -float(np.mean([record["accuracy"] for record in row])))


def page() -> tuple[str, str]:
    """Returns the page, in which what is made is new, and its figure."""
    known = json.loads(METHODS_FILE.read_text())
    rows, photographs = read("cifar100"), read("photographs")
    by_order = {"1993": rows} | {name: read(name) for name in ("similar", "dissimilar")}
    every = rows + photographs
    methods = {row[0]["method"]: title(row[0]["method"], known) for row in every}
    # By `league/pilot.py`, which changes the same in all code.
    everywhere = shared([row for row in every if "settings" in known[row[0]["method"]]])
    said = [f"{counted(len(methods), 'method')}, in the order of the tables."]
    if everywhere:
        said.append(f"All code that `league/pilot.py` runs: {' '.join(everywhere)}")
    by_one_pass = json.loads((ROOT / "one_pass.json").read_text())
    parts = {
        "rows": table(rows, known),
        "photographs": table(photographs, known),
        "passes": one_pass(by_one_pass["rows"], rows[0], known),
        "trained": trained(by_order, known),
        "orders": orders(json.loads((ROOT / "orders.json").read_text())),
        "methods": "\n\n".join(
            said + [section(method, every, known[method], everywhere) for method in methods]
        ),
    }
    text = PAGE.read_text()
    return _MADE.sub(lambda m: f"{m[1]}\n{parts[m[2]]}\n{m[3]}", text), figure(rows, known)


def write() -> None:
    """Writes the page and the figure."""
    for path, content in zip((PAGE, FIGURE), page(), strict=True):
        write_text(path, content)
