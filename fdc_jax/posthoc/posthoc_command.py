"""The command `fdc posthoc`: calibration of the heads of feature files, and reports about it."""

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tabulate import tabulate

from fdc_jax import calibration
from fdc_jax.calibration import FDC, METHODS
from fdc_jax.calibration.gaussians import WITHOUT
from fdc_jax.calibration.inputs import NotApplicable
from fdc_jax.errors import InputError, Program, counted, did_you_mean, escaped
from fdc_jax.features import feature_files
from fdc_jax.machine import devices
from fdc_jax.machine.files import (
    check_writable_file,
    check_writable_folder,
    named_path,
    user_cache,
    write_json,
    write_npz,
)
from fdc_jax.posthoc import methods
from fdc_jax.posthoc.methods import FittedMethod

_LOGGER = logging.getLogger("fdc_jax.posthoc")
# Settings of all methods with their defaults. RanPAC and AnaCP take minutes with their own number
# of projections.
_SETTINGS: dict[str, Any] = {
    **msgspec.structs.asdict(calibration.Settings()),
    "projections": 2000,
}
_SWEPT = ("attenuation", "retained_energy", "neighbours")
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
    text = "an .npz, a folder of .npy files such as WORKDIR/features, or example, the features of "
    add("features", nargs="+", help=text + "the package; several are seeds of one experiment")
    text = "a folder for a report with tables and figures; or, of one file, an .npz for the "
    add("--output", help=text + "predictions, whose report gets the suffix .json")
    add("--name", default="Own features", help="the learner in reports (default Own features)")
    text = f"some of {', '.join(METHODS)}, or all (default {FDC.name})"
    add("--method", metavar="NAME[,NAME]", default=FDC.name, help=text)
    add("--components", action="store_true", help="also print FDC with some components alone")
    help_texts = {"projections": "ranpac and anacp: random features; the papers use 10000 and 5000"}
    for name, default in _SETTINGS.items():
        text = help_texts.get(
            name, f"FDC, as config.fdc.{name}; several values, as in 1,2, are a sweep"
        )
        values = partial(_values, type(default))
        add(f"--{name}", type=values, metavar="VALUE", help=f"{text} (default {default})")
    text = "also save the fitted calibrator (.npz), for calibration.load"
    add("--calibrator", metavar="PATH", help=text)
    return program


