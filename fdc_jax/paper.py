"""The command `fdc paper`: all runs of the paper, from a plan to the tables.

Every run is a process of `fdc run` in WORKDIR/BENCHMARK/LEARNER/seed_N. A lock in that directory
lets several `fdc paper` share the work. The exit code is that of the first run that failed.
"""

import importlib.util
import itertools
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
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tabulate import tabulate

from fdc_jax import errors, evaluation, learners, report
from fdc_jax.command import configured
from fdc_jax.data import archive, benchmarks, cifar100
from fdc_jax.errors import InputError, StopRequest, counted, did_you_mean
from fdc_jax.machine.files import InUse, check_writable_folder, holder, locked, named_path
from fdc_jax.report import paper
from fdc_jax.run import configuration, estimate
from fdc_jax.run import setup as setups
from fdc_jax.run.config import Config
from fdc_jax.run.folder import RunFolder
from fdc_jax.run.records import Results

# The table of logit standardisation needs `ls`.
_FLAGS_OF_ALL = {"--config.calibrators": "fdc,gaussians,ls", "--config.report": "False"}
# The program of a run. When its standard input closes (its parent died), the run saves and ends. It
# waits 3 s first: a scheduler may signal both, and a second signal ends a run without saving.
_PROGRAM = f"""import os, signal, sys, threading, time
def end():
    os.read(0, 1)
    time.sleep(3)
    from fdc_jax import errors
    errors.signals or os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=end, daemon=True).start()
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from fdc_jax.__main__ import main
main()"""
_WORKER = ".worker"  # lock of `fdc paper` in the folder of a run; `fdc run` locks `.lock`
_SAVE_SECONDS = 60  # time in which the run of a dead Ray worker can save and end

Outcome = tuple[int, str]  # exit code and last line of a run
Ended: TypeAlias = "Iterator[tuple[Run, Outcome]]"
Machines = Mapping[tuple[Any, ...], estimate.Machine]  # by `estimate.kind`
_log = logging.getLogger(__name__)


class Run(NamedTuple):
    """A benchmark, a learner and a seed, with the arguments of their `fdc run`."""

    benchmark: str
    learner: str
    seed: int
    folder: Path
    words: tuple[str, ...]  # arguments of `fdc run`
    config: Config  # shared by all seeds

    @property
    def titles(self) -> tuple[str, str, str]:
        """Benchmark, learner and seed as in tables."""
        benchmark, learner = paper.benchmark_title(self.benchmark), learners.title(self.learner)
        return benchmark, learner, f"seed {self.seed}"

    def __str__(self) -> str:
        return ", ".join(self.titles)

    @property
    def log(self) -> Path:
        """The file with the output of the run."""
        return self.folder / "log.txt"

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        return shlex.join(["python", "-m", "fdc_jax", "run", *self.words])

    @property
    def results(self) -> Results | None:
        """Results of the finished run, or None."""
        results = RunFolder(self.folder).read_results()
        return (
            results if results and results.num_tasks >= estimate.size(self.config).tasks else None
        )

    @property
    def conflict(self) -> str:
        """Fields whose values differ in the run that the folder holds, as text, or ""."""
        fields = configuration.flatten(self.config) | {"seed": [self.seed]}
        if not self.config.train.epochs:  # The run chooses a number.
            del fields["train.epochs"]
        return RunFolder(self.folder).differing(fields)

    @property
    def state(self) -> str:
        """State: done, running, begun, to do, or other if the folder holds another run."""
        if self.conflict:
            return "other"
        if self.results:
            return "done"
        if holder(self.folder / _WORKER):
            return "running"
        return "begun" if RunFolder(self.folder).config_file.exists() else "to do"


# The plan -----------------------------------------------------------------------------------------


