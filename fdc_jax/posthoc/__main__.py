"""The command: read features, calibrate, write predictions and a report."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fdc_jax import calibration
from fdc_jax.calibration import METHODS
from fdc_jax.errors import InputError, Program, counted
from fdc_jax.features import feature_files
from fdc_jax.machine.files import check_writable_file, write_json, write_npz
from fdc_jax.posthoc.methods import moved, run, summarise
from fdc_jax.posthoc.template import write_template

_OF_FDC = {each.name: each.default for each in dataclasses.fields(calibration.Settings)}
_RANDOM = {"projections": 2000, "seed": 0}
# Raw reads no statistics; class Gaussians follow the encoder themselves.
_UNMOVED = ("raw", "gaussians")
# Cells of the decomposition that are errors.
_ERRORS = ("right_task_wrong_class", "wrong_task_oracle_right", "wrong_task_oracle_wrong")


def _program() -> Program:
    program = Program(
        "posthoc",
        "Calibrate the task heads of a trained class-incremental learner from its features, "
        "without training. The format of feature files: docs/features.md; an example: --template.",
    )
    add = program.add_argument
    add("features", nargs="?", help="an .npz, or a folder of .npy files, such as WORKDIR/features")
    add("--output", help="predictions (.npz); the report gets the suffix .json")
    names = ("all", *METHODS)
    text = f"one of {', '.join(names)} (default fdc)"
    add("--method", default="fdc", choices=names, metavar="NAME", help=text)
    for name, default in _OF_FDC.items():
        add(f"--{name}", type=type(default), help=f"FDC, as config.fdc.{name} (default {default})")
    size = "ranpac and anacp: random features (default 2000; the papers use 10000 and 5000)"
    add("--projections", type=int, help=size)
    add("--seed", type=int, help="ranpac and anacp (default 0)")
    text = (
        "move what methods know of the adapted view along with the encoder (needs "
        "train_previous_t; the method gaussians does so itself)"
    )
    add("--moved", action="store_true", help=text)
    fitted = "also save the fitted calibrator (.npz), for calibration.load"
    add("--calibrator", metavar="PATH", help=fitted)
    made = "write a small example of a feature file (.npz, or a folder) and say how to dump one"
    add("--template", metavar="PATH", nargs="?", const="features.npz", help=made)
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, `sys.argv` when None; returns 0, or 2 after an error of one line."""
    return _program().run(_run, arguments)