def _values(kind: type, text: str) -> list[Any]:
    """Returns the numbers of a flag, separated by commas."""
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        example = "1,2" if kind is int else "0.3,0.5"
        raise argparse.ArgumentTypeError(
            f"expected numbers such as {example}, found {text!r}"
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, `sys.argv` when None; returns 0, or 2 after an error of one line."""
    return _program().run(_run, arguments)


def _run(options: argparse.Namespace) -> None:
    """Runs the parsed command."""
    names = [*METHODS] if options.method == "all" else options.method.split(",")
    for name in names:
        if name not in METHODS:
            raise InputError(did_you_mean("--method", name, ("all", *METHODS)))
    settings, sweep = _settings(options, names)
    files = [named_path("features", file) for file in options.features]
    files = [_EXAMPLE if str(f) == "example" and not f.exists() else f for f in files]
    folder = options.output is not None and not Path(options.output).suffix
    devices.keep_programs(user_cache())
    if len(files) > 1 or folder or sweep or options.components:
        if options.calibrator is not None or not (folder or options.output is None):
            flag = "--output=PATH.npz" if options.calibrator is None else "--calibrator"
            raise InputError(
                f"{flag}: expected one file of features, without a sweep or components"
            )
        _report(options, files, names, settings, sweep)
    else:
        _of_one_file(options, files[0], names, settings)


def _settings(
    options: argparse.Namespace, names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Returns all settings by name, and those with several values; raises InputError."""
    given = {name: value for name in _SETTINGS if (value := getattr(options, name)) is not None}
    sweep = {name: values for name, values in given.items() if len(values) > 1}
    if unknown := sweep.keys() - _SWEPT:
        raise InputError(f"--{min(unknown)}: expected one value; swept are {', '.join(_SWEPT)}")
    for name, values in given.items():
        if not any(name in METHODS[method].settings for method in names):
            raise InputError(f"--{name}: is no setting of {options.method}")
        for value in values:
            if name == "projections" and value < 1:
                raise InputError(f"--projections: expected at least 1, found {value}")
            try:
                calibration.make(FDC.name, **{name: value})
            except InputError as error:
                raise InputError(f"--{error}") from error
    return _SETTINGS | {name: given[name][0] for name in given.keys() - sweep.keys()}, sweep


def _outcomes(
    file: Path, names: Sequence[str], settings: Mapping[str, Any], renumbered: bool = False
) -> tuple[feature_files.FeatureSet, dict[str, FittedMethod], dict[str, str]]:
    """Returns a file's features, outcomes by method, and reasons why others do not apply.

    Raises InputError if an array is damaged, whatever the methods, or if no method applies.
    """
    features = feature_files.load(file, renumbered)
    outcomes, refused = {}, {}
    with feature_files.errors_of(file):
        features.check()
    for name in dict.fromkeys(("raw", *names)):
        try:
            with feature_files.errors_of(file):
                outcomes[name] = methods.run(name, features, settings)
        except NotApplicable as error:
            refused[name] = str(error)
    if outcomes.keys().isdisjoint(names):
        raise InputError(refused[names[0]])
    if features.test_labels is not None:
        confusions = methods.task_confusions(features, outcomes)
        if warning := methods.shift_warning(confusions):
            _LOGGER.warning(f"{file}: {warning}")
    return features, outcomes, refused


def _report(
    options: argparse.Namespace,
    files: Sequence[Path],
    names: Sequence[str],
    settings: Mapping[str, Any],
    sweep: Mapping[str, list[Any]],
) -> None:
    """Prints tables of files as seeds, and writes a report about them."""
    from fdc_jax import learners, report
    from fdc_jax.posthoc import seeds  # which imports the modules of runs and reports
    from fdc_jax.report import console, runs, tables

    learner = options.name.strip()
    if not learner or learner != escaped(learner) or learner in learners.names():
        raise InputError(f"--name: expected a name of your own, found {escaped(options.name)!r}")
    output = None
    if options.output is not None:
        output = named_path("--output", options.output)
        check_writable_folder("--output", output)
    benchmark = "+".join(dict.fromkeys(file.stem for file in files))
    members, sizes = [], ""
    for seed, file in enumerate(files, 1):
        labels = [np.sort(task.classes) for task in feature_files.load(file).tasks]
        features, outcomes, refused = _outcomes(file, names, settings, renumbered=True)
        sizes = sizes or _sizes(features)
        if (other_sizes := _sizes(features)) != sizes:
            raise InputError(f"{file}: expected {sizes} as in {files[0]}, found {other_sizes}")
        for method, reason in refused.items():
            _LOGGER.warning(f"{method}: not applicable: {reason}")
        of = {"benchmark": benchmark, "learner": learner, "seed": seed}
        order = np.concatenate(labels)
        members.append(seeds.feature_run(of, file, features, order, outcomes))
    group = runs.analyse(runs.group(members)[0], sweep)
    if not options.quiet:
        console.show(group)
        for reason in group.missing:
            print(reason)
        shown = {"ablation": options.components, "sweeps": bool(sweep)}
        for table in tables.build([group]):
            if shown.get(table.name):
                print(f"\n{table.to_text()}", end="")
    if output is not None:
        for folder in seeds.removed(output):
            _LOGGER.warning(f"{folder}: removed; an earlier version made it for its report")
        report.write_groups([group], output, quiet=options.quiet)
        write_json(output / "results.json", runs.summary(group))


def _of_one_file(
    options: argparse.Namespace, file: Path, names: Sequence[str], settings: Mapping[str, Any]
) -> None:
    """Prints the table of one file, and writes predictions and the calibrator."""
    output = _output(options, file, names)
    compared = len(names) > 1
    features, outcomes, refused = _outcomes(file, names, settings)
    if features.test_labels is None and (compared or (output or options.calibrator) is None):
        raise InputError(f"{file}: no test_labels, so expected --output=PATH.npz and one method")
    results = methods.results(features, outcomes)
    if options.calibrator is not None:
        outcomes[names[0]].calibrator.save(options.calibrator)
    if output is not None:
        # Of several methods, the predictions are FDC's, or those of the first that applies.
        applicable = [name for name in (FDC.name, *names) if name in names and name in outcomes]
        method = applicable[0]
        scores = outcomes[method].scores
        arrays = {"scores": scores.task_scores, "task": scores.task, "label": scores.label}
        arrays["method"] = np.array(method)
        if "raw" in outcomes:
            arrays["raw_label"] = outcomes["raw"].scores.label
        write_npz(output, arrays)
        flags = {"settings": settings, "predictions": method, "not_applicable": refused}
        write_json(output.with_suffix(".json"), results | flags)
    if not options.quiet:
        reasons = [f"{name}: not applicable: {reason}" for name, reason in refused.items()]
        print("\n".join(_lines(results, _sizes(features)) + reasons))
        if output is not None:
            print(f"wrote {output} (predictions of {method}) and {output.with_suffix('.json')}")


def _output(options: argparse.Namespace, file: Path, names: Sequence[str]) -> Path | None:
    """Returns the path of the predictions; raises InputError if a file cannot be written.

    Neither the predictions nor the calibrator may overwrite the features, or each other.
    """
    if options.calibrator is not None and len(names) > 1:
        raise InputError("--calibrator: expected together with one --method")
    roles: dict[str, str] = {}
    for flag, path in (("--output", options.output), ("--calibrator", options.calibrator)):
        if path is None:
            continue
        roles[os.path.realpath(named_path("features", file))] = "the feature file itself"
        written = check_writable_file(flag, path, ".npz")
        real = os.path.realpath(written)
        if real in roles:
            raise InputError(f"{flag}: {path} is {roles[real]}")
        roles[real] = f"the file of {flag}"
        setattr(options, flag.strip("-"), written)
    return options.output


def _sizes(features: feature_files.FeatureSet) -> str:
    classes = counted(sum(len(task.classes) for task in features.tasks), "class")
    samples = counted(len(features.test_adapted), "test sample")
    return f"{counted(len(features.tasks), 'task')}, {classes}, {samples}"


def _lines(results: Mapping[str, Any], sizes: str) -> list[str]:
    """Returns the lines to print: a table if test labels are known, and notes of the methods."""
    # A note on missing drift compensation has already been a warning.
    notes = [note for note in results["notes"].values() if not note.startswith(WITHOUT)]
    if "accuracy" not in results:
        *_, name = results["storage_bytes"]
        changed = results["num_changed_labels"].get(name)
        of_all = f"{changed} of {results['num_test_images']} test labels changed; "
        of_all *= changed is not None
        return [f"{name}: {sizes}; {of_all}no test_labels, so no accuracy", *notes]
    rows, gains = [], results["gain"]
    for name, shares in results["decomposition"].items():
        megabytes = results["storage_bytes"][name] / 2**20
        row: tuple[str, ...] = name, f"{shares['accuracy']:.2f}"
        if gain := gains.get(name):
            interval = f"{gain['low']:+.2f} .. {gain['high']:+.2f}"
            row += ("", "") if name == "raw" else (f"{gain['mean']:+.2f}", interval)
        numbers = shares["routing_accuracy"], shares["oracle_accuracy"], megabytes
        numbers += (results["timing"]["fit_seconds"][name],)
        rows.append((*row, *(f"{number:.2f}" for number in numbers)))
    header = ["method", "accuracy"]
    header += ["gain", "95% interval"] if gains else []
    header += ["right task", "task given", "storage, MiB", "fit, s"]
    align = ["left", *("right" for _ in header[1:])]
    table = tabulate(rows, header, "plain", disable_numparse=True, colalign=align)
    unit = f"Accuracy in percent{', gains over raw in points' if gains else ''}"
    return [f"{unit}; {sizes}", table, *notes]
