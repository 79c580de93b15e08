"""The command: read features, calibrate, write predictions and a report."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fdc_jax import calibration
from fdc_jax.calibration import METHODS, storage
from fdc_jax.errors import InputError, Program, counted, did_you_mean
from fdc_jax.features import feature_files
from fdc_jax.machine import devices
from fdc_jax.machine.files import check_writable_file, user_cache, write_json, write_npz
from fdc_jax.posthoc import shards
from fdc_jax.posthoc.methods import moved, run, summarise
from fdc_jax.posthoc.template import write_template

# Settings of methods with their defaults; RanPAC's and AnaCP's own would take minutes.
_SETTINGS: dict[str, Any] = {
    **{each.name: each.default for each in dataclasses.fields(calibration.Settings)},
    "projections": 2000,
}
_NAMES = ("all", *METHODS)
# Raw reads no statistics; class Gaussians follow the encoder themselves.
_UNMOVED = ("raw", "gaussians")


def _program() -> Program:
    program = Program(
        "posthoc",
        "Calibrate the task heads of a trained class-incremental learner from its features, "
        "without training. The format of feature files: docs/features.md; an example: --template.",
    )
    add = program.add_argument
    add("features", nargs="?", help="an .npz, or a folder of .npy files, such as WORKDIR/features")
    add("--output", help="predictions (.npz); the report gets the suffix .json")
    text = f"one of {', '.join(_NAMES)} (default fdc)"
    add("--method", metavar="NAME", help=text)
    of = {"projections": "ranpac and anacp: random features; the papers use 10000 and 5000"}
    for name, default in _SETTINGS.items():
        text = of.get(name, f"FDC, as config.fdc.{name}")
        add(f"--{name}", type=type(default), help=f"{text} (default {default})")
    text = (
        "move what methods know of the adapted view along with the encoder (needs "
        "train_previous_t; the method gaussians does so itself)"
    )
    add("--moved", action="store_true", help=text)
    fitted = "also save the fitted calibrator (.npz), for calibration.load"
    add("--calibrator", metavar="PATH", help=fitted)
    apart = "fit the tasks of shard i of n, from 0, and write what they leave to --output"
    add("--shard", metavar="i/n", help=f"{apart} (default methods {', '.join(shards.TOGETHER)})")
    add("--merge", metavar="PATH", nargs="+", help="join what all shards wrote to --output")
    add("--basis", metavar="PATH", help="for the second pass of FDC, what merging the first wrote")
    add("--dry_run", action="store_true", help="only say what --shard would read, and how long")
    made = "write a small example of a feature file (.npz) and say how to dump one"
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
    if options.method not in (None, *_NAMES):
        raise InputError(did_you_mean("--method", options.method, _NAMES))
    if options.merge is not None or options.shard is not None:
        _apart(options)
        return
    options.method = options.method or "fdc"
    if options.features is None:
        raise InputError("expected a feature file, or --template for an example of one")
    settings, output = _settings(options), _output(options)
    devices.keep_programs(user_cache())
    stored, every = feature_files.load(options.features), options.method == "all"
    if stored.test_labels is None and (every or (output or options.calibrator) is None):
        raise InputError(
            f"{options.features}: no test_labels, so expected --output=PATH.npz and one method"
        )
    raw = run("raw", stored, {})
    features = moved(stored) if options.moved and options.method not in _UNMOVED else stored
    reports: list[dict[str, Any]] = []
    for method in METHODS if every else dict.fromkeys(("raw", options.method)):
        follows = options.moved and method not in _UNMOVED
        try:
            of = features if follows else stored
            outcome = raw if method == "raw" else run(method, of, settings)
        except InputError as error:
            if not every:
                raise
            reports.append({"method": method, "not_applicable": str(error)})
            continue
        reports.append(summarise(stored, settings, raw.scores, outcome) | {"moved": follows})
        # Of all methods, FDC's predictions are written.
        if output is not None and method in (options.method, "fdc"):
            scores = outcome.scores
            names = {"scores": scores.task_scores, "task": scores.task, "label": scores.label}
            write_npz(output, names | {"raw_label": raw.scores.label})
        if options.calibrator is not None and method == options.method:
            outcome.calibrator.save(options.calibrator)
    if output is not None:
        write_json(output.with_suffix(".json"), {"methods": reports} if every else reports[-1])
    if not options.quiet:
        print("\n".join(_said(reports)))
        if output is not None:
            print(f"wrote {output} and {output.with_suffix('.json')}")


def _apart(options: argparse.Namespace) -> None:
    """Fits the tasks of a shard, or joins what shards wrote."""
    names = shards.TOGETHER if options.method is None else (options.method,)
    if not set(names) <= set(shards.METHODS):
        raise InputError(f"--method: expected one of {', '.join(shards.METHODS)} here")
    if options.output is None and not options.dry_run:
        raise InputError("--output: expected beside --shard and --merge")
    path = check_writable_file("--output", options.output or "part.npz", ".npz")
    basis: Any = None if options.basis is None else calibration.load(options.basis)
    if options.basis is not None and not isinstance(basis, calibration.FDC):
        raise InputError(f"{options.basis}: expected fdc, found {basis.name}")
    if options.merge is not None:
        said = []
        for place, (name, found) in enumerate(shards.merged(options.merge, basis).items()):
            to = path.with_name(f"{path.stem}_{name}.npz") if place else path
            found.save(to)
            said.append(f"wrote {name} to {to}")
            if name == "fdc" and basis is None:
                said.append(f"second pass: all shards with --basis={to}, then --merge with it")
    else:
        if options.features is None:
            raise InputError("--shard: expected a feature file")
        options.method, features = names[0], feature_files.load(options.features)
        how = _settings(options), basis
        tasks = shards.tasks_of(options.shard, len(features.tasks))
        if options.dry_run:
            said = [shards.plan(features, tasks, names, *how)]
        else:
            storage.write(path, shards.part(features, tasks, names, *how))
            said = [f"wrote {path}; after all shards: --merge PARTS --output=PATH"]
    if not options.quiet:
        print("\n".join(said))


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of methods; refuses those that are none before any file is read."""
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
    """Refuses files that cannot be written, or would overwrite the features."""
    if options.calibrator is not None and options.method == "all":
        raise InputError("--calibrator: expected together with one --method")
    for flag, name in (("--output", options.output), ("--calibrator", options.calibrator)):
        written = None if name is None else check_writable_file(flag, name, ".npz").resolve()
        if written == Path(options.features).resolve():
            raise InputError(f"{flag}: {name} is the feature file itself")
    return None if options.output is None else Path(options.output)


