"""The command `fdc paper`: all runs of the paper, from a plan to the tables.

A run is a process of `fdc run` in WORKDIR/BENCHMARK/LEARNER/seed_N, whose lock lets any number of
processes of this command share the work. The exit code is that of the first run that failed.
"""

import contextlib
import functools
import logging
import math
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from tabulate import tabulate
from tqdm import tqdm

from fdc_jax import errors, learners, report
from fdc_jax.command import configured
from fdc_jax.data import archive, benchmarks, cifar100
from fdc_jax.data import folder as folders
from fdc_jax.errors import InputError, StopRequest, counted, did_you_mean
from fdc_jax.machine.files import check_writable_folder, locked
from fdc_jax.model import weights
from fdc_jax.report import paper
from fdc_jax.run import configuration, estimate
from fdc_jax.run.configuration import Config
from fdc_jax.run.paths import RunPaths

TITLE = "fdc_jax.paper"
FLAGS = flags.FlagValues()
for _name, _default, _text in (
    ("data", None, "folder with the archives or folders of the benchmarks, named as by PILOT"),
    ("workdir", "runs/paper", "folder of all runs and of the report"),
    ("benchmarks", ",".join(paper.benchmarks()), "the paper's five, or others such as digits"),
    ("learners", ",".join(("cumulative_lora", *paper.plugged())), "the paper's nine, or others"),
    ("seeds", "1,2,3", "training seeds"),
    ("ray", None, "hand the runs to Ray: of this machine, or of a cluster with --ray=ADDRESS"),
):
    flags.DEFINE_string(_name, _default, _text, flag_values=FLAGS)
flags.DEFINE_float("ray_gpus", 1.0, "GPUs of a run that Ray starts", flag_values=FLAGS)
for _name, _text in (
    ("dry_run", "print the plan and end"),
    ("quiet", "print nothing but errors"),
    ("traceback", "show where an error arose"),
):
    flags.DEFINE_bool(_name, False, _text, flag_values=FLAGS)

# Fields of all runs; the table of logit standardisation needs `ls`.
_FIELDS = {"--config.calibrators": "fdc,gaussians,ls", "--config.report": "False"}
# The program of a run, which saves and ends if its parent dies. Linux tells it once for each thread
# of the parent, and a second SIGTERM would end it at once.
_PROGRAM = """import ctypes, os, signal, sys
def end(*_):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)
if sys.platform == "linux":
    signal.signal(signal.SIGUSR1, end)
    ctypes.CDLL(None).prctl(1, signal.SIGUSR1)  # PR_SET_PDEATHSIG
from fdc_jax.__main__ import main
main()"""
_PACKAGES = str(Path(__file__).parents[1])
_WORKER = ".worker"  # lock of a process of this command; `fdc run` has one of its own
_GRACE = 3.0  # seconds in which a run may end by a signal that it got itself
_LOST = 60  # seconds in which the run of a Ray worker that died may end

Outcome = tuple[int, str]  # exit code and last line of a run
Machines = Mapping[tuple[Any, ...], estimate.Machine]  # by `estimate.kind`
_log = logging.getLogger(__name__)


class Run(NamedTuple):
    """A benchmark, a learner and a seed, with the words of their `fdc run`."""

    benchmark: str
    learner: str
    seed: int
    folder: Path
    words: tuple[str, ...]
    config: Config  # of any seed

    @property
    def titles(self) -> tuple[str, str, int]:
        """Benchmark, learner and seed as in tables."""
        return paper.benchmark_title(self.benchmark), learners.title(self.learner), self.seed

    @property
    def name(self) -> str:
        """The same in one line."""
        return "{}, {}, seed {}".format(*self.titles)

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        return _command(self.words)

    @property
    def share_done(self) -> float:
        """Share of the tasks that are learned."""
        tasks = len(RunPaths(self.folder).recorded_tasks())
        return tasks / estimate.size(self.config).tasks

    @property
    def results(self) -> dict[str, Any]:
        """Results of the finished run, or an empty dictionary."""
        results = RunPaths(self.folder).read_results() or {"num_tasks": 0}
        return results if results["num_tasks"] >= estimate.size(self.config).tasks else {}

    @property
    def other(self) -> str:
        """Fields that the run in the folder has with other values, in words."""
        fields = configuration.flatten(self.config) | {"seed": [self.seed]}
        if not self.config.train.epochs:  # The run chooses a number.
            del fields["train.epochs"]
        return ", ".join(RunPaths(self.folder).differing(fields))

    @property
    def holder(self) -> str:
        """The process of this command that works on the run, such as `process 7 on host`."""
        path = self.folder / _WORKER
        if not path.exists() or not path.stat().st_size:  # The holder writes its name there.
            return ""
        try:
            with locked(path):
                return ""
        except InputError as error:
            return str(error).partition(" is in use by ")[2].partition(";")[0]

    @property
    def state(self) -> str:
        """One of done, running, begun, to do, and other: the folder has a run of other settings."""
        if self.other:
            return "other"
        begun = "begun" if RunPaths(self.folder).config_file.exists() else "to do"
        return "done" if self.results else "running" if self.holder else begun


