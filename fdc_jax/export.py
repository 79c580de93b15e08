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

from fdc_jax.errors import InputError, Program, counted
from fdc_jax.machine.files import (
    check_writable_folder,
    read_json,
    sha256,
    write_folder_atomically,
    write_json,
    write_manifest,
    write_safetensors,
)
from fdc_jax.model import layouts, vit, weights
from fdc_jax.run.opened import Opened, open_run
from fdc_jax.run.places import Places

_log = logging.getLogger("fdc_jax.export")  # also where it is the program

# Fields of a configuration that were of the machine, and what they are of any.
_ANYWHERE = {
    "data.dir": "",
    "data.source": "",
    "data.images": "",
    "cache_dir": "",
    "encoder.weights": "pretrained/model.safetensors",
    "encoder.attention": "auto",
}
_BESIDE_WEIGHTS = ("config.json", "preprocessor_config.json")


def write(
    workdir: str | os.PathLike[str],
    output: str | os.PathLike[str],
    weights_file: str | None = None,
    learner: str = "",
) -> None:
    """Writes a finished run as one folder, whole or not at all; the same run gives the same bytes.

    The folder is read once before it gets its name.

    Args:
        workdir: of one seed.
        output: the folder to make.
        weights_file: the file of the pretrained encoder, if no longer where it was.
        learner: the module of a learner outside the package, whose code is run.

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
        shutil.copyfile(run.predictions_file, target.predictions_file)
        write_safetensors(target.merged_file, _flat(run.encoder(run.num_tasks)))
        _write_timm(run, folder / "timm")
        write_manifest(folder)
        open_run(folder, learner=learner)


def _flat(tree: Any) -> dict[str, np.ndarray]:
    return jax.tree.map(np.asarray, traverse_util.flatten_dict(tree, sep="/"))


# What lies in it ----------------------------------------------------------------------------------


def _write_pretrained(run: Opened, target: Places) -> None:
    """Writes the arrays of the pretrained encoder as they are named, and their configuration."""
    path = run.encoders.pretrained.path
    arrays = weights.used(path)
    write_safetensors(target.weights_file, arrays)
    if "embedding/kernel" not in arrays:  # AugReg's layout has no configuration.
        for name in _BESIDE_WEIGHTS:
            if path.with_name(name).exists():
                shutil.copyfile(path.with_name(name), target.weights_file.with_name(name))


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
    write(options.workdir, options.out, options.weights, options.learner)
    if not options.quiet:
        print(f"wrote {options.out}")


if __name__ == "__main__":
    sys.exit(main())
