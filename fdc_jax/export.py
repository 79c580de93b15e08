"""A finished run as one folder that needs neither its images nor the file of its encoder.

    python -m fdc_jax.export WORKDIR OUT

`fdc_jax.open_run(OUT)` reads it. Prediction takes E_T and E_0 alone (Algorithm 1, line 15): the
statistics of earlier tasks were collected with their own E_t and lie in the calibrators.
"""

import argparse
import dataclasses
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from fdc_jax import learners
from fdc_jax.calibration import METHODS
from fdc_jax.errors import InputError, Program, counted
from fdc_jax.machine.files import (
    check_writable_folder,
    printable,
    read_json,
    sha256,
    write_folder_atomically,
    write_json,
    write_manifest,
    write_safetensors,
    write_text,
)
from fdc_jax.model import layouts, vit, weights
from fdc_jax.report import words
from fdc_jax.run.opened import Opened, open_run
from fdc_jax.run.places import Places

_log = logging.getLogger("fdc_jax.export")  # also where it is the program

# Fields of a configuration that were of the machine, and what they are of any.
_ANYWHERE = {
    "data.dir": "",
    "data.source": "",
    "cache_dir": "",
    "encoder.weights": "pretrained/model.safetensors",
    "encoder.attention": "auto",
}
_BESIDE_WEIGHTS = ("config.json", "preprocessor_config.json")
_ASSETS = Path(__file__).with_name("assets")
# Files of an export, beside what lay beside E_0 and the model card.
WHAT = {
    **{f"calibrators/{name}.npz": f"{each.title}, and the heads" for name, each in METHODS.items()},
    "config.json": "settings of the run",
    "results.json": "its results, with the names of the classes",
    "predictions.npz": "predicted and true labels of the test images",
    "merged.safetensors": "what E_T has in the place of parameters of E_0",
    "pretrained/model.safetensors": "the pretrained encoder E_0",
    "timm/config.json": "how timm makes its model",
    "timm/model.safetensors": "E_T as a state dict of timm",
    "manifest.json": "SHA-256 of every file but this one and the card",
}


def write(
    workdir: str | os.PathLike[str],
    output: str | os.PathLike[str],
    weights_file: str | None = None,
    learner: str = "",
) -> dict[str, int]:
    """Writes a finished run as one folder, whole or not at all; the same run gives the same bytes.

    The folder is read once before it gets its name.

    Args:
        workdir: of one seed.
        output: the folder to make.
        weights_file: the file of the pretrained encoder, if no longer where it was.
        learner: the module of a learner outside the package, whose code is run.

    Returns:
        The bytes of every file, by its name in the folder.

    Raises:
        InputError: the folder exists or cannot be written, the run is not finished, or something of
            it is missing, damaged or of another run.
    """
    output = Path(output)
    if output.exists() or output.is_symlink():
        raise InputError(f"{output}: exists already; name a folder that does not")
    check_writable_folder("OUT", output.absolute().parent)
    run = open_run(workdir, weights=weights_file, learner=learner)
    if run.results is None:
        raise InputError(f"{run.folder}: expected a finished run, found no results.json")
    heads = run.heads()
    if len(heads) != run.num_tasks:
        raise InputError(
            f"{run.folder}: its results are of {counted(run.num_tasks, 'task')}, and it has "
            f"learned {len(heads)}; let it finish first"
        )
    with write_folder_atomically(output) as folder:
        target = Places(folder)
        _write_pretrained(run, target)
        own = _ANYWHERE | {"weights sha256": sha256(target.weights_file)}
        write_json(target.config_file, read_json(run.config_file) | own)
        config = run.results["config"] | _ANYWHERE
        write_json(target.results_file, run.results | {"config": config})
        for name in run.calibrators:
            target.calibrator_file(name).parent.mkdir(exist_ok=True)
            run.calibrator(name).save(target.calibrator_file(name))
        _copy(run.predictions_file, target.predictions_file)
        write_safetensors(target.merged_file, _flat(run.encoder(run.num_tasks)))
        _write_timm(run, folder / "timm")
        write_manifest(folder)
        made = open_run(folder, learner=learner)
        for name in made.calibrators:
            if not _same(made.calibrator(name).heads, heads):
                raise InputError(f"{run.calibrator_file(name)}: its heads are not those of the run")
        write_text(folder / "README.md", _card(run, folder, _sizes(folder)))
        return _sizes(folder)


def _flat(tree: Any) -> dict[str, np.ndarray]:
    return jax.tree.map(np.asarray, traverse_util.flatten_dict(tree, sep="/"))


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise InputError(f"cannot copy {source}: {error.strerror or error}") from error


# What lies in it ----------------------------------------------------------------------------------


def _write_pretrained(run: Opened, target: Places) -> None:
    """Writes the arrays of the pretrained encoder as they are named, and their configuration."""
    path = run.encoders.pretrained.path
    arrays = weights.used(path)
    write_safetensors(target.weights_file, arrays)
    if "embedding/kernel" not in arrays:  # AugReg's layout has no configuration.
        for name in _BESIDE_WEIGHTS:
            if path.with_name(name).exists():
                _copy(path.with_name(name), target.weights_file.with_name(name))