# The plan -----------------------------------------------------------------------------------------


def plan(words: Sequence[str]) -> tuple[list[Run], dict[str, str]]:
    """Returns all runs, the most valuable first, and what is wrong with data, by benchmark.

    Args:
        words: `--config.FIELD=VALUE ...`, for all runs.

    Raises:
        InputError: a name or a field is unknown, or a value is not allowed.
    """
    names, chosen, seeds = (
        str(FLAGS[name].value).split(",") for name in ("benchmarks", "learners", "seeds")
    )
    if not all(map(str.isdecimal, seeds)):
        raise InputError(f"--seeds: expected whole numbers such as 1,2,3, found {FLAGS.seeds}")
    own = _FIELDS | dict(word.split("=", 1) for word in words)
    configs, data, missing = {}, {}, {}
    for benchmark in names:
        if benchmark not in benchmarks.BENCHMARKS:
            raise InputError(did_you_mean("--benchmarks", benchmark, benchmarks.BENCHMARKS))
        try:
            data[benchmark] = {} if "--config.data.source" in own else _find_data(benchmark)
        except InputError as error:
            data[benchmark], missing[benchmark] = {}, str(error)
        for learner in chosen:
            learners.find(learner)
            config = configured([f"--config={benchmark}:{learner}", *_words(own)])
            configuration.validate(config)
            encoder = config.encoder
            given = encoder.weights, encoder.variant, encoder.heads
            encoder.variant, variant = _recognised(*given)
            encoder.image_size = encoder.image_size or variant.image_size
            configs[benchmark, learner] = config
    runs = []
    for seed in seeds:
        for learner in chosen:
            for benchmark in names:
                folder = Path(FLAGS.workdir) / benchmark / learner / f"seed_{seed}"
                fields = {"--config": f"{benchmark}:{learner}"} | data[benchmark] | own
                fields |= {"--config.seed": seed, "--workdir": str(folder)}
                given = benchmark, learner, int(seed), folder, tuple(_words(fields))
                runs.append(Run(*given, configs[benchmark, learner]))
    return runs, missing


_recognised = functools.cache(weights.recognise)


def _words(fields: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in fields.items()]


def _command(words: Sequence[str]) -> str:
    """Returns the command of a run by the words of its command line."""
    return shlex.join(["python", "-m", "fdc_jax", "run", *words])


def _find_data(benchmark: str) -> dict[str, str]:
    """Returns flags that name the data of a benchmark, none of data that a run finds by itself.

    Raises:
        InputError: the data are missing, or their files are not those of the benchmark.
    """
    folder = Path(FLAGS.data or "").expanduser()
    paths = sorted(folder.iterdir(), key=Path.is_file) if FLAGS.data and folder.is_dir() else []
    file, page = benchmarks.ARCHIVES.get(benchmark, (cifar100.ARCHIVE_NAME, ""))
    for path in paths if benchmark != "digits" else ():
        if benchmark == "cifar100" and path.name == benchmark:
            return {"--config.data.dir": str(folder)}  # prepared by TFDS
        if _plain(path.name) in map(_plain, (file, benchmark)):
            if page:
                folders.verify_names(benchmark, archive.names(path))
            return {"--config.data.source": str(path)}
    if page:
        raise InputError(f"{file} (archive or folder; size not published), {page}")
    return {}


def _plain(name: str) -> str:
    """Returns a name without case, signs and the suffix of an archive."""
    return re.sub(r"[\W_]", "", archive.stem(name).lower())


