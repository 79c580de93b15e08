"""What `main.py` does: one run per seed, tables, a summary over seeds, and exit codes."""

import contextlib
import faulthandler
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_collections

import fdc_jax
from fdc_jax import evaluation, learners
from fdc_jax.errors import (
    InputError,
    Interrupted,
    StopRequest,
    TrainingError,
    counted,
    plain_warnings,
    stop_on_signals,
)
from fdc_jax.machine import devices, processes
from fdc_jax.machine.checkpoint import Checkpoints
from fdc_jax.machine.files import check_writable_folder, locked, write_json
from fdc_jax.report import console
from fdc_jax.run import configuration, experiment
from fdc_jax.run.configuration import Config
from fdc_jax.run.places import known_classes
from fdc_jax.run.progress import Progress
from fdc_jax.run.setup import Experiment
from fdc_jax.run.store import Store

_log = logging.getLogger(__name__)

# Settings that may differ between the hosts of one run.
_OF_A_HOST = (
    *("cache_dir", "data.dir", "data.source", "encoder.weights"),
    *("data.workers", "data.cache_gib"),
)

# Exit codes. 75 is EX_TEMPFAIL: the same command goes on from where this one stopped.
_CODES: dict[type[Exception], int] = {InputError: 2, TrainingError: 3, Interrupted: 75}