def _write_timm(run: Opened, folder: Path) -> None:
    """Writes E_T as timm has it, if it has; the pixels that it gets are those of the run."""
    encoders, kernels = run.encoders, run.encoder(run.num_tasks)
    model, size = encoders.learner.setup.model, run.config["encoder.image_size"]
    offset, divisor = vit.INPUT_RANGES.get(model.input_range, (None, None))
    pixels = {} if offset is None else {"mean": (offset,) * 3, "std": (divisor,) * 3}
    variant = dataclasses.replace(model.variant, **pixels)
    try:
        arrays, config = layouts.as_timm(encoders.backbone, variant, kernels, size)
    except InputError as error:
        _log.warning("without a folder for timm: %s", error)
        return
    write_safetensors(folder / "model.safetensors", arrays)
    write_json(folder / "config.json", config)


def _same(left: Any, right: Any) -> bool:
    """Tells whether two trees hold the same arrays in the same places."""
    alike = jax.tree.structure(left) == jax.tree.structure(right)
    return alike and jax.tree.all(jax.tree.map(np.array_equal, left, right))


def _sizes(folder: Path) -> dict[str, int]:
    """Returns the bytes of every file of a folder, by its name in there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


# The model card -----------------------------------------------------------------------------------


def _card(run: Opened, folder: Path, sizes: dict[str, int]) -> str:
    """Returns a description in Markdown, with the fields that model hubs read."""
    results: Any = run.results
    fields, encoder = results["config"], results["encoder"]
    measures = ("accuracy", "routing_accuracy", "average_incremental_accuracy")
    rows = [
        [words.method_title(name), *(_percent(results[each].get(name)) for each in measures)]
        for name in results["accuracy"]
    ]
    licence, source = _licence(run, folder)
    tasks, classes = counted(results["num_tasks"], "task"), counted(results["num_classes"], "class")
    settings = {
        "learner": f"{results['learner']}, preset {fields['learner.preset']}",
        "encoder": f"{encoder['variant']} at {fields['encoder.image_size']} pixels, "
        f"{encoder['weights']}, sha256 {encoder['sha256']}",
        "pixels": fields["data.input_range"],
        "training": f"{counted(fields['train.epochs'], 'epoch')}, batches of "
        f"{fields['train.batch_size']}, rank {fields['train.rank']}, learning rates "
        f"{fields['train.increment_learning_rate']:g} and {fields['train.head_learning_rate']:g}",
        "FDC": ", ".join(
            f"{name.removeprefix('fdc.').replace('_', ' ')} {value}"
            for name, value in fields.items()
            if name.startswith("fdc.")
        ),
        "seeds": f"{results['seed']}, of the order of classes {results['class_order_seed']}",
        "made with": ", ".join(f"{k} {v}" for k, v in results["versions"].items() if v),
    }
    timm = _ASSETS / "model_card_timm.md"
    return (
        (_ASSETS / "model_card.md")
        .read_text(encoding="utf-8")
        .format(
            licence=f"\nlicense: {licence.lower()}" if licence else "",
            learner=learners.title(results["learner"]),
            benchmark=results["benchmark"],
            split=results.get("split", "official"),
            tasks=tasks,
            classes=classes,
            last=results["num_tasks"],
            calibrators=", ".join(map(words.method_title, run.calibrators)),
            test=counted(results["num_test_images"], "test image"),
            training=counted(results["num_train_images"], "training image"),
            accuracies="\n".join(f"| {' | '.join(row)} |" for row in rows),
            settings="\n".join(f"| {name} | {text} |" for name, text in settings.items()),
            timm=timm.read_text(encoding="utf-8") if (folder / "timm").exists() else "",
            files="\n".join(
                f"| {name} | {size:,} | {WHAT.get(name, '')} |" for name, size in sizes.items()
            ),
            source=source,
        )
    )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _licence(run: Opened, folder: Path) -> tuple[str, str]:
    """Returns the licence of the pretrained weights, empty if not known, and who says so."""
    results: Any = run.results
    name, digest = results["encoder"]["weights"], results["encoder"]["sha256"]
    if digest == sha256(weights.DIGITS_WEIGHTS):
        return "Apache-2.0", "Apache-2.0, a part of fdc_jax"
    if name in weights.AUGREG_FILES.values():
        return "Apache-2.0", f"Apache-2.0, as {name} of google-research/vision_transformer is"
    beside = Places(folder).weights_file.with_name("config.json")
    known = read_json(beside).get("pretrained_cfg", {}).get("license") if beside.exists() else None
    if isinstance(known, str):
        return known, f"{printable(known)}, as the configuration beside them says"
    return "", f"not known; ask where {name} came from"


# The command --------------------------------------------------------------------------------------


def parser() -> Program:
    """Returns the options of the command."""
    program = Program("export", "Write a finished run as one folder that fdc_jax.open_run reads.")
    add = program.add_argument
    add("workdir", help="the work directory of one seed")
    add("out", help="the folder to make")
    add("--weights", metavar="FILE", help="the pretrained encoder, if it was moved")
    add("--learner", metavar="MODULE", default="", help="a learner of your own, whose code is run")
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 after an error that has been printed as one line."""
    return parser().run(_run, arguments)


def _run(options: argparse.Namespace) -> None:
    sizes = write(options.workdir, options.out, options.weights, options.learner)
    if options.quiet:
        return
    for name, size in sizes.items():
        print(f"{size / 1e6:10.2f} MB  {name}")
    print(f"{sum(sizes.values()) / 1e6:10.2f} MB  {options.out}")


if __name__ == "__main__":
    sys.exit(main())
