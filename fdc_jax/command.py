"""What `main.py` does: one run per seed, tables, and a summary over seeds."""

import sys
from pathlib import Path
from typing import Any

import ml_collections

from fdc_jax import devices, experiment, preparation, results
from fdc_jax.configuration import Config
from fdc_jax.errors import InputError
from fdc_jax.interruption import StopRequest, stop_on_signals
from fdc_jax.report import console
from fdc_jax.workdir import Workdir, write_json


def run(config: Config, workdir: str, quiet: bool = False) -> dict[str, Any]:
    """Runs every seed of a configuration, or what is left of it.

    One seed keeps its files in `workdir`; of several, each has a folder `seed_N` there, beside a
    `summary.json`.

    Returns:
        The results of a single seed, or the summary over several.

    Raises:
        InputError: configuration, data, weights or work directory are not as expected.
        TrainingError: a loss is not finite.
        Interrupted: SIGTERM or Ctrl-C; everything is saved.
    """
    prepared = preparation.prepare(config, quiet)
    if not quiet:
        for line in describe(prepared):
            print(line, file=sys.stderr, flush=True)
    seeds = tuple(config.seed)
    folder = Path(workdir)
    if len(seeds) > 1 and (folder / "config.json").exists():
        raise InputError(
            f"{folder} holds a run of a single seed; several seeds need another --workdir"
        )
    per_seed = []
    with stop_on_signals() as stop:
        for seed in seeds:
            place = folder if len(seeds) == 1 else folder / f"seed_{seed}"
            per_seed.append(_run_seed(prepared, config, seed, place, stop, quiet))
    if len(seeds) == 1:
        if not quiet:
            console.show_results(per_seed[0])
            print(f"results: {folder / 'results.json'}")
        return per_seed[0]
    summary = results.summarise(per_seed)
    write_json(folder / "summary.json", summary)
    if not quiet:
        console.show_summary(summary)
        print(f"results: {folder / 'summary.json'}")
    return summary


def _run_seed(
    prepared: preparation.Experiment,
    config: Config,
    seed: int,
    folder: Path,
    stop: StopRequest,
    quiet: bool,
) -> dict[str, Any]:
    of_seed = ml_collections.ConfigDict(config)
    of_seed.seed = (seed,)
    workdir = Workdir(folder, of_seed)
    finished = workdir.finished()
    if finished is not None:
        return finished
    return experiment.Run(prepared, seed, workdir, stop, quiet)()


def describe(prepared: preparation.Experiment) -> list[str]:
    """Returns the lines that a run starts with: device, precision, parameters, weights, data."""
    e, config = prepared, prepared.config
    positions = ", position embeddings resized" if e.pretrained.resized_positions else ""
    return [
        f"device     {devices.describe()}, precision {config.precision}",
        f"learner    {config.learner.name}, {e.trained_parameters:,} trained parameters a task",
        f"encoder    {config.encoder.variant} at {config.encoder.image_size} px, input range "
        f"{config.data.input_range}{positions}",
        f"weights    {e.pretrained.path.name}, sha256 {e.pretrained.sha256[:16]}",
        f"data       {config.benchmark} ({e.tasks.test.partition} split), "
        f"{e.setup.num_tasks} tasks, "
        f"{sum(len(indices) for indices in e.tasks.train_indices):,} training and "
        f"{len(e.tasks.test_indices):,} test images, "
        f"sha256 {e.tasks.train.checksum[:16]}, {e.tasks.test.checksum[:16]}",
    ]