def main(
    config: Config,
    workdir: str,
    stop: StopRequest,
    quiet: bool = False,
    show_traceback: bool = False,
    join: tuple[bool, str | None, int | None, int | None] = (False, None, None, None),
) -> None:
    """Does what `run` does as a program: errors are one line and an exit code.

    `join` are arguments of `processes.start`.
    """
    devices.keep_freed_memory()
    # JAX tells of every kind of device that it looked for in vain, and of every connection;
    # matplotlib of the fonts that it found, in the first report of a machine.
    for name in ("jax._src.xla_bridge", "jax._src.distributed", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with plain_warnings("fdc_jax"):
        try:
            processes.start(*join)
            if processes.count() > 1:
                stop.agree = processes.Agreement()
                faulthandler.disable()  # JAX ends those whom another one left, and says so
            if not processes.is_first():
                logging.getLogger("fdc_jax").setLevel(logging.ERROR)
            run(config, workdir, quiet, stop)
        except Exception as error:
            _end(error, show_traceback)
    processes.leave()


def _end(error: Exception, show_traceback: bool) -> None:
    """Says in one line what went wrong and exits, together with processes that failed alike."""
    lost = processes.lost(error)
    message = str(error) if type(error) in _CODES else lost
    code = _CODES.get(type(error), _CODES[Interrupted] if lost else 1)
    if message is None or show_traceback:
        if processes.count() == 1:
            raise error
        traceback.print_exception(error)
    elif processes.is_first():
        print(f"fdc_jax: error: {message}", file=sys.stderr, flush=True)
    number = processes.index()
    if lost is None and processes.leave():
        sys.exit(code)
    if message and number:
        print(f"fdc_jax: error: process {number}: {message}", file=sys.stderr, flush=True)
    # The ordinary end would wait for the others once more.
    os._exit(code)


def run(
    config: Config, workdir: str, quiet: bool = False, stop: StopRequest | None = None
) -> dict[str, Any]:
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
        sizes = configuration.flatten(config)["classes_per_task"]
        known = known_classes(list(places.values()), sizes)
        e = processes.together(lambda: Experiment(config, quiet, known=known))
        processes.check_same(_common(e))
        if not quiet:
            print(describe(e), file=sys.stderr, flush=True)
        with contextlib.ExitStack() as held:
            lock = processes.on_first(lambda folder: held.enter_context(locked(folder)))
            for place in places.values():
                lock(place)
            per_seed = []
            for seed, place in places.items():
                stop.poll()
                per_seed.append(_run_seed(e, seed, place, stop, quiet))
            outcome = evaluation.summarise(per_seed) if several else per_seed[0]
            if several:
                processes.on_first(write_json)(folder / "summary.json", outcome)
            if not quiet:
                console.show(per_seed)
                print(f"results: {folder / ('summary.json' if several else 'results.json')}")
            _report(config, folder, quiet)
            return outcome


@contextlib.contextmanager
def _explained(config: Config) -> Iterator[None]:
    """Turns failures that the user alone can mend into one line.

    Raises:
        InputError: memory is too small, or a learner of the user's own failed; names the place.
    """
    try:
        yield
    except (InputError, TrainingError, Interrupted):
        raise
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise InputError(
                f"out of memory ({text[:200]}); lower config.train.batch_size (now "
                f"{config.train.batch_size}) or config.evaluation.batch_size (now "
                f"{config.evaluation.batch_size})"
            ) from error
        file = getattr(sys.modules.get(config.learner.name), "__file__", None)
        frames = traceback.extract_tb(error.__traceback__)
        if file is None or all(frame.filename != file for frame in frames):
            raise
        place = learners.place(error)
        raise InputError(f"learner.name: {config.learner.name}: {place}") from error


def _common(e: Experiment) -> dict[str, Any]:
    """Returns what processes that run together must not differ in, by name."""
    return {
        **{f"config.{name}": value for name, value in e.fields.items() if name not in _OF_A_HOST},
        **e.checksums,
        "the package": fdc_jax.__version__,
        "jax": jax.__version__,
    }


@processes.on_first
def _report(config: Config, folder: Path, quiet: bool) -> None:
    """Writes the report; the results stand without it."""
    if not config.report:
        return
    from fdc_jax import report

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
    if not several and (any(folder.glob("seed_*")) or (folder / "summary.json").exists()):
        raise InputError(
            f"{folder} holds runs of several seeds; a single seed needs another --workdir"
        )


def _run_seed(
    e: Experiment, seed: int, folder: Path, stop: StopRequest, quiet: bool
) -> dict[str, Any]:
    """Returns the results of a seed, which is trained where it is not finished."""
    of_seed = ml_collections.ConfigDict(e.config)
    of_seed.seed = (seed,)
    store = Store(folder, of_seed, e)
    finished = store.finished()
    if finished is not None:
        if not quiet:
            print(f"{folder}: finished before, not done again", file=sys.stderr)
        return finished
    progress = Progress(quiet, f"seed {seed}, " if len(e.config.seed) > 1 else "")
    checkpoints = Checkpoints(store.checkpoints_folder, e.config.checkpoint.keep)
    with contextlib.closing(progress), contextlib.closing(checkpoints):
        return experiment.run(e, seed, store, checkpoints, stop, progress)


def describe(e: Experiment) -> str:
    """Returns the lines that a run starts with: device, precision, parameters, weights, data."""
    config, data = e.config, e.config.data
    part = ""
    if data.train_per_class or data.test_per_class:
        part = (
            f", {data.train_per_class or 'all'} training and {data.test_per_class or 'all'} test "
            "images of each class"
        )
    positions = ", position embeddings resized" if e.pretrained.resized_positions else ""
    train = sum(len(indices) for indices in e.tasks.train_indices)
    return (
        f"device     {devices.describe()}, precision {config.precision}\n"
        f"learner    {config.learner.name}, {e.trained_parameters:,} trained parameters a task\n"
        f"encoder    {config.encoder.variant} at {config.encoder.image_size} px, input range "
        f"{data.input_range}{positions}\n"
        f"weights    {e.pretrained.path.name}, sha256 {e.pretrained.sha256[:16]}\n"
        f"data       {config.benchmark} ({e.tasks.test.partition} split{part}), "
        f"{counted(e.num_tasks, 'task')}, {train:,} training and "
        f"{counted(len(e.tasks.test_indices), 'test image')}, "
        f"sha256 {e.tasks.train.checksum[:8]}, {e.tasks.test.checksum[:8]}"
    )
