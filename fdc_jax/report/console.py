"""Tables on the screen at the end of a run."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fdc_jax.evaluation import BEYOND

_TITLES = {
    "raw": "Raw",
    "tsf": "TSF",
    "pac": "PAC",
    "rlc": "RLC",
    "tsf+pac": "TSF + PAC",
    "tsf+rlc": "TSF + RLC",
    "pac+rlc": "PAC + RLC",
    "full": "FDC",
    "adapted_view": "FDC, adapted view only",
    "pretrained_view": "FDC, pretrained view only",
    "pac+rlc_adapted_view": "PAC + RLC, adapted view only",
    "pac+rlc_pretrained_view": "PAC + RLC, pretrained view only",
}


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _title(name: str, results: dict[str, Any]) -> str:
    chosen = name == results["selected"]["components"] and name != "full"
    return f"{_TITLES[name]} (the paper's choice)" if chosen else _TITLES[name]


def _gain(value: float) -> str:
    return f"{value:+.2f}"


def _affinity(beyond: dict[str, Any]) -> str:
    chosen = beyond["affinity"]
    by_class = ", class by class" if chosen["scope"] == "class" else ""
    return (
        f"the {chosen['metric']} affinity ({chosen['evidence']}, {chosen['reference']}{by_class})"
    )


def show_results(results: dict[str, Any]) -> None:
    """Prints the results of one seed; accuracies in percent, gains in percentage points."""
    accuracy, routing = results["accuracy"], results["routing_accuracy"]
    average = results["average_incremental_accuracy"]
    title = (
        f"{results['benchmark']}, {results['learner']}, seed {results['seed']}: "
        f"{results['num_tasks']} tasks, {results['num_classes']} classes, "
        f"{results['num_test_images']} test images"
    )
    table = _table(title, "accuracy, %", "Raw", "FDC", "gain", "oracle")
    rows = [
        ("final", accuracy["raw"], accuracy["fdc"], f"{accuracy['oracle']:.2f}"),
        ("task routing", routing["raw"], routing["fdc"], "100.00"),
    ]
    if average["raw"] is not None:
        rows.append(("average incremental", average["raw"], average["fdc"], ""))
    for name, raw, fdc, oracle in rows:
        table.add_row(name, f"{raw:.2f}", f"{fdc:.2f}", _gain(fdc - raw), oracle)
    console = _console()
    console.print(table)
    components = _table("components", "", "accuracy, %", "gain")
    for name, value in results["components"].items():
        gain = "" if name == "raw" else _gain(value - accuracy["raw"])
        components.add_row(_title(name, results), f"{value:.2f}", gain)
    console.print(components)
    for beyond in (results[entry] for entry in BEYOND if entry in results):
        console.print(
            f"beyond the paper: {_affinity(beyond)} gives {beyond['accuracy']:.2f} % "
            f"({_gain(beyond['accuracy'] - accuracy['fdc'])} over FDC)"
        )


def show_summary(summary: dict[str, Any]) -> None:
    """Prints mean and sample standard deviation over seeds."""

    def both(value: dict[str, float]) -> str:
        return f"{value['mean']:.2f} ± {value['std']:.2f}"

    def signed(value: dict[str, float]) -> str:
        return f"{value['mean']:+.2f} ± {value['std']:.2f}"

    seeds = ", ".join(str(seed) for seed in summary["seeds"])
    title = f"{summary['benchmark']}, {summary['learner']}, seeds {seeds}: mean ± sample std"
    table = _table(title, "accuracy, %", "Raw", "FDC", "oracle")
    rows = [
        ("final", summary["accuracy"]),
        ("task routing", summary["routing_accuracy"]),
        ("average incremental", summary["average_incremental_accuracy"]),
    ]
    for name, values in rows:
        if "raw" in values:
            cells = [
                both(values[column]) for column in ("raw", "fdc", "oracle") if column in values
            ]
            table.add_row(name, *cells)
    console = _console()
    console.print(table)
    components = _table("components, gains paired within each seed", "", "accuracy, %", "gain")
    for name, value in summary["components"].items():
        gain = "" if name == "raw" else signed(summary["component_gains"][name])
        components.add_row(_title(name, summary), both(value), gain)
    console.print(components)
    gain = summary["gain"]
    console.print(
        f"FDC gains {gain['mean']:+.2f} points over Raw "
        f"({100 * gain['confidence']:.0f} % t interval {gain['low']:+.2f} to {gain['high']:+.2f}, "
        f"{len(summary['seeds'])} seeds)"
    )
    for beyond in (summary[entry] for entry in BEYOND if entry in summary):
        over = beyond["gain_over_fdc"]
        console.print(
            f"beyond the paper: {_affinity(beyond)} gives {both(beyond['accuracy'])} % "
            f"({over['mean']:+.2f} points over FDC, t interval {over['low']:+.2f} to "
            f"{over['high']:+.2f})"
        )