def measure(runs: Sequence[Run]) -> Machines:
    """Measures this machine, in a process that gives the memory of its devices back at the end."""
    kinds: dict[tuple[Any, ...], dict[tuple[str, str], Config]] = {}
    for run in runs:
        of_kind = kinds.setdefault(estimate.kind(run.config), {})
        of_kind[run.benchmark, run.learner] = run.config
    machines = {}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for kind, configs in kinds.items():
            try:
                machines[kind] = pool.submit(estimate.machine, configs).result()
            except Exception as error:  # A plan without hours is a plan.
                _log.warning("hours and GiB for %s are unknown: %s", kind[0], errors.line(error))
    return machines


def hours(runs: Sequence[Run], machines: Machines) -> dict[Path, float]:
    """Returns the hours of each run by its folder, NaN if unknown.

    They follow from finished runs of its learner, else of its encoder, else from the machine.
    """
    known: dict[tuple[Any, ...], float | None] = {
        kind: machine.seconds for kind, machine in machines.items()
    }
    for run in runs:
        if (results := run.results) and (speed := estimate.seconds_per_pass(results)):
            kind = estimate.kind(run.config)
            known[kind] = known[*kind, run.learner] = speed
    estimates = {}
    for run in runs:
        kind, fields = estimate.kind(run.config), configuration.flatten(run.config)
        speed = known.get((*kind, run.learner)) or known.get(kind) or math.nan
        estimates[run.folder] = speed * estimate.passes(fields, estimate.size(run.config)) / 3600
    return estimates


def _gib(run: Run, machines: Machines) -> float:
    machine = machines.get(estimate.kind(run.config))
    if machine is None:
        return math.nan
    state_bytes = machine.state_bytes[run.benchmark, run.learner]
    return estimate.disk(run.config, estimate.size(run.config), state_bytes, machine.width) / 2**30