def plan(options: Namespace, overrides: dict[str, str]) -> tuple[list[Run], dict[str, str]]:
    """Returns all runs, the most valuable first, and the missing data by benchmark.

    Args:
        options: parsed options of the command.
        overrides: values of the flags `--config.FIELD`, for all runs.

    Raises:
        InputError: a name or a field is unknown, or a value is not allowed.
    """
    benchmark_names, learner_names, seeds = (
        list(dict.fromkeys(text.split(",")))
        for text in (options.benchmarks, options.learners, options.seeds)
    )
    for field, flag in (("seed", "seeds"), ("learner.name", "learners")):
        if f"--config.{field}" in overrides:
            raise InputError(f"--config.{field}: expected --{flag}")
    if not all(map(str.isdecimal, seeds)):
        raise InputError(f"--seeds: expected whole numbers such as 1,2,3, found {options.seeds}")
    flags, data, missing, configs = _FLAGS_OF_ALL | overrides, {}, {}, {}
    for benchmark in benchmark_names:
        if benchmark not in benchmarks.BENCHMARKS:
            raise InputError(did_you_mean("--benchmarks", benchmark, benchmarks.BENCHMARKS))
        try:
            has_source = "--config.data.source" in overrides
            data[benchmark] = {} if has_source else _find_data(benchmark, options.data)
        except InputError as error:
            data[benchmark], missing[benchmark] = {}, str(error)
    for benchmark, learner in itertools.product(benchmark_names, learner_names):
        learners.find(learner, "--learners")
        fields = (data[benchmark] | flags).items()
        config = configured([f"--config={benchmark}:{learner}", *map("=".join, fields)])
        configs[benchmark, learner], _ = setups.recognise(config)
    runs = []
    for seed, learner, benchmark in itertools.product(seeds, learner_names, benchmark_names):
        folder = Path(options.workdir) / benchmark / learner / f"seed_{seed}"
        run_flags = {"--config": f"{benchmark}:{learner}"} | data[benchmark] | flags
        run_flags |= {"--config.seed": seed, "--workdir": str(folder)}
        words = tuple(map("=".join, run_flags.items()))
        runs.append(Run(benchmark, learner, int(seed), folder, words, configs[benchmark, learner]))
    return runs, missing


def _find_data(benchmark: str, data: str) -> dict[str, str]:
    """Returns the flags that name the data of a benchmark; none if a run finds them by itself.

    Raises:
        InputError: the data are missing.
    """
    folder = named_path("--data", data) if data else None
    paths = sorted(folder.iterdir(), key=Path.is_file) if folder and folder.is_dir() else []
    file, page = benchmarks.ARCHIVES.get(benchmark, (cifar100.ARCHIVE_NAME, ""))
    for path in paths if benchmark != "digits" else ():
        if benchmark == "cifar100" and path.name == benchmark:
            return {"--config.data.dir": str(folder)}  # prepared by TFDS
        if _simplified(path.name) in map(_simplified, (file, benchmark)):
            return {"--config.data.source": str(path)}
    if page:
        text = f"put {file} (archive or folder; size not published) into --data=FOLDER, {page}"
        raise InputError(text)
    return {}


def _simplified(name: str) -> str:
    """Returns a name in lower case, without punctuation and the suffix of an archive."""
    return re.sub(r"[\W_]", "", archive.stem(name).lower())


def measure(runs: Sequence[Run], stop: StopRequest) -> Machines:
    """Returns the speed of this machine for every kind of run, as far as it can be measured."""
    kinds: dict[tuple[Any, ...], dict[tuple[str, str], Config]] = {}
    for run in runs:
        kinds.setdefault(estimate.kind(run.config), {})[run.benchmark, run.learner] = run.config
    machines = {}
    for kind, configs in kinds.items():
        try:
            machines[kind] = _in_new_process(estimate.machine, configs, stop=stop)
        except Exception as error:  # The plan is useful without hours.
            stop.poll()
            _log.warning("hours and GiB for %s are unknown: %s", kind[0], errors.line(error))
    return machines


