"""Export of a finished run as one folder with its encoder, without images.

    python -m fdc_jax export WORKDIR OUT

`fdc_jax.open_run(OUT)` reads it. Prediction needs E_T and E_0 alone (Algorithm 1, line 14): the
calibrators hold the statistics of earlier tasks, collected with the encoder E_t of each task.
"""

import argparse
import dataclasses
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from flax import traverse_util

from fdc_jax import evaluation
from fdc_jax.errors import InputError, Program, counted
from fdc_jax.machine.files import (
    check_writable_folder,
    named_path,
    sha256,
    write_folder_atomically,
    write_json,
    write_manifest,
    write_safetensors,
)
from fdc_jax.model import layouts, vit, weights
from fdc_jax.run.configuration import OF_A_HOST
from fdc_jax.run.folder import RunFolder
from fdc_jax.run.records import Results
from fdc_jax.run.saved import Run, open_run

_log = logging.getLogger(__name__)

# Configuration files beside the weights of timm and Hugging Face.
_WEIGHTS_CONFIGS = ("config.json", "preprocessor_config.json")


@jax.enable_x64(False)
def write(
    workdir: str | os.PathLike[str],
    output: str | os.PathLike[str],
    weights_file: str | None = None,
    learner: str = "",
) -> None:
    """Writes a finished run as one folder; the same run gives the same bytes.

    The folder gets its final name after a check that `open_run` reads it.

    Args:
        workdir: work directory of one seed.
        output: the folder to make.
        weights_file: the file of the pretrained encoder, see `open_run`.
        learner: module of a learner outside the package, whose code is executed, or "".

    Raises:
        InputError: `output` exists or cannot be written, the run is not finished, or one of the
            run's files is missing, damaged or of another run.
    """
    output = named_path("OUT", output)
    if output.exists() or output.is_symlink():
        raise InputError(f"{output}: exists already; name a folder that does not")
    check_writable_folder("OUT", output.absolute().parent)
    run = open_run(workdir, weights=weights_file, learner=learner)
    results = run.results
    if results is None:
        raise InputError(f"{run.folder}: {run.unfinished}")
    heads = run.heads()
    if missing := results.storage_bytes.keys() - {*run.calibrators}:
        raise InputError(f"{run.folder}: expected the calibrator {min(missing)}, found none")
    if len(heads) != run.num_tasks:
        raise InputError(
            f"{run.folder}: its results are of {counted(run.num_tasks, 'task')}, and it has "
            f"learned {len(heads)}; let it finish first"
        )
    with write_folder_atomically(output) as folder:
        target = RunFolder(folder)
        _write_pretrained(run.encoders.pretrained.path, target.weights_file)
        config = _portable(run.read_config().fields)
        write_json(target.config_file, config | {"weights sha256": sha256(target.weights_file)})
        results = msgspec.structs.replace(results, config=_portable(results.config))
        write_json(target.results_file, results)
        target.calibrator_file("").parent.mkdir()
        for name in run.calibrators:
            calibrator = run.calibrator(name)
            # A calibrator without heads has no leaves, and nothing to compare.
            leaves = zip(jax.tree.leaves(calibrator.heads), jax.tree.leaves(heads), strict=False)
            if not all(np.array_equal(saved, expected) for saved, expected in leaves):
                raise InputError(f"{run.calibrator_file(name)}: is of another run: other heads")
            calibrator.save(target.calibrator_file(name))
        _check_predictions(run, results)
        shutil.copyfile(run.predictions_file, target.predictions_file)
        kernels = traverse_util.flatten_dict(run.encoder(run.num_tasks), sep="/")
        write_safetensors(target.merged_file, jax.tree.map(np.asarray, kernels))
        _write_timm(run, folder / "timm")
        write_manifest(folder)
        open_run(folder, learner=learner)


def _check_predictions(run: Run, results: Results) -> None:
    """Raises InputError if `predictions.npz` does not give the accuracies of `results.json`."""
    columns, path = run.predictions, run.predictions_file
    for name, expected in results.accuracy.items():
        if f"{name}_label" not in columns:
            raise InputError(f"{path}: expected the column {name}_label, found none")
        accuracy = evaluation.accuracy(columns["label"], columns[f"{name}_label"])
        if abs(accuracy - expected) > 1e-6:
            raise InputError(
                f"{path}: is of another run: expected an accuracy of {expected:.2f} % by {name}, "
                f"found {accuracy:.2f} %"
            )


def _portable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a saved configuration without the fields that hold for one machine alone."""
    fields = {name: value for name, value in config.items() if name not in OF_A_HOST}
    # Another machine may not support the attention of this one.
    return fields | {"encoder.attention": "auto"}


def _write_pretrained(path: Path, target: Path) -> None:
    """Writes the weights of the pretrained encoder, and their configuration."""
    arrays = weights.used(path)
    write_safetensors(target, arrays)
    if "embedding/kernel" not in arrays:  # AugReg's layout has no configuration.
        for config in map(path.with_name, _WEIGHTS_CONFIGS):
            if config.exists():
                shutil.copyfile(config, target.with_name(config.name))


def _write_timm(run: Run, folder: Path) -> None:
    """Writes E_T as a timm model, with the input range of the run.

    Logs a warning and writes nothing if timm's layout cannot hold the encoder.
    """
    model, size = run.encoders.learner.setup.model, run.config.encoder.image_size
    offset, divisor = vit.INPUT_RANGES.get(model.input_range, (None, None))
    pixels = {} if offset is None else {"mean": (offset,) * 3, "std": (divisor,) * 3}
    variant = dataclasses.replace(model.variant, **pixels)
    try:
        arrays, config = layouts.as_timm(
            run.encoders.backbone, variant, run.encoder(run.num_tasks), size
        )
    except InputError as error:
        _log.warning("no folder for timm: %s", error)
        return
    write_safetensors(folder / "model.safetensors", arrays)
    write_json(folder / "config.json", config)


# The command -------------------------------------------------------------------------------------


def parser() -> Program:
    """Returns the options of the command."""
    text = "Write a finished run as one folder that fdc_jax.open_run reads."
    program = Program("export", text, "runs/photos model")
    add = program.add_argument
    add("workdir", help="work directory of a run of one seed")
    add("out", help="the folder to make")
    add("--weights", metavar="FILE", help="the pretrained encoder, if it is not in the cache")
    add("--learner", metavar="MODULE", default="", help="a learner of your own, whose code is run")
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 after an error, which is printed as one line."""
    return parser().run(_run, arguments)


def _run(options: argparse.Namespace) -> None:
    write(options.workdir, options.out, options.weights, options.learner)
    if not options.quiet:
        print(f"wrote {options.out}")


if __name__ == "__main__":
    raise SystemExit("use python -m fdc_jax export")