def describe(runs: Sequence[Run], missing: Mapping[str, str], machines: Machines) -> str:
    """Returns the plan in words: a row per run, missing data, and sums."""
    of, rows, left = hours(runs, machines), [], [0.0, 0.0]
    for number, run in enumerate(runs, 1):
        needed, state = [of[run.folder], _gib(run, machines)], run.state
        if state == "done":
            needed = [0.0, 0.0]
        left = [left[0] + needed[0] * (1 - run.share_done), left[1] + needed[1]]
        rows.append((number, *run.titles, state, *(f"{n:,.2f}" for n in needed)))
    columns = ("", "benchmark", "learner", "seed", "state", "hours", "GiB")
    states = [row[4] for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    lines = [tabulate(rows, columns, disable_numparse=True), ""]
    lines += [f"missing: {paper.benchmark_title(it)}: {text}" for it, text in missing.items()]
    lines.append(f"{counted(len(runs), 'run')}: {counts}")
    if machines:
        base = next(it for it in Path(FLAGS.workdir, "x").absolute().parents if it.exists())
        free = shutil.disk_usage(base).free / 2**30
        device = ", ".join({machine.device for machine in machines.values()})
        lines.append(
            f"left: about {left[0]:,.1f} h on {device}, by finished runs or a timed training step; "
            f"{left[1]:,.1f} GiB, {free:,.0f} GiB are free"
        )
    return "\n".join(lines)


# Work on runs -------------------------------------------------------------------------------------


def attempt(
    words: Sequence[str], folder: Path, watch: Callable[[], None] = lambda: None, cwd: str = "."
) -> Outcome | None:
    """Runs `fdc run` to its end; its output goes to `log.txt` in the work directory.

    Args:
        words: of its command line.
        folder: its work directory.
        watch: called twice a second; if it raises, the run saves and ends.
        cwd: folder in which it runs.

    Returns:
        Its outcome; None if another process works on it.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(folder / _WORKER))
            with locked(folder / ".lock"):  # of an `fdc run` by hand
                pass
        except InputError:
            return None
        log = held.enter_context(open(folder / "log.txt", "a+b"))
        log.write(f"+ {_command(words)}\n".encode())
        log.flush()
        path = os.pathsep.join(filter(None, (_PACKAGES, os.environ.get("PYTHONPATH"))))
        child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, "run", *words],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while child.poll() is None:
                watch()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.5)
        except BaseException:
            # A scheduler signals both processes, and a second signal would end the run at once.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE)
            child.terminate()
            child.wait()
            raise
        log.seek(0)
        last = log.read().decode(errors="replace").rstrip().rpartition("\n")[2]
    if child.returncode < 0:
        return 1, f"ended by {signal.Signals(-child.returncode).name}"
    return child.returncode, last


class Progress:
    """Progress of all runs, with the time left: a bar in a terminal, lines elsewhere."""

    def __init__(self, runs: Sequence[Run], machines: Machines, quiet: bool):
        self._runs, self._machines, self._quiet, self._shown = runs, machines, quiet, 0.0
        self._hours, self._begun = hours(runs, machines), set()
        form = "{n_fmt} of {total_fmt} runs |{bar}| {elapsed}{postfix}"
        hidden = quiet or not sys.stderr.isatty()
        self._bar = tqdm(total=len(runs), bar_format=form, disable=hidden)
        self.close = self._bar.close

    def line(self, text: str) -> None:
        """Prints a line above the bar."""
        if not self._quiet:
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def left(self) -> str:
        """Returns the time left, in words, if the runs in work go on side by side."""
        todo = [run for run in self._runs if not run.results]
        spent = sum(self._hours[run.folder] * (1 - run.share_done) for run in todo)
        seconds = 3600 * spent / max(1, sum(bool(run.holder) for run in todo))
        time_left = f", about {estimate.duration(seconds)}" if todo and seconds == seconds else ""
        return f"{counted(len(todo), 'run')} left{time_left}"

    def ended(self, run: Run, outcome: Outcome) -> None:
        """Prints how a run ended; its time replaces estimates."""
        self._hours, accuracy = hours(self._runs, self._machines), run.results.get("accuracy", {})
        said = ", ".join(f"{name} {value:.2f}" for name, value in accuracy.items())
        said = f"failed: {outcome[1]}" if outcome[0] else said
        self.line(f"{run.name}: {said}; {self.left()}")

    def look(self, runs: Sequence[Run]) -> None:
        """Prints the command of a new run; shows all, every five seconds, in a terminal."""
        for run in runs:
            if run.folder not in self._begun:
                self.line(f"{run.name}: {run.command}")
                self._begun.add(run.folder)
        if not self._bar.disable and time.monotonic() - self._shown > 5:
            self._shown = time.monotonic()
            self._bar.n = sum(bool(run.results) for run in self._runs)
            shares = (f"{run.name} {100 * run.share_done:.0f} %" for run in runs)
            self._bar.set_postfix_str("; ".join((*shares, self.left())))


def work(runs: Sequence[Run], progress: Progress, stop: StopRequest) -> dict[Path, Outcome]:
    """Runs, one after the other, whatever no other process works on; returns outcomes."""
    outcomes: dict[Path, Outcome] = {}

    def take() -> bool:
        """Runs the first run that is free; returns False if there is none."""
        for run in runs:
            stop.poll()
            if run.folder in outcomes or run.results or run.holder:
                continue

            def watch(run=run) -> None:
                stop.poll()
                progress.look([run])

            if (outcome := attempt(run.words, run.folder, watch)) is not None:
                outcomes[run.folder] = outcome
                progress.ended(run, outcome)
                return True
        return False

    while take():  # from the first one again, as another process may have died
        pass
    return outcomes


def work_with_ray(
    runs: Sequence[Run], progress: Progress, stop: StopRequest
) -> dict[Path, Outcome]:
    """Hands all runs to Ray; returns outcomes.

    Raises:
        InputError: Ray is not installed, or its cluster has too few GPUs.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError("--ray needs Ray: pip install 'fdc_jax[ray]'") from error
    ray.init(FLAGS.ray or None, log_to_driver=False, logging_level=logging.ERROR)
    gpus, cwd = ray.cluster_resources().get("GPU", 0.0), os.getcwd()
    if gpus < FLAGS.ray_gpus:
        raise InputError(
            f"--ray_gpus: expected at most {gpus:g}, which Ray has, found {FLAGS.ray_gpus:g}"
        )
    remote = ray.remote(_in_worker).options(num_gpus=FLAGS.ray_gpus, max_retries=3)
    todo = [run for run in runs if not run.results]
    pending = {remote.remote(run.words, Path(cwd, run.folder), cwd): run for run in todo}
    outcomes: dict[Path, Outcome] = {}
    try:
        while pending:
            stop.poll()
            progress.look([run for run in pending.values() if run.holder])
            for task in ray.wait([*pending], timeout=1.0)[0]:
                run = pending.pop(task)
                try:
                    outcome = ray.get(task)
                except ray.exceptions.RayError as error:
                    outcome = 1, errors.line(error)
                outcomes[run.folder] = outcome
                progress.ended(run, outcome)
    finally:
        for task in pending:
            ray.cancel(task)
        if pending:
            ray.wait([*pending], num_returns=len(pending), timeout=_LOST)
        ray.shutdown()
    return outcomes


def _in_worker(words: Sequence[str], folder: Path, cwd: str) -> Outcome:
    """Runs a run in a worker of Ray; that of a worker that died may still be saving."""
    for _ in range(_LOST):
        if (outcome := attempt(words, folder, cwd=cwd)) is not None:
            return outcome
        time.sleep(1)
    return errors.CODES[errors.Interrupted], "another process works on it"


# The command --------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, the code of the first run that failed, or an error's."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.path.append(os.getcwd())  # where a learner of the user's own may lie
    with errors.Ending(TITLE, "--traceback" in words) as ending, errors.stop_on_signals() as stop:
        if {"--help", "-h"} & {*words}:
            print("usage: fdc paper [--data=FOLDER] [--config.FIELD=VALUE ...]")
            print(FLAGS.get_help())
            return 0
        errors.refuse_repeated(words)
        fields = [word for word in words if word.startswith("--config.")]
        rest = ["--ray=" if word == "--ray" else word for word in words if word not in fields]
        if bare := [word for word in fields if "=" not in word]:
            raise InputError(f"expected {bare[0]}=VALUE")
        try:
            FLAGS.unparse_flags()
            others = FLAGS(["", *rest])[1:]
        except flags.Error as error:
            raise InputError(" ".join(str(error).split())) from error
        if others:
            raise InputError(f"unexpected argument {others[0]}")
        with errors.plain_warnings(TITLE, logging.ERROR if FLAGS.quiet else logging.WARNING):
            return sweep(fields, stop)
    return ending.code


def sweep(words: Sequence[str], stop: StopRequest) -> int:
    """Plans, runs and reports; returns the code of the first run that failed, or 0."""
    check_writable_folder("--workdir", FLAGS.workdir)
    runs, missing = plan(words)
    usable = [run for run in runs if run.benchmark not in missing and not run.other]
    todo = [run for run in usable if not run.results]
    machines = measure(runs) if todo or FLAGS.dry_run else {}
    if not FLAGS.quiet:
        print(describe(runs, missing, machines), flush=True)
    if FLAGS.dry_run:
        return 0
    outcomes: dict[Path, Outcome] = {}
    if todo:
        with contextlib.closing(Progress(usable, machines, FLAGS.quiet)) as progress:
            by = work if FLAGS.ray is None else work_with_ray
            outcomes = by(usable, progress, stop)
    for run in runs:
        if run not in usable:
            other = f"the folder has another run: {run.other}"
            outcomes[run.folder] = 2, missing.get(run.benchmark) or other
    failed = [run for run in runs if outcomes.get(run.folder, (0, ""))[0]]
    for run in failed:
        code, text = outcomes[run.folder]
        _say(f"failed with code {code}: {run.name}: {text} ({run.folder})")
    running = [run for run in usable if not run.results and run.holder]
    for run in running:
        _say(f"still running: {run.name}, by {run.holder}")
    if not running and any(run.results for run in usable):
        _report(usable)
    return outcomes[failed[0].folder][0] if failed else 0


def _report(runs: Sequence[Run]) -> None:
    """Writes the report of all finished runs, unless it is newer than they are."""
    page = Path(FLAGS.workdir, "report", "report.html")
    files = [RunPaths(run.folder).results_file for run in runs if run.results]
    newest = max(file.stat().st_mtime for file in files)
    with locked(Path(FLAGS.workdir, _WORKER), wait=True):
        if not page.exists() or page.stat().st_mtime < newest:
            report.write([FLAGS.workdir], page.parent, quiet=FLAGS.quiet)
    if not FLAGS.quiet:
        print(f"report: {page}")


def _say(text: str) -> None:
    print(f"{TITLE}: {text}", file=sys.stderr, flush=True)