def _in_new_process(function: Callable[..., Any], *arguments: Any, stop: StopRequest) -> Any:
    """Returns the result of a function that runs in a new process, killed if a stop is requested.

    The process frees the memory of its devices when it ends. Ctrl-C does not reach the process,
    which ends with this one, whatever ends it.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_end_with_parent) as pool:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            future = pool.submit(function, *arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        while not wait([future], timeout=0.5).done:
            if stop.requested():
                for process in multiprocessing.active_children():
                    process.kill()
        return future.result()


def _end_with_parent() -> None:
    """Starts a thread that ends this process when the process that started it has ended."""

    def wait_for_end() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()


def needs(runs: Sequence[Run], machines: Machines) -> list[tuple[float, float]]:
    """Returns the remaining hours and the GiB of every run; NaN if unknown, 0 if finished.

    The speed is that of finished runs of its learner, else of its encoder, else of the machine.
    """
    speeds: dict[tuple[Any, ...], float] = {kind: m.seconds for kind, m in machines.items()}
    finished = [run.results for run in runs]
    for run, results in zip(runs, finished, strict=True):
        if results and (speed := estimate.seconds_per_pass(results)):
            kind = estimate.kind(run.config)
            speeds[kind] = speeds[*kind, run.learner] = speed
    estimates = []
    for run, results in zip(runs, finished, strict=True):
        kind, size = estimate.kind(run.config), estimate.size(run.config)
        left = 1 - len(RunFolder(run.folder).recorded_tasks()) / size.tasks
        speed = speeds.get((*kind, run.learner), speeds.get(kind, math.nan))
        hours = speed * left * estimate.passes(configuration.flatten(run.config), size) / 3600
        gib = math.nan
        if machine := machines.get(kind):
            state = machine.state_bytes[run.benchmark, run.learner]
            gib = estimate.disk(run.config, size, state, machine.width) / 2**30
        estimates.append((0.0, 0.0) if results else (hours, gib))
    return estimates


def describe(runs: Sequence[Run], missing: Mapping[str, str], machines: Machines) -> str:
    """Returns the plan as text: a table with a row per run, missing data, and totals."""
    estimates = needs(runs, machines)
    states = ["no data" if run.benchmark in missing else run.state for run in runs]
    rows = [
        (number, *run.titles, state, *(f"{amount:,.2f}".replace("nan", "-") for amount in amounts))
        for number, (run, state, amounts) in enumerate(zip(runs, states, estimates, strict=True), 1)
    ]
    columns = ("", "benchmark", "learner", "seed", "state", "hours", "GiB")
    lines = [tabulate(rows, columns, disable_numparse=True), ""]
    lines += [f"missing: {paper.benchmark_title(name)}: {text}" for name, text in missing.items()]
    lines += [
        f"other: {run}: {run.conflict} ({run.folder})"
        for run, state in zip(runs, states, strict=True)
        if state == "other"
    ]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    lines.append(f"{counted(len(runs), 'run')}: {counts}")
    if machines:
        existing = next(path for path in runs[0].folder.absolute().parents if path.exists())
        free = shutil.disk_usage(existing).free / 2**30
        hours, gib = map(sum, zip(*estimates, strict=True))
        device = ", ".join({machine.device for machine in machines.values()})
        warning = "; too few" * (gib > free)
        lines.append(
            f"left: about {estimate.duration(3600 * hours)} on {device}, from finished runs or a "
            f"timed training step; {gib:,.1f} GiB, {free:,.0f} GiB are free{warning}"
        )
    return "\n".join(lines)


# Work on runs -------------------------------------------------------------------------------------


def attempt(run: Run, stop: StopRequest, quiet: bool = True) -> Outcome | None:
    """Runs `fdc run` and appends its output to `log.txt`; returns its exit code and last line.

    Returns None if another process works on the run.
    """
    try:
        with locked(run.folder / _WORKER):
            with locked(run.folder / ".lock"):  # fails if a user's own `fdc run` holds it
                pass
            _say(f"{run}: {run.command}", quiet)
            with open(run.log, "ab") as log:
                log.write(f"+ {run.command}\n".encode())
                log.flush()
                start = shown = log.tell()
                child = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, "run", *run.words],
                    start_new_session=True,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                try:
                    while child.poll() is None and not stop.requested():
                        with suppress(subprocess.TimeoutExpired):
                            child.wait(0.5)
                        shown = _show_tasks(run, shown, quiet)
                finally:
                    child.communicate()  # closes its standard input, so that it saves and ends
            _show_tasks(run, shown, quiet)
            stop.poll()
            with open(run.log, "rb") as log:
                log.seek(start)
                last = _last_line(log.read().decode(errors="replace"))
    except InUse:
        return None
    except InputError as error:
        return 2, str(error)
    except OSError as error:
        return 2, f"cannot write {run.log}: {error.strerror}"
    if child.returncode < 0:
        return 1, f"ended by {signal.Signals(-child.returncode).name}"
    return child.returncode, last


def _last_line(text: str) -> str:
    """Returns the last line of a run's output, or the exception of a traceback at its end."""
    last = text.rstrip().rpartition("\n")[2]
    _, traceback, end = text.rpartition("Traceback (most recent call last):")
    exceptions = [line for line in end.splitlines() if re.match(r"[\w.]+: ", line)]
    return exceptions[0] if traceback and exceptions else last


def _show_tasks(run: Run, start: int, quiet: bool) -> int:
    """Prints the lines "after task" of a log from a byte on; returns the end of its last line."""
    if not run.log.exists():
        return start
    with open(run.log, "rb") as log:
        log.seek(start)
        lines = log.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    for line in whole:
        if line.startswith(b"after task"):
            _say(f"{run}, {line.decode(errors='replace').rstrip()}", quiet)
    return start + sum(map(len, whole))


