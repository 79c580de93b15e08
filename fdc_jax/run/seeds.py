"""All seeds of a configuration, one after the other: `run`."""

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import msgspec

from fdc_jax import errors
from fdc_jax.errors import InputError, Interrupted, StopRequest, counted, stop_on_signals
from fdc_jax.machine import devices, processes
from fdc_jax.machine.checkpoint import Checkpoints
from fdc_jax.machine.files import check_encodable, check_writable_folder, locked, named_path
from fdc_jax.model import weights
from fdc_jax.run import configuration, estimate, experiment, results, resume
from fdc_jax.run import setup as setups
from fdc_jax.run.config import Config
from fdc_jax.run.folder import RunFolder, known_classes
from fdc_jax.run.images import RunImages
from fdc_jax.run.progress import Progress, StepLog
from fdc_jax.run.records import Record, Results
from fdc_jax.run.setup import Setup

_SLOW_SECONDS = 600.0  # training time from which on a run prints how to shorten it


def run(
    config: Config, workdir: str, quiet: bool = False, stop: StopRequest | None = None
) -> list[Results]:
    """Runs or resumes every seed of a configuration, and returns their results.

    Raises:
        InputError: configuration, data, weights or work directory are not as expected.
        TrainingError: a loss is not finite.
        Interrupted: SIGTERM or Ctrl-C; everything is saved.
    """
    quiet = quiet or not processes.is_first()
    with jax.enable_x64(False), _explained(config), contextlib.ExitStack() as stack:
        setup, folders = _set_up(config, workdir, quiet)
        fields = configuration.flatten(config).items()
        shared = {f"config.{n}": v for n, v in fields if n not in configuration.OF_A_HOST}
        processes.check_same(shared | setups.checksums(setup, setup.tasks))
        processes.on_first(weights.remember)(setup.pretrained, setup.cache)
        if not quiet:
            print(opening_lines(setup), file=sys.stderr, flush=True)
        lock = processes.on_first(lambda folder: stack.enter_context(locked(folder / ".lock")))
        for folder in folders.values():
            lock(folder)
        stop = stop or stack.enter_context(stop_on_signals())
        if processes.count() > 1:
            stop.agree = processes.Agreement()
        all_results = []
        for seed, folder in folders.items():
            stop.poll()
            with _predict_command(folder):
                all_results.append(run_seed(setup, seed, folder, stop, quiet))
        return all_results


@contextlib.contextmanager
def _predict_command(folder: Path) -> Iterator[None]:
    """Adds the command that predicts to the line of a stop after an answer before training."""
    try:
        yield
    except Interrupted as error:
        before = RunFolder(RunFolder(folder).untrained_folder)
        if not before.results_file.exists():
            raise
        command = f"python -m fdc_jax predict {shlex.quote(str(folder))} IMAGES"
        raise Interrupted(f"{error}, {command} answers until then") from error


def check(config: Config, workdir: str, quiet: bool = False) -> str:
    """Returns lines about a run, its hours and GiB, after all checks; trains nothing.

    Raises InputError as `run` does.
    """
    with jax.enable_x64(False), _explained(config):
        setup, folders = _set_up(config, workdir, quiet)
        # Checksums of images are not compared: the user may have added images.
        fields = configuration.flatten(config) | {"weights sha256": setup.pretrained.sha256}
        for seed, folder in folders.items():
            if differing := RunFolder(folder).differing(fields | {"seed": [seed]}):
                raise InputError(f"{folder} holds another run: {differing}")
        return f"{opening_lines(setup)}\n{estimate.time_and_memory(setup, len(folders))}"


def _set_up(config: Config, workdir: str, quiet: bool) -> tuple[Setup, dict[int, Path]]:
    """Returns the set-up of a configuration and the folder of each seed, after all checks."""
    folders = folders_of(config, workdir)
    _check_workdir(named_path("--workdir", workdir), len(folders) > 1)
    known = known_classes(list(folders.values()), config.classes_per_task)
    return processes.together(lambda: setups.build(config, quiet, known)), folders


def folders_of(config: Config, workdir: str) -> dict[int, Path]:
    """Returns the folder of each seed: the work directory, or for several seeds `seed_N` in it."""
    folder = named_path("--workdir", workdir)
    several = len(config.seed) > 1
    return {seed: folder / f"seed_{seed}" if several else folder for seed in config.seed}