def _said(reports: list[dict[str, Any]]) -> list[str]:
    """What is said on screen: a table of methods where labels are known, and their notes."""
    rows, said = [], []
    for report in reports:
        name = report["method"] + " --moved" * report.get("moved", False)
        if "not_applicable" in report:
            said.append(f"{name}: not applicable: {report['not_applicable']}")
            continue
        if "gain" in report:
            cells, gain = report["decomposition"]["calibrated"], report["gain"]
            interval = f"{gain['low']:+.2f} .. {gain['high']:+.2f}"
            shares = (cells[kind] for kind in ("routing_accuracy", "oracle_accuracy"))
            numbers = (*shares, report["storage_bytes"] / 2**20, report["seconds"]["fit"])
            over = ("", "") if name == "raw" else (f"{gain['mean']:+.2f}", interval)
            texts = (f"{cells['accuracy']:.2f}", *over)
            rows.append((name, *texts, *(f"{number:.2f}" for number in numbers)))
        said += [report["note"]] * bool(report["note"])
    nouns = {"num_tasks": "task", "num_classes": "class", "num_test_samples": "test sample"}
    sizes = ", ".join(counted(reports[0][number], noun) for number, noun in nouns.items())
    if not rows:
        changed = f"{report['num_changed_labels']} of {report['num_test_samples']} test labels"
        return [f"{name}: {sizes}; {changed} changed; no test_labels, so no accuracy", *said]
    header = ("method", "accuracy", "gain", "95% interval", "right task", "task given")
    header += ("storage, MiB", "fit, s")
    caption = f"Accuracy in percent, gains over raw in points; {sizes}"
    align = ("left", *["right"] * (len(header) - 1))
    return [caption, tabulate(rows, header, "plain", disable_numparse=True, colalign=align), *said]


if __name__ == "__main__":
    sys.exit(main())