def _ending(run: Run, outcome: Outcome, runs: Sequence[Run], machines: Machines) -> str:
    """Returns a line on how a run ended, and the time left if as many runs stay in parallel."""
    results, titles = run.results, evaluation.TITLES
    accuracy = results.accuracy if results else {}
    text = ", ".join(f"{titles.get(name, name)} {value:.2f}" for name, value in accuracy.items())
    text = f"failed: {outcome[1]}" if outcome[0] else text
    states = [run.state for run in runs]
    left = len(runs) - states.count("done")
    seconds = 3600 * sum(hours for hours, _ in needs(runs, machines))
    seconds /= max(1, states.count("running"))
    duration = f", about {estimate.duration(seconds)}" if left and seconds == seconds else ""
    return f"{run}: {text}; {counted(left, 'run')} left{duration}"


def work(runs: Sequence[Run], options: Namespace, stop: StopRequest) -> Ended:
    """Performs, one after the other, the runs that no other process works on."""
    tried: set[Path] = set()
    # Every search starts at the first run, as a process that worked on one may have died.
    while free := [r for r in runs if r.folder not in tried and r.state in ("begun", "to do")]:
        for run in free:
            stop.poll()
            if outcome := attempt(run, stop, options.quiet):
                tried.add(run.folder)
                yield run, outcome
                break
        else:
            time.sleep(1)  # Other processes hold all runs that are free.


