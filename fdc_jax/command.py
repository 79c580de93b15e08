"""Learns a stream of tasks, fits calibrators on the way, and reports accuracy with each.

    fdc run --config=digits [--workdir=FOLDER] [--config.FIELD=VALUE ...]

A configuration is a file, or the name of one of the package; in a clone `python main.py` is the
same as `fdc run`.
"""

import argparse
import contextlib
import faulthandler
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_collections

from fdc_jax import report
from fdc_jax.data import sources
from fdc_jax.errors import (
    CODES,
    InputError,
    Interrupted,
    Program,
    StopRequest,
    TrainingError,
    counted,
    line,
    outcome,
    place,
    stop_on_signals,
)
from fdc_jax.machine import devices, processes
from fdc_jax.machine.checkpoint import Checkpoints
from fdc_jax.machine.files import check_writable_folder, locked
from fdc_jax.report import console, runs
from fdc_jax.run import configuration, experiment, results
from fdc_jax.run import setup as setups
from fdc_jax.run.configuration import Config
from fdc_jax.run.images import RunImages
from fdc_jax.run.places import known_classes
from fdc_jax.run.progress import Progress, StepLog
from fdc_jax.run.setup import Setup
from fdc_jax.run.store import Store

_log = logging.getLogger(__name__)


def main(stop: StopRequest, arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, `sys.argv` when None; returns 0, or a code of `errors.CODES`."""
    program = Program("run", "Learn a stream of tasks, calibrate and evaluate on the way.")
    add = program.add_argument
    text = f"a file, or one of {', '.join(configuration.named())}; its fields: --config.FIELD=VALUE"
    add("--config", metavar="NAME", help=text)
    text = "the folder that receives everything (default runs/NAME of configs/NAME.py)"
    add("--workdir", metavar="FOLDER", help=text)
    text = "join the other processes: those of a TPU pod, SLURM or MPI job, or as process 0 of 2 "
    text += "by an address of process 0"
    add("--distributed", nargs="?", const="auto", metavar="HOST:PORT,0/2", help=text)
    return program.run(lambda options: _start(options, stop), arguments, add_fields)


def add_fields(program: Program, words: Sequence[str]) -> None:
    """Makes a flag of every field of the configuration that a command line names, if it does."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--config.learner.name", dest="learner", default="")
    given, _ = first.parse_known_args(words)
    if given.config is None:
        return
    config = configuration.load(given.config, given.learner)
    program.set_defaults(loaded=config)
    for name, value in configuration.flatten(config).items():
        reader = configuration.reader(config, name)
        text = f"default {value}".replace("%", "%%")
        program.add_argument(f"--config.{name}", type=reader, metavar="VALUE", help=text)


def configured(options: argparse.Namespace) -> Config:
    """Returns the configuration with the values of the flags of `add_fields`."""
    config, given = options.loaded, vars(options)
    flat = {name: given[f"config.{name}"] for name in configuration.flatten(config)}
    config.update_from_flattened_dict({k: each for k, each in flat.items() if each is not None})
    return config


def _start(options: argparse.Namespace, stop: StopRequest) -> None:
    """Does what a command line says."""
    if options.config is None:
        known = ", ".join(configuration.named())
        raise InputError(f"--config: expected a file, or one of {known}")
    config, name = configured(options), Path(options.config).stem
    if name == "own":
        name = sources.name_of(config.benchmark, config.data.source)
    _run_with_others(config, options.workdir or f"runs/{name}", options, stop)


