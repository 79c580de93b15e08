"""The command: read features, calibrate, write predictions and a report."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fdc_jax import calibration, command_line, feature_files
from fdc_jax.calibration import Scores, Terms
from fdc_jax.errors import InputError
from fdc_jax.feature_files import FeatureSet
from fdc_jax.files import write_atomically, write_npz
from fdc_jax.posthoc import summary as summaries
from fdc_jax.posthoc import tables
from fdc_jax.posthoc.methods import METHODS, VARIANTS, Outcome, Settings, run
from fdc_jax.posthoc.template import write_template

FDC_SETTINGS = {
    "retained_energy": (float, 0.75, "eta, share of the variance that a task's subspace keeps"),
    "attenuation": (float, 0.5, "gamma, how much of a feature outside the subspace TSF removes"),
    "rlc_weight": (float, 1.0, "alpha, weight of the residual correction"),
    "pac_weight": (float, 1.0, "beta, weight of the prototype correction"),
    "adapted_view_weight": (float, 1.0, "w_T, weight of the adapted view"),
    "pretrained_view_weight": (float, 1.0, "w_0, weight of the pretrained view"),
    "neighbours": (int, 1, "K, class prototypes that the affinity averages"),
    "affinity_shrinkage": (float, 0.05, "lambda of the methods whitened and whitened-classes"),
}

# The paper's, and its variants beyond the paper.
_FDC = ("fdc", *VARIANTS)


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog="python -m fdc_jax.posthoc",
        allow_abbrev=False,
        description="Calibrate the task heads of a trained class-incremental learner from its "
        "features, without training. The format of feature files: fdc_jax/feature_files.py; an "
        "example: --template.",
    )
    parser.add_argument("features", nargs="?", help="an .npz, or a folder of .npy files")
    parser.add_argument("--output", help="predictions (.npz); the report gets the suffix .json")
    parser.add_argument(
        "--method", default="fdc", help=f"all, or one of {', '.join(METHODS)} (default fdc)"
    )
    for name, (kind, default, text) in FDC_SETTINGS.items():
        parser.add_argument(f"--{name}", type=kind, help=f"FDC: {text} (default {default})")
    parser.add_argument(
        "--projections",
        type=int,
        default=2000,
        help="ranpac and anacp: random features (default 2000; the papers use 10000 and 5000)",
    )
    parser.add_argument("--seed", type=int, default=0, help="ranpac and anacp (default 0)")
    parser.add_argument(
        "--terms",
        action="store_true",
        help="FDC: also write what each score is made of, suffix .terms.npz",
    )
    parser.add_argument(
        "--calibrator",
        metavar="PATH",
        help="FDC: also save the fitted calibrator (.npz), for calibration.FDC.load or NumPy alone",
    )
    parser.add_argument(
        "--template",
        metavar="PATH",
        nargs="?",
        const="features.npz",
        help="write a small example of a feature file (.npz, or a folder) and say how to dump one",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--traceback", action="store_true", help="show where an error arose")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: command line without the program; `sys.argv` when None.

    Returns:
        0, or 2 after an error that has been printed as one line.
    """
    return command_line.run("fdc_jax.posthoc", _parser(), _run, arguments)


def _run(options: argparse.Namespace) -> None:
    if options.template is not None:
        text = write_template(options.template)
        if not options.quiet:
            print(text)
        return
    if options.features is None:
        raise InputError("expected a feature file, or --template for an example of one")
    settings = _settings(options)
    output = None if options.output is None else _output("--output", options.output)
    if options.method != "all" and options.method not in METHODS:
        raise InputError(
            f"--method: expected all or one of {', '.join(METHODS)}; found {options.method}"
        )
    if options.terms and (options.method != "fdc" or output is None):
        raise InputError("--terms: expected together with --method=fdc and --output")
    if options.calibrator is not None:
        if options.method not in _FDC:
            raise InputError(
                f"--calibrator: expected together with --method, one of {', '.join(_FDC)}"
            )
        _output("--calibrator", options.calibrator)
    _check_apart(options, output)
    features = feature_files.load(options.features)
    labelled = features.test_labels is not None
    if options.method == "all":
        if not labelled:
            raise InputError(
                f"{options.features}: --method=all compares accuracies: no test_labels"
            )
        _all(features, settings, output, options)
        return
    if output is None and options.calibrator is None and not labelled:
        raise InputError(f"{options.features}: has no test_labels, so expected --output=PATH.npz")
    outcome = run(options.method, features, settings)
    raw = outcome.terms.raw() if outcome.terms else run("raw", features, settings).scores
    report = _report(options.method, features, settings, raw, outcome)
    if output is not None:
        _write(output, raw, outcome.scores, report)
        if options.terms and outcome.terms is not None:
            _write_terms(output.with_suffix(".terms.npz"), features, outcome.terms)
    if options.calibrator is not None and outcome.calibrator is not None:
        outcome.calibrator.save(options.calibrator)
    if not options.quiet:
        _print_report(options.method, report)
        if output is not None:
            print(f"wrote {output} and {output.with_suffix('.json')}")