def work_with_ray(runs: Sequence[Run], options: Namespace, stop: StopRequest) -> Ended:
    """Hands all unfinished runs to Ray; yields every run with its outcome when it ends.

    Raises:
        InputError: Ray does not start, or its cluster has too few GPUs.
    """
    import ray  # pyright: ignore[reportMissingImports]

    try:
        ray.init(options.ray or None, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray's errors share no base class.
        raise InputError(f"--ray: Ray does not start: {errors.line(error)}") from error
    gpus = ray.cluster_resources().get("GPU", 0.0)
    if gpus < options.ray_gpus:
        raise InputError(
            f"--ray_gpus: expected at most {gpus:g}, which Ray has, found {options.ray_gpus:g}"
        )
    remote = ray.remote(_in_worker).options(num_gpus=options.ray_gpus, max_retries=3)
    shown = {run.folder: _show_tasks(run, 0, quiet=True) for run in runs}
    pending = {remote.remote(run, os.getcwd()): run for run in runs if not run.results}
    _say(f"Ray has {counted(len(pending), 'run')}; log.txt of a run has its output", options.quiet)
    try:
        while pending:
            stop.poll()
            finished = ray.wait([*pending], timeout=1.0)[0]
            for run in pending.values():
                shown[run.folder] = _show_tasks(run, shown[run.folder], options.quiet)
            for task in finished:
                run = pending.pop(task)
                try:
                    outcome = ray.get(task)
                except ray.exceptions.RayError as error:
                    outcome = 1, errors.line(error)
                yield run, outcome
    finally:
        for task in pending:
            ray.cancel(task)
        if pending:
            ray.wait([*pending], num_returns=len(pending), timeout=_SAVE_SECONDS)
        ray.shutdown()


def _in_worker(run: Run, folder: str) -> Outcome:
    """Performs a run in a Ray worker; waits while the process of a dead worker saves the run."""
    os.chdir(folder)
    for _ in range(_SAVE_SECONDS):
        if outcome := attempt(run, StopRequest()):
            return outcome
        time.sleep(1)
    return errors.CODES[errors.Interrupted], "another process works on it"


# The command --------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or the code of an error or of the first run that failed."""
    argv = sys.argv[1:] if arguments is None else arguments
    program = errors.Program(
        "paper",
        "Make all runs of the paper and its tables; --config.FIELD=VALUE are those of fdc run.",
        "--data=archives --benchmarks=cub200 --dry_run",
    )
    add = program.add_argument
    add("--data", default="", help="folder with the benchmarks' archives or folders, as PILOT's")
    add("--workdir", default="runs/paper", help="folder of runs and report (default runs/paper)")
    names, plugged = ",".join(paper.benchmarks()), ",".join(paper.plugged())
    add("--benchmarks", default=names, help="the paper's five, or others such as digits")
    add("--learners", default=f"cumulative_lora,{plugged}", help="the paper's nine, or others")
    add("--seeds", default="1,2,3", help="training seeds (default 1,2,3)")
    add("--dry_run", action="store_true", help="print the plan and end")
    add("--ray", nargs="?", const="", metavar="ADDRESS", help="hand the runs to Ray")
    add("--ray_gpus", type=float, default=1.0, help="GPUs of a run that Ray starts (default 1)")
    fields = [word for word in argv if word.startswith("--config.")]
    rest = [word for word in argv if not word.startswith("--config.")]
    return program.run(lambda options: sweep(options, fields), rest)


def _stop_on_signals() -> AbstractContextManager[StopRequest]:
    text = "stopping the runs, which save a checkpoint"
    return errors.stop_on_signals("fdc_jax.paper", text)


def sweep(options: Namespace, fields: Sequence[str]) -> int:
    """Plans, runs and reports; returns the code of the first run that failed, or 0."""
    check_writable_folder("--workdir", options.workdir)
    if options.ray is not None and importlib.util.find_spec("ray") is None:
        raise InputError("--ray needs Ray: pip install 'fdc_jax[ray]'")
    errors.refuse_repeated(fields)
    if bare := [word for word in fields if "=" not in word]:
        raise InputError(f"expected {bare[0]}=VALUE")
    if options.data and not named_path("--data", options.data).is_dir():
        raise InputError(f"--data: expected a folder, found {options.data}")
    runs, missing = plan(options, dict(word.split("=", 1) for word in fields))
    usable = [run for run in runs if run.benchmark not in missing and not run.conflict]
    todo = [run for run in usable if not run.results]
    with _stop_on_signals() as stop:
        machines = measure(runs, stop) if todo or options.dry_run else {}
    if not options.quiet:
        print(describe(runs, missing, machines), flush=True)
    if options.dry_run:
        return 0
    failed: dict[Path, Outcome] = {}
    runner = work if options.ray is None else work_with_ray
    with _stop_on_signals() as stop:
        for run, outcome in runner(usable, options, stop) if todo else ():
            failed |= {run.folder: outcome} if outcome[0] else {}
            possible = [run for run in usable if run.folder not in failed]
            _say(_ending(run, outcome, possible, machines), options.quiet)
    for benchmark, text in missing.items():
        _say(f"missing: {paper.benchmark_title(benchmark)}: {text}")
    for run in runs:
        if run.conflict and run.benchmark not in missing:
            failed[run.folder] = 2, f"the folder holds another run: {run.conflict}"
        if run.folder in failed:
            code, text = failed[run.folder]
            _say(f"failed with code {code}: {run}: {text} ({run.folder})")
    running = [run for run in usable if run.state == "running"]
    for run in running:
        _say(f"still running: {run}, by {holder(run.folder / _WORKER)}")
    if any(run.results for run in usable) and not running:
        page = Path(options.workdir, "report", "report.html")
        with locked(Path(options.workdir, _WORKER), wait=True):
            with _stop_on_signals() as stop:
                measure_latency(usable, options.quiet, stop)
            if not report.is_current([options.workdir], page.parent):
                _say(f"writes {page}", options.quiet)
                hosts = {run.benchmark: configuration.of_host(run.config) for run in usable}
                report.write([options.workdir], page.parent, hosts=hosts, quiet=options.quiet)
        if not options.quiet:
            for table in ("benchmark", "selection"):
                if (path := page.parent / "tables" / f"{table}.txt").exists():
                    print(f"\n{path.read_text(encoding='utf-8')}")
            print(f"report: {page}")
    codes = (failed[run.folder][0] for run in runs if run.folder in failed)
    return next(codes, 2 if missing else 0)


def measure_latency(runs: Sequence[Run], quiet: bool, stop: StopRequest) -> None:
    """Measures the inference latency of the first finished run of each benchmark, if unknown."""
    for run in {run.benchmark: run for run in reversed(runs) if run.results}.values():
        with suppress(InputError):  # A damaged file is written again.
            if RunFolder(run.folder).read_latency().contenders:
                continue
        _say(f"{run}: measures the latency of inference", quiet)
        try:
            host = configuration.of_host(run.config)
            _in_new_process(_measure_run, run.folder, run.learner, host, stop=stop)
        except Exception as error:  # Only one table needs the latency.
            stop.poll()
            _say(f"{run}: latency is unknown: {errors.line(error)}")


def _measure_run(folder: Path, learner: str, host: Mapping[str, Any]) -> None:
    from fdc_jax import latency, open_run  # which import JAX

    latency.measure_run(open_run(folder, learner=learner, host=host))


def _say(text: str, quiet: bool = False) -> None:
    if not quiet:
        print(f"fdc_jax.paper: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit("use python -m fdc_jax paper")