def run_seed(setup: Setup, seed: int, path: Path, stop: StopRequest, quiet: bool) -> Results:
    """Returns the results of a seed, after training or resuming it if it is not finished."""
    folder = RunFolder(path)
    folder.claim(setup, seed)
    num_tasks = len(setup.tasks.tasks)
    finished = folder.finished(num_tasks)
    if finished is not None:
        if not quiet:
            print(f"{path}: is finished already", file=sys.stderr)
        return finished
    checkpoints = Checkpoints(folder.checkpoints_folder, setup.config.checkpoint.keep)
    point = resume.resume(setup, seed, checkpoints)
    cursor, trained_tasks = point.cursor, point.cursor.trained_tasks
    folder.check_resumable(cursor.done_tasks, setup.evaluated)
    if trained_tasks or cursor.step:
        folder.event("resume", tasks_done=cursor.done_tasks, step=cursor.step)
    if setup.config.untrained and setup.learner.trains:
        _answer_untrained(setup, seed, path, stop, quiet, trained_tasks)
    label = f"seed {seed}, " if len(setup.config.seed) > 1 else ""
    with contextlib.closing(checkpoints), contextlib.closing(Progress(quiet, label)) as progress:
        if trained_tasks:
            progress.line(f"resumes after {trained_tasks} of {num_tasks} tasks")
        steps = setup.first_steps
        progress.start(total=steps[-1], done=steps[trained_tasks] + cursor.step)
        log = StepLog(folder.event, progress, cursor.seconds)
        images = RunImages(setup, seed, stop.poll)
        work = experiment.Work(setup, seed, folder, checkpoints, images, log, progress, stop)
        calibrators = experiment.run(work, point)
    saved = processes.on_first(lambda: msgspec.to_builtins(folder.read_records()))()
    collected = results.collect(setup, seed, calibrators, msgspec.convert(saved, list[Record]))
    folder.write_results(calibrators, collected)
    return collected


def _answer_untrained(
    setup: Setup, seed: int, path: Path, stop: StopRequest, quiet: bool, trained_tasks: int
) -> None:
    """Fits class Gaussians on the frozen encoder; prints their accuracy and the time to train."""
    untrained, config = setups.untrained(setup), setup.config
    if not untrained.config.calibrators:
        return
    before = RunFolder(RunFolder(path).untrained_folder)
    if not quiet:
        print("encodes all images once, for an answer before training", file=sys.stderr, flush=True)
    outcome = run_seed(untrained, seed, before.folder, stop, quiet=True)
    if quiet:
        return
    accuracy = outcome.accuracy[untrained.config.calibrators]
    seconds = estimate.seconds_after(setup, before.read_records(), trained_tasks)
    training = "the rest of the training" if trained_tasks else "training on top"
    text = f"without training: {accuracy:.1f} %; {training} takes about "
    text += f"{estimate.duration(seconds)} here; Ctrl-C keeps this answer"
    if seconds > _SLOW_SECONDS:
        side, patch = config.encoder.image_size // 2, setup.learner.setup.variant.patch
        text += "\nfaster, in another --workdir=FOLDER: "
        text += f"--config.train.epochs={-(-config.train.epochs // 2)} (half the time), or "
        text += f"--config.encoder.image_size={side // patch * patch} (a quarter; less accurate)"
    print(text, file=sys.stderr, flush=True)


def opening_lines(setup: Setup) -> str:
    """Returns the lines that a run starts with: device, precision, parameters, weights, data."""
    config, tasks, pretrained = setup.config, setup.tasks, setup.pretrained
    first, last = tasks.classes_per_task[0], tasks.classes_per_task[-1]
    sizes = ", ".join(map(str, tasks.classes_per_task))
    if all(size == first for size in tasks.classes_per_task[:-1]):
        sizes = f"{first} (last {last})" if first != last else f"{first}"
    train = sum(map(len, tasks.train_indices))
    trained = setups.trained_parameters(setup)
    skipped = tasks.train.skipped.text()
    return (
        f"device     {devices.description()}, precision {config.precision}\n"
        f"learner    {config.learner.name}, {trained:,} trained parameters a task\n"
        f"encoder    {config.encoder.variant} at {config.encoder.image_size} px, input range "
        f"{config.data.input_range}\n"
        f"training   {counted(config.train.epochs, 'epoch')} of batches of "
        f"{config.train.batch_size}, {sizes} classes a task\n"
        f"weights    {pretrained.path.name}, sha256 {pretrained.sha256[:16]}\n"
        f"data       {config.benchmark} ({tasks.test.partition} split), "
        f"{counted(len(tasks.tasks), 'task')}, {train:,} training and "
        f"{counted(len(tasks.test_indices), 'test image')}, "
        f"sha256 {tasks.train.checksum[:8]}, {tasks.test.checksum[:8]}"
        + (f"\nimages     {skipped}" if skipped else "")
    )


@contextlib.contextmanager
def _explained(config: Config) -> Iterator[None]:
    """Turns out-of-memory errors into an InputError that names the fields to lower."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise InputError(
            f"out of memory ({errors.line(error)}); lower config.train.batch_size (now "
            f"{config.train.batch_size}) or config.evaluation.batch_size (now "
            f"{config.evaluation.batch_size})"
        ) from error


@processes.on_first
def _check_workdir(folder: Path, several: bool) -> None:
    """Raises InputError, before any work, if the work directory cannot be used for these seeds."""
    check_writable_folder("--workdir", folder)
    check_encodable("--workdir", str(folder.absolute()))
    if several and (folder / "config.json").exists():
        raise InputError(f"{folder} holds a run of a single seed; choose another --workdir")
    if not several and any(folder.glob("seed_*")):
        raise InputError(f"{folder} holds runs of several seeds; choose another --workdir")