def _settings(options: argparse.Namespace) -> Settings:
    given = {name: getattr(options, name) for name in FDC_SETTINGS}
    given = {name: value for name, value in given.items() if value is not None}
    if given and options.method not in (*_FDC, "all"):
        raise InputError(f"--{next(iter(given))}: is a setting of FDC, not of {options.method}")
    fdc = {name: given.get(name, default) for name, (_, default, _) in FDC_SETTINGS.items()}
    if options.seed < 0:
        raise InputError(f"--seed: expected a whole number from 0, found {options.seed}")
    if options.projections < 1:
        raise InputError(f"--projections: expected at least 1, found {options.projections}")
    # Refuses values out of range before any file is read.
    calibration.FDC(**fdc, **VARIANTS.get(options.method, {}))
    return Settings(fdc, options.projections, options.seed)


def _output(flag: str, output: str) -> Path:
    """Refuses an output that cannot be written before anything is computed."""
    path = Path(output)
    if path.suffix != ".npz":
        raise InputError(f"{flag}: expected a name that ends in .npz, found {output}")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{flag}: cannot write {output}")
    return path


def _check_apart(options: argparse.Namespace, output: Path | None) -> None:
    """Refuses files that would overwrite each other or the features, before anything is read."""
    files = {"the feature file": Path(options.features)}
    if output is not None:
        files["--output"] = output
        files["the report of --output"] = output.with_suffix(".json")
        if options.terms:
            files["--terms"] = output.with_suffix(".terms.npz")
    if options.calibrator is not None:
        files["--calibrator"] = Path(options.calibrator)
    earlier: dict[str, Path] = {}
    for name, path in files.items():
        for other, taken in earlier.items():
            if _same_file(path, taken):
                raise InputError(f"{name}: {path} is {other} itself")
        if name not in ("the feature file", "--output", "--calibrator") and path.is_dir():
            raise InputError(f"{name}: cannot write {path}")
        earlier[name] = path


def _same_file(path: Path, other: Path) -> bool:
    if os.path.realpath(path) == os.path.realpath(other):
        return True
    return path.exists() and other.exists() and path.samefile(other)


def _report(
    method: str, features: FeatureSet, settings: Settings, raw: Scores, outcome: Outcome
) -> dict[str, Any]:
    report = {
        "method": method,
        **summaries.summarise(features, raw, outcome.scores),
        "storage_bytes": outcome.storage_bytes,
        "seconds": {"fit": outcome.fit_seconds, "score": outcome.score_seconds},
        "settings": _settings_of(method, settings),
        "versions": summaries.versions(),
    }
    if outcome.terms is not None and features.test_labels is not None:
        report["component_accuracy"] = summaries.component_accuracies(features, outcome.terms)
    return report


def _settings_of(method: str, settings: Settings) -> dict[str, Any]:
    if method in _FDC:
        return settings.fdc | VARIANTS.get(method, {})
    if method.startswith(("ranpac", "anacp")):
        return {"projections": settings.projections, "seed": settings.seed}
    return {}


def _write(output: Path, raw: Scores, calibrated: Scores, report: dict[str, Any]) -> None:
    write_npz(
        output,
        {
            "scores": calibrated.task_scores,
            "task": calibrated.task,
            "label": calibrated.label,
            "raw_label": raw.label,
        },
    )
    with write_atomically(output.with_suffix(".json")) as file:
        file.write((json.dumps(report, indent=2, allow_nan=False) + "\n").encode())