def _run(options: argparse.Namespace) -> None:
    if options.template is not None:
        text = write_template(options.template)
        if not options.quiet:
            print(text)
        return
    if options.features is None:
        raise InputError("expected a feature file, or --template for an example of one")
    settings, output = _settings(options), _output(options)
    stored, every = feature_files.load(options.features), options.method == "all"
    if stored.test_labels is None and (every or (output or options.calibrator) is None):
        raise InputError(
            f"{options.features}: no test_labels, so expected --output=PATH.npz and one method"
        )
    raw = run("raw", stored, {}).scores
    features = moved(stored) if options.moved and options.method not in _UNMOVED else stored
    reports: list[dict[str, Any]] = []
    for method in METHODS if every else [options.method]:
        try:
            outcome = run(method, stored if method in _UNMOVED else features, settings)
        except InputError as error:
            if not every:
                raise
            reports.append({"method": method, "not_applicable": str(error)})
            continue
        reports.append(summarise(stored, settings, raw, outcome))
        reports[-1]["moved"] = options.moved and method not in _UNMOVED
        # Of all methods, FDC's predictions are written.
        if output is not None and method in (options.method, "fdc"):
            scores = outcome.scores
            names = {"scores": scores.task_scores, "task": scores.task, "label": scores.label}
            write_npz(output, names | {"raw_label": raw.label})
        if options.calibrator is not None:
            outcome.calibrator.save(options.calibrator)
    if output is not None:
        write_json(output.with_suffix(".json"), {"methods": reports} if every else reports[0])
    if not options.quiet:
        print("\n".join(_comparison(reports) if every else _details(reports[0])))
        if output is not None:
            print(f"wrote {output} and {output.with_suffix('.json')}")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of methods; refuses those that are none before any file is read."""
    known: dict[str, Any] = _OF_FDC | _RANDOM
    given = {name: value for name in known if (value := getattr(options, name)) is not None}
    for name in given:
        if options.method != "all" and name not in METHODS[options.method].settings:
            raise InputError(f"--{name}: is no setting of {options.method}")
    settings = known | given
    if settings["seed"] < 0:
        raise InputError(f"--seed: expected a whole number from 0, found {settings['seed']}")
    if settings["projections"] < 1:
        raise InputError(f"--projections: expected at least 1, found {settings['projections']}")
    try:
        calibration.make("fdc", **settings)
    except InputError as error:
        raise InputError(f"--{error}") from error
    return settings


def _output(options: argparse.Namespace) -> Path | None:
    """Refuses files that cannot be written, or would overwrite each other or the features."""
    output = None if options.output is None else Path(options.output)
    if options.calibrator is not None and options.method == "all":
        raise InputError("--calibrator: expected together with one --method")
    files = {}
    if output is not None:
        files = {"--output": output, "the report of --output": output.with_suffix(".json")}
    if options.calibrator is not None:
        files["--calibrator"] = Path(options.calibrator)
    taken = {Path(options.features).resolve(): "the feature file"}
    for name, path in files.items():
        check_writable_file(name, path, ".json" if name.startswith("the report") else ".npz")
        other = taken.setdefault(path.resolve(), name)
        if other != name:
            raise InputError(f"{name}: {path} is {other} itself")
    return output


def _name(report: dict[str, Any]) -> str:
    return report["method"] + " --moved" * report.get("moved", False)


def _comparison(reports: list[dict[str, Any]]) -> list[str]:
    """What is said on screen of all methods."""
    rows, refused = [], []
    for report in reports:
        method = _name(report)
        if "not_applicable" in report:
            refused.append(f"{method}: not applicable: {report['not_applicable']}")
            continue
        gain = report["gain"]
        accuracy, *others = _percentages(report, "calibrated")
        interval = f"{gain['low']:+.2f} .. {gain['high']:+.2f}"
        last = (_mebibytes(report), f"{report['seconds']['fit']:.1f}")
        rows.append((method, accuracy, f"{gain['mean']:+.2f}", interval, *others, *last))
    header = ("method", "accuracy", "gain", "95% interval", "routing", "task given")
    header += ("storage", "fit s")
    tasks = counted(reports[0]["num_tasks"], "task")
    sizes = f"{tasks}, {counted(reports[0]['num_test_samples'], 'test sample')}"
    caption = f"Accuracy in percent, gains over raw in points; {sizes}"
    notes = [each["note"] for each in reports if each.get("note")]
    return [caption, _table(header, rows), *notes, *refused]


def _details(report: dict[str, Any]) -> list[str]:
    """What is said on screen of one method."""
    method, samples = _name(report), report["num_test_samples"]
    sizes = f"{counted(report['num_tasks'], 'task')}, {counted(report['num_classes'], 'class')}"
    if "accuracy" not in report:
        return [
            f"{method}: {sizes}; {report['num_changed_labels']} of {samples} test labels changed; "
            "no test_labels, so no accuracy"
        ]
    rows = []
    for name, title in (("raw", "raw"), ("calibrated", method)):
        errors = (f"{report['decomposition'][name][error]:.2f}" for error in _ERRORS)
        rows.append((title, *_percentages(report, name), *errors))
    header = ("method", "accuracy", "routing", "task given")
    header += ("wrong class", "wrong task", "both wrong")
    gain, flips, seconds = report["gain"], report["flips"], report["seconds"]
    return [
        f"Percent of {samples} test samples; {sizes}",
        _table(header, rows),
        f"gain {gain['mean']:+.2f} points, 95% interval {gain['low']:+.2f} .. {gain['high']:+.2f} "
        f"(bootstrap over test samples), McNemar p = {report['mcnemar_p_value']:.2g}; "
        f"{flips['wrong_to_right']} repaired, {flips['right_to_wrong']} broken",
        *(
            f"task {pair['true_task']} read as task {pair['predicted_task']}: {pair['count']} "
            f"samples, {pair['share']:.1f}% of the task"
            for pair in report["most_confused_tasks"]["calibrated"][:3]
        ),
        *([report["note"]] if report["note"] else []),
        f"statistics {_mebibytes(report)}, fit {seconds['fit']:.1f} s, scoring "
        f"{1e3 * seconds['score'] / samples:.3f} ms per sample, first call included",
    ]


def _percentages(report: dict[str, Any], name: str) -> list[str]:
    cells = report["decomposition"][name]
    kinds = ("accuracy", "routing_accuracy", "oracle_accuracy")
    return [f"{cells[kind]:.2f}" for kind in kinds]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    align = ("left", *("right" for _ in header[1:]))
    return tabulate(rows, header, tablefmt="plain", disable_numparse=True, colalign=align)


def _mebibytes(report: dict[str, Any]) -> str:
    return f"{report['storage_bytes'] / 2**20:.2f} MiB"


if __name__ == "__main__":
    sys.exit(main())