def _run_with_others(
    config: Config, workdir: str, options: argparse.Namespace, stop: StopRequest
) -> None:
    """Does what `run` does, where asked for together with other processes."""
    devices.keep_freed_memory()
    # JAX tells of every kind of device that it looked for in vain, and of every connection;
    # matplotlib of the fonts that it found, in the first report of a machine.
    for name in ("jax._src.xla_bridge", "jax._src.distributed", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
    processes.start(options.distributed)
    if processes.count() == 1:
        run(config, workdir, options.quiet, stop)
        return
    stop.agree = processes.Agreement()
    faulthandler.disable()  # JAX ends those whom another one left, and says so
    if not processes.is_first():
        logging.getLogger("fdc_jax").setLevel(logging.ERROR)
    try:
        run(config, workdir, options.quiet, stop)
    except Exception as error:
        _end(error, options.traceback)
    processes.leave()


def _end(error: Exception, show_traceback: bool) -> None:
    """Says in one line what went wrong and exits, together with processes that failed alike."""
    lost = processes.lost(error)
    found = (CODES[Interrupted], lost) if lost else outcome(error)
    code, message = found or (1, None)
    if message is None or show_traceback:
        traceback.print_exception(error)
    elif processes.is_first():
        print(f"fdc_jax.run: {message}", file=sys.stderr, flush=True)
    number = processes.index()
    if lost is None and processes.leave():
        sys.exit(code)
    if message and number:
        print(f"fdc_jax.run: process {number}: {message}", file=sys.stderr, flush=True)
    # The ordinary end would wait for the others once more.
    os._exit(code)


def run(
    config: Config, workdir: str, quiet: bool = False, stop: StopRequest | None = None
) -> list[dict[str, Any]]:
    """Runs every seed of a configuration, or what is left of it, and returns the results of each.

    One seed keeps its files in `workdir`; of several, each has a folder `seed_N` there.

    Raises:
        InputError: configuration, data, weights or work directory are not as expected.
        TrainingError: a loss is not finite.
        Interrupted: SIGTERM or Ctrl-C; everything is saved.
    """
    if stop is None:
        with stop_on_signals() as stop:
            return run(config, workdir, quiet, stop)
    configuration.validate(config)
    folder, several = Path(workdir), len(config.seed) > 1
    places = {seed: folder / f"seed_{seed}" if several else folder for seed in config.seed}
    quiet = quiet or not processes.is_first()
    _check_workdir(folder, several)
    stop.poll()
    with _explained(config):
        known = known_classes(
            list(places.values()), configuration.flatten(config)["classes_per_task"]
        )
        setup = processes.together(lambda: setups.build(config, quiet, known))
        processes.check_same(_common(setup))
        if not quiet:
            print(describe(setup), file=sys.stderr, flush=True)
        with contextlib.ExitStack() as held:
            lock = processes.on_first(lambda folder: held.enter_context(locked(folder)))
            for place in places.values():
                lock(place)
            found = []
            for seed, place in places.items():
                stop.poll()
                found.append(_run_seed(setup, seed, place, stop, quiet))
            if not quiet:
                console.show(runs.load(places.values())[0][0])
                for place in places.values():
                    print(f"results: {place / 'results.json'}")
            _report(config, folder, quiet)
            return found


@contextlib.contextmanager
def _explained(config: Config) -> Iterator[None]:
    """Turns what the user alone can mend, memory or a learner of one's own, into one line."""
    try:
        yield
    except (InputError, TrainingError, Interrupted):
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise InputError(
                f"out of memory ({line(error)}); lower config.train.batch_size (now "
                f"{config.train.batch_size}) or config.evaluation.batch_size (now "
                f"{config.evaluation.batch_size})"
            ) from error
        file = getattr(sys.modules.get(config.learner.name), "__file__", None)
        frames = traceback.extract_tb(error.__traceback__)
        if file is None or all(frame.filename != file for frame in frames):
            raise
        raise InputError(f"learner.name: {config.learner.name}: {place(error)}") from error


def _common(setup: Setup) -> dict[str, Any]:
    """Returns what processes that run together must not differ in, by name."""
    fields, own = configuration.flatten(setup.config), configuration.OF_A_HOST
    return {
        **{f"config.{name}": value for name, value in fields.items() if name not in own},
        **setups.checksums(setup, setup.tasks),
    }


@processes.on_first
def _report(config: Config, folder: Path, quiet: bool) -> None:
    """Writes the report; the results stand without it."""
    if not config.report:
        return
    try:
        page = report.write([folder], folder / "report", quiet=True)
    except InputError as error:
        _log.warning("no report was written: %s", error)
        return
    if not quiet:
        print(f"report: {page}")


@processes.on_first
def _check_workdir(folder: Path, several: bool) -> None:
    """Refuses, before any work, a folder that cannot be written or holds another kind of run."""
    check_writable_folder("--workdir", folder)
    if several and (folder / "config.json").exists():
        raise InputError(
            f"{folder} holds a run of a single seed; several seeds need another --workdir"
        )
    if not several and any(folder.glob("seed_*")):
        raise InputError(
            f"{folder} holds runs of several seeds; a single seed needs another --workdir"
        )


def _run_seed(
    setup: Setup, seed: int, folder: Path, stop: StopRequest, quiet: bool
) -> dict[str, Any]:
    """Returns the results of a seed, which is trained where it is not finished."""
    of_seed = ml_collections.ConfigDict(setup.config)
    of_seed.seed = (seed,)
    checksums = setups.checksums(setup, setup.tasks)
    store = Store(folder, of_seed, setup.tasks, checksums, setup.learner.task_count)
    finished = store.finished()
    if finished is not None:
        if not quiet:
            print(f"{folder}: finished before, not done again", file=sys.stderr)
        return finished
    progress = Progress(quiet, f"seed {seed}, " if len(setup.config.seed) > 1 else "")
    checkpoints = Checkpoints(store.checkpoints_folder, setup.config.checkpoint.keep)
    with contextlib.closing(progress):
        begun = experiment.resume(setup, seed, store, checkpoints)
        if begun.trained_tasks:
            progress.line(f"goes on after {begun.trained_tasks} of {len(setup.tasks.tasks)} tasks")
        steps = setup.first_steps
        progress.start(total=steps[-1], done=steps[begun.trained_tasks] + begun.step)
        log = StepLog(setup.config, store.event, progress, begun.timing)
        images = RunImages(setup, seed, stop.poll)
        work = experiment.Work(store, checkpoints, images, log, stop)
        calibrators = experiment.run(setup, seed, begun, work)
    found = results.collect(setup, seed, calibrators, store.records())
    store.finish(calibrators, found)
    return found


def describe(setup: Setup) -> str:
    """Returns the lines that a run starts with: device, precision, parameters, weights, data."""
    config, tasks, weights = setup.config, setup.tasks, setup.pretrained
    sizes = dict.fromkeys(map(str, tasks.classes_per_task))
    train, trained = sum(map(len, tasks.train_indices)), setups.trained_parameters(setup)
    return (
        f"device     {devices.describe()}, precision {config.precision}\n"
        f"learner    {config.learner.name}, {trained:,} trained parameters a task\n"
        f"encoder    {config.encoder.variant} at {config.encoder.image_size} px, input range "
        f"{config.data.input_range}\n"
        f"training   {counted(config.train.epochs, 'epoch')} of batches of "
        f"{config.train.batch_size}, {', '.join(sizes)} classes a task\n"
        f"weights    {weights.path.name}, sha256 {weights.sha256[:16]}\n"
        f"data       {config.benchmark} ({tasks.test.partition} split), "
        f"{counted(len(tasks.tasks), 'task')}, {train:,} training and "
        f"{counted(len(tasks.test_indices), 'test image')}, "
        f"sha256 {tasks.train.checksum[:8]}, {tasks.test.checksum[:8]}"
    )