def _write_terms(path: Path, features: FeatureSet, terms: Terms) -> None:
    raw, calibrated = terms.raw(), terms.fuse()
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
    write_npz(path, arrays)


def _all(
    features: FeatureSet, settings: Settings, output: Path | None, options: argparse.Namespace
) -> None:
    header = ("method", "accuracy", "gain", "95% interval", "routing", "oracle", "storage", "fit s")
    raw = run("raw", features, settings).scores
    reports: list[dict[str, Any]] = []
    rows, refused = [], []
    for method in METHODS:
        try:
            outcome = run(method, features, settings)
        except InputError as error:
            reports.append({"method": method, "not_applicable": str(error)})
            refused.append(f"{method}: not applicable: {error}")
            continue
        report = _report(method, features, settings, raw, outcome)
        reports.append(report)
        gain = report["gain"]
        rows.append(
            (
                method,
                f"{report['accuracy']['calibrated']:.2f}",
                f"{gain['mean']:+.2f}",
                f"{gain['low']:+.2f} .. {gain['high']:+.2f}",
                f"{report['routing_accuracy']['calibrated']:.2f}",
                f"{report['oracle_accuracy']['calibrated']:.2f}",
                tables.mebibytes(outcome.storage_bytes),
                f"{outcome.fit_seconds:.1f}",
            )
        )
        if method == "fdc" and output is not None:
            _write(output, raw, outcome.scores, report)
    if output is not None:
        with write_atomically(output.with_suffix(".json")) as file:
            text = json.dumps({"methods": reports}, indent=2, allow_nan=False)
            file.write((text + "\n").encode())
    if not options.quiet:
        sizes = f"{len(features.tasks)} tasks, {len(raw.label)} test samples"
        tables.show(f"Accuracy in percent, gains over raw in points; {sizes}", header, rows)
        for line in refused:
            print(line)
        if output is not None:
            print(f"wrote {output} (fdc) and {output.with_suffix('.json')} (all methods)")


def _print_report(method: str, report: dict[str, Any]) -> None:
    sizes = f"{report['num_tasks']} tasks, {report['num_classes']} classes"
    samples = report["num_test_samples"]
    if "accuracy" not in report:
        print(
            f"{method}: {sizes}; {report['num_changed_labels']} of {samples} test labels changed; "
            "no test_labels, so no accuracy"
        )
        return
    rows = []
    for name in ("raw", "calibrated"):
        cells = report["decomposition"][name]
        rows.append(
            (
                "raw" if name == "raw" else method,
                *(
                    f"{value:.2f}"
                    for value in (
                        report["accuracy"][name],
                        report["routing_accuracy"][name],
                        report["oracle_accuracy"][name],
                        cells["right_task_wrong_class"],
                        cells["wrong_task_oracle_right"],
                        cells["wrong_task_oracle_wrong"],
                    )
                ),
            )
        )
    tables.show(
        f"Percent of {samples} test samples; {sizes}",
        ("method", "accuracy", "routing", "oracle", "wrong class", "wrong task", "both wrong"),
        rows,
    )
    gain, flips = report["gain"], report["flips"]
    print(
        f"gain {gain['mean']:+.2f} points, 95% interval {gain['low']:+.2f} .. {gain['high']:+.2f} "
        f"(bootstrap over test samples), McNemar p = {report['mcnemar_p_value']:.2g}; "
        f"{flips['wrong_to_right']} repaired, {flips['right_to_wrong']} broken"
    )
    for pair in report["most_confused_tasks"]["calibrated"][:3]:
        print(
            f"task {pair['true_task']} read as task {pair['predicted_task']}: {pair['count']} "
            f"samples, {pair['share']:.1f}% of the task"
        )
    print(
        f"statistics {tables.mebibytes(report['storage_bytes'])}, fit "
        f"{report['seconds']['fit']:.1f} s, scoring "
        f"{1e3 * report['seconds']['score'] / samples:.3f} ms per sample, first call included"
    )
