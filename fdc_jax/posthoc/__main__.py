"""The command `fdc posthoc`: calibrates the heads of a feature file and reports the gain."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fdc_jax import calibration
from fdc_jax.calibration import METHODS
from fdc_jax.errors import InputError, Program, counted, did_you_mean
from fdc_jax.features import feature_files
from fdc_jax.machine import devices
from fdc_jax.machine.files import check_writable_file, named_path, user_cache, write_json, write_npz
from fdc_jax.posthoc import methods

# Settings of all methods with their defaults. RanPAC and AnaCP take minutes with their own number
# of projections.
_SETTINGS: dict[str, Any] = {
    **{field.name: field.default for field in dataclasses.fields(calibration.Settings)},
    "projections": 2000,
}
_CHOICES = ("all", *METHODS)
# Raw reads no statistics, and class Gaussians compensate for drift themselves.
_NEVER_MOVED = ("raw", "gaussians")
# Features of the digits run, which docs/features.md describes.
_EXAMPLE = Path(feature_files.__file__).parents[1] / "assets" / "example_features.npz"


def _program() -> Program:
    program = Program(
        "posthoc",
        "Calibrate the task heads of a trained class-incremental learner from its features, "
        "without training. docs/features.md describes feature files and how to write one.",
        "features.npz --method=all --output=calibrated.npz",
    )
    add = program.add_argument
    text = "an .npz, a folder of .npy files such as WORKDIR/features, or the word example for the "
    add("features", help=f"{text}features that come with the package")
    add("--output", help="predictions (.npz); the report gets the suffix .json")
    text = f"one of {', '.join(_CHOICES)} (default fdc)"
    add("--method", metavar="NAME", default="fdc", help=text)
    others = {"projections": "ranpac and anacp: random features; the papers use 10000 and 5000"}
    for name, default in _SETTINGS.items():
        text = others.get(name, f"FDC, as config.fdc.{name}")
        add(f"--{name}", type=type(default), help=f"{text} (default {default})")
    text = (
        "move the adapted training features along with the encoder, for methods without drift "
        "compensation of their own (needs train_previous_t)"
    )
    add("--moved", action="store_true", help=text)
    text = "also save the fitted calibrator (.npz), for calibration.load"
    add("--calibrator", metavar="PATH", help=text)
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, `sys.argv` when None; returns 0, or 2 after an error of one line."""
    return _program().run(_run, arguments)


