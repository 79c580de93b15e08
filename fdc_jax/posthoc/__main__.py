"""The command: read features, calibrate, write predictions and a report."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from fdc_jax import calibration
from fdc_jax.calibration import CALIBRATORS, Scores
from fdc_jax.errors import InputError, Program, counted
from fdc_jax.features import feature_files
from fdc_jax.features.feature_files import FeatureSet
from fdc_jax.machine.files import check_writable_file, write_json, write_npz
from fdc_jax.posthoc.methods import METHODS, VIEW_WEIGHTS, Settings, moved, run
from fdc_jax.posthoc.summary import ERRORS, summarise, warn_of_weak_heads
from fdc_jax.posthoc.template import write_template

FDC_SETTINGS = {
    "retained_energy": "eta, share of the variance that a task's subspace keeps",
    "attenuation": "gamma, how much of a feature outside the subspace TSF removes",
    "rlc_weight": "alpha, weight of the residual correction",
    "pac_weight": "beta, weight of the prototype correction",
    "adapted_view_weight": "w_T, weight of the adapted view",
    "pretrained_view_weight": "w_0, weight of the pretrained view",
    "neighbours": "K, class prototypes that the affinity averages",
    "affinity_shrinkage": "lambda of the methods whitened and whitened-classes",
}
# Raw reads no statistics; the other moves its own.
_UNMOVED = ("raw", "transported")
_DEFAULTS = {name: getattr(calibration.check({}), name) for name in FDC_SETTINGS}


def _program() -> Program:
    program = Program(
        "posthoc",
        "Calibrate the task heads of a trained class-incremental learner from its features, "
        "without training. The format of feature files: fdc_jax/features/feature_files.py; an "
        "example: --template.",
    )
    add = program.add_argument
    add("features", nargs="?", help="an .npz, or a folder of .npy files")
    add("--output", help="predictions (.npz); the report gets the suffix .json")
    names = ("all", *METHODS)
    text = f"one of {', '.join(names)} (default fdc)"
    add("--method", default="fdc", choices=names, metavar="NAME", help=text)
    for name, text in FDC_SETTINGS.items():
        default = _DEFAULTS[name]
        add(f"--{name}", type=type(default), help=f"FDC: {text} (default {default})")
    text = (
        "move what the methods know of the adapted view along with the encoder "
        "(needs train_previous_t; the method transported always does)"
    )
    add("--transport", action="store_true", help=text)
    size = "ranpac and anacp: random features (default 2000; the papers use 10000 and 5000)"
    add("--projections", type=int, default=2000, help=size)
    add("--seed", type=int, default=0, help="ranpac and anacp (default 0)")
    terms = "FDC: also write what each score is made of, suffix .terms.npz"
    add("--terms", action="store_true", help=terms)
    fitted = "FDC: also save the fitted calibrator (.npz), for calibration.load or NumPy alone"
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
    features, every = feature_files.load(options.features), options.method == "all"
    if features.test_labels is None and (every or (output or options.calibrator) is None):
        raise InputError(
            f"{options.features}: no test_labels, so expected --output=PATH.npz and one method"
        )
    warn_of_weak_heads(features)
    raw = run("raw", features, settings).scores
    stored = features
    if options.transport and options.method not in _UNMOVED:
        features = moved(features)
    reports: list[dict[str, Any]] = []
    for method in METHODS if every else [options.method]:
        try:
            seen = stored if method in _UNMOVED else features
            outcome = run(method, seen, settings)
        except InputError as error:
            if not every:
                raise
            reports.append({"method": method, "not_applicable": str(error)})
            continue
        reports.append(summarise(method, features, settings, raw, outcome))
        reports[-1]["transport"] = options.transport and method not in _UNMOVED
        # Of all methods, FDC's predictions are written.
        if output is not None and method in (options.method, "fdc"):
            scores = outcome.scores
            names = {"scores": scores.task_scores, "task": scores.task, "label": scores.label}
            write_npz(output, names | {"raw_label": raw.label})
            if options.terms:
                terms = _terms(features, outcome.terms, raw)
                write_npz(output.with_suffix(".terms.npz"), terms)
        if options.calibrator is not None:
            outcome.calibrator.save(options.calibrator)
    if output is not None:
        write_json(output.with_suffix(".json"), {"methods": reports} if every else reports[0])
    if not options.quiet:
        print("\n".join(_comparison(reports) if every else _details(reports[0])))
        if output is not None:
            print(f"wrote {output} and {output.with_suffix('.json')}")


def _settings(options: argparse.Namespace) -> Settings:
    """Refuses methods and values that are none before any file is read."""
    given = {name: getattr(options, name) for name in FDC_SETTINGS}
    given = {name: value for name, value in given.items() if value is not None}
    others = [name for name in given if name not in VIEW_WEIGHTS]
    if options.method == "transported" and others:
        raise InputError(f"--{others[0]}: is a setting of FDC, not of transported")
    if given and options.method not in (*CALIBRATORS, "all"):
        raise InputError(f"--{next(iter(given))}: is a setting of FDC, not of {options.method}")
    if options.seed < 0:
        raise InputError(f"--seed: expected a whole number from 0, found {options.seed}")
    if options.projections < 1:
        raise InputError(f"--projections: expected at least 1, found {options.projections}")
    calibration.check(_DEFAULTS | given | CALIBRATORS.get(options.method, {}))
    return Settings(_DEFAULTS | given, options.projections, options.seed)


def _output(options: argparse.Namespace) -> Path | None:
    """Refuses files that cannot be written, or would overwrite each other or the features."""
    output = None if options.output is None else Path(options.output)
    if options.terms and (options.method != "fdc" or output is None):
        raise InputError("--terms: expected together with --method=fdc and --output")
    if options.calibrator is not None and options.method not in CALIBRATORS:
        raise InputError(
            f"--calibrator: expected together with --method, one of {', '.join(CALIBRATORS)}"
        )
    files = {}
    if output is not None:
        files = {"--output": output, "the report of --output": output.with_suffix(".json")}
    if options.terms and output is not None:
        files["--terms"] = output.with_suffix(".terms.npz")
    if options.calibrator is not None:
        files["--calibrator"] = Path(options.calibrator)
    taken = {Path(options.features).resolve(): "the feature file"}
    for name, path in files.items():
        check_writable_file(name, path, ".json" if name.startswith("the report") else ".npz")
        other = taken.setdefault(path.resolve(), name)
        if other != name:
            raise InputError(f"{name}: {path} is {other} itself")
    return output


def _terms(features: FeatureSet, terms: Any, raw: Scores) -> dict[str, np.ndarray]:
    """What each score of FDC is made of, as arrays of the file of --terms."""
    calibrated = terms.fuse()
    arrays = {
        "base_score": terms.filtered_logits.logit,
        "raw_score": terms.raw_logits.logit,
        "score_scale": terms.filtered_scale,
        "rlc_adapted": terms.adapted.rlc,
        "pac_adapted": terms.adapted.pac,
        "raw_task": raw.task,
        "task_flipped": raw.task != calibrated.task,
        "label_flipped": raw.label != calibrated.label,
    }
    if terms.pretrained is not None:
        arrays |= {"rlc_pretrained": terms.pretrained.rlc, "pac_pretrained": terms.pretrained.pac}
    if features.test_labels is not None:
        arrays["raw_right"] = raw.label == features.test_labels
        arrays["right"] = calibrated.label == features.test_labels
    return arrays


def _name(report: dict[str, Any]) -> str:
    return report["method"] + " --transport" * report.get("transport", False)


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
    header = ("method", "accuracy", "gain", "95% interval", "routing", "oracle", "storage", "fit s")
    tasks = counted(reports[0]["num_tasks"], "task")
    sizes = f"{tasks}, {counted(reports[0]['num_test_samples'], 'test sample')}"
    caption = f"Accuracy in percent, gains over raw in points; {sizes}"
    return [caption, _table(header, rows), *refused]


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
        errors = (f"{report['decomposition'][name][error]:.2f}" for error in ERRORS)
        rows.append((title, *_percentages(report, name), *errors))
    header = ("method", "accuracy", "routing", "oracle", "wrong class", "wrong task", "both wrong")
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
        f"statistics {_mebibytes(report)}, fit {seconds['fit']:.1f} s, scoring "
        f"{1e3 * seconds['score'] / samples:.3f} ms per sample, first call included",
    ]


def _percentages(report: dict[str, Any], name: str) -> list[str]:
    kinds = ("accuracy", "routing_accuracy", "oracle_accuracy")
    return [f"{report[kind][name]:.2f}" for kind in kinds]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    align = ("left", *("right" for _ in header[1:]))
    return tabulate(rows, header, tablefmt="plain", disable_numparse=True, colalign=align)


def _mebibytes(report: dict[str, Any]) -> str:
    return f"{report['storage_bytes'] / 2**20:.2f} MiB"


if __name__ == "__main__":
    sys.exit(main())