def _run(options: argparse.Namespace) -> None:
    """Runs the parsed command."""
    if options.method not in _CHOICES:
        raise InputError(did_you_mean("--method", options.method, _CHOICES))
    settings, output = _settings(options), _output(options)
    devices.keep_programs(user_cache())
    is_example = options.features == "example" and not Path("example").exists()
    features = feature_files.load(_EXAMPLE if is_example else options.features)
    compared = options.method == "all"
    if features.test_labels is None and (compared or (output or options.calibrator) is None):
        raise InputError(
            f"{options.features}: no test_labels, so expected --output=PATH.npz and one method"
        )
    moved = features
    if options.moved and options.method not in _NEVER_MOVED:
        moved = methods.moved(features)
    raw = methods.run("raw", features, {})
    names = METHODS if compared else dict.fromkeys(("raw", options.method))
    reports: list[dict[str, Any]] = []
    for name in names:
        is_moved = options.moved and name not in _NEVER_MOVED
        try:
            given = moved if is_moved else features
            outcome = raw if name == "raw" else methods.run(name, given, settings)
        except InputError as error:
            if not compared:
                raise
            reports.append({"method": name, "not_applicable": str(error)})
            continue
        reports.append(methods.report(features, settings, raw.scores, outcome))
        reports[-1]["moved"] = is_moved
        # If all methods are compared, the predictions written are FDC's.
        if output is not None and name == ("fdc" if compared else options.method):
            _write_predictions(output, outcome.scores, raw.scores)
        if options.calibrator is not None and name == options.method:
            outcome.calibrator.save(options.calibrator)
    if output is not None:
        write_json(output.with_suffix(".json"), {"methods": reports} if compared else reports[-1])
    if not options.quiet:
        print("\n".join(_lines(reports)))
        if output is not None:
            print(f"wrote {output} and {output.with_suffix('.json')}")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns all settings by name; raises InputError if the method has no such setting."""
    given = {name: value for name in _SETTINGS if (value := getattr(options, name)) is not None}
    for name in given:
        if options.method != "all" and name not in METHODS[options.method].settings:
            raise InputError(f"--{name}: is no setting of {options.method}")
    settings = _SETTINGS | given
    if settings["projections"] < 1:
        raise InputError(f"--projections: expected at least 1, found {settings['projections']}")
    try:
        calibration.make("fdc", **settings)
    except InputError as error:
        raise InputError(f"--{error}") from error
    return settings


def _output(options: argparse.Namespace) -> Path | None:
    """Returns the path of the predictions; raises InputError if a file cannot be written.

    Neither the predictions nor the calibrator may overwrite the features.
    """
    if options.calibrator is not None and options.method == "all":
        raise InputError("--calibrator: expected together with one --method")
    for flag, path in (("--output", options.output), ("--calibrator", options.calibrator)):
        if path is None:
            continue
        written = check_writable_file(flag, path, ".npz")
        if written.resolve() == named_path("features", options.features).resolve():
            raise InputError(f"{flag}: {path} is the feature file itself")
        setattr(options, flag.strip("-"), written)
    if options.output is not None and options.output == options.calibrator:
        raise InputError(f"--calibrator: {options.calibrator} is the file of --output")
    return options.output


def _write_predictions(path: Path, scores: calibration.Scores, raw: calibration.Scores) -> None:
    arrays = {"scores": scores.task_scores, "task": scores.task, "label": scores.label}
    write_npz(path, arrays | {"raw_label": raw.label})


def _lines(reports: list[dict[str, Any]]) -> list[str]:
    """Returns the lines to print: a table if test labels are known, and notes of the methods."""
    rows, notes = [], []
    for report in reports:
        name = report["method"] + " --moved" * report.get("moved", False)
        if "not_applicable" in report:
            notes.append(f"{name}: not applicable: {report['not_applicable']}")
            continue
        if "gain" in report:
            accuracies, gain = report["decomposition"]["calibrated"], report["gain"]
            interval = f"{gain['low']:+.2f} .. {gain['high']:+.2f}"
            numbers = (
                *(accuracies["routing_accuracy"], accuracies["oracle_accuracy"]),
                *(report["storage_bytes"] / 2**20, report["seconds"]["fit"]),
            )
            gains = ("", "") if name == "raw" else (f"{gain['mean']:+.2f}", interval)
            texts = (f"{accuracies['accuracy']:.2f}", *gains)
            rows.append((name, *texts, *(f"{number:.2f}" for number in numbers)))
        notes += [report["note"]] * bool(report["note"])
    nouns = {"num_tasks": "task", "num_classes": "class", "num_test_samples": "test sample"}
    sizes = ", ".join(counted(reports[0][field], noun) for field, noun in nouns.items())
    if not rows:
        changed = f"{report['num_changed_labels']} of {report['num_test_samples']} test labels"
        return [f"{name}: {sizes}; {changed} changed; no test_labels, so no accuracy", *notes]
    header = ("method", "accuracy", "gain", "95% interval", "right task", "task given")
    header += ("storage, MiB", "fit, s")
    caption = f"Accuracy in percent, gains over raw in points; {sizes}"
    align = ("left", *["right"] * (len(header) - 1))
    table = tabulate(rows, header, "plain", disable_numparse=True, colalign=align)
    return [caption, table, *notes]


if __name__ == "__main__":
    sys.exit(main())
