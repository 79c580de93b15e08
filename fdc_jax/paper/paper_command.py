"""The command line of `fdc paper`; its exit code is that of the first run that failed."""

import importlib.util
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from fdc_jax import errors, report
from fdc_jax.errors import InputError, StopRequest, counted
from fdc_jax.machine.files import check_writable_folder, holder, locked, named_path
from fdc_jax.paper import measurements, plan, workers
from fdc_jax.paper.plan import LOCK, Input, Machines, PlannedRun, say
from fdc_jax.paper.workers import Outcome, Worker
from fdc_jax.report import paper, reference
from fdc_jax.run import configuration, estimate


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
    plugged = ",".join(paper.plugged())
    add(
        "--benchmarks",
        default=",".join(paper.benchmarks()),
        help="the paper's five, or others such as digits",
    )
    add("--learners", default=f"cumulative_lora,{plugged}", help="the paper's nine, or others")
    add("--seeds", default="1,2,3", help="training seeds (default 1,2,3)")
    text = "images that choose components and settings of FDC beside the paper's rule: test, or "
    text += "validation images, a tenth of the training images (--config.data.validation_share)"
    add("--select", choices=("test", "validation"), default="test", help=text)
    text = "numbers to line up with these runs, see docs/report.md; repeatable"
    add("--reference", action="append", default=[], metavar="CSV", help=text)
    add("--dry_run", action="store_true", help="print the plan and end")
    add("--fetch", action="store_true", help="download and unpack what the runs need, and end")
    add("--measure", action="store_true", help="time a training step on processors, too")
    add("--workers", default="auto", help="runs at a time; auto (default): one per accelerator")
    add("--ray", nargs="?", const="", metavar="ADDRESS", help="hand the runs to Ray")
    add("--ray_gpus", type=float, default=1.0, help="GPUs of a run that Ray starts (default 1)")
    fields = [word for word in argv if word.startswith("--config.")]
    rest = [word for word in argv if not word.startswith("--config.")]
    return program.run(lambda options: sweep(options, fields), rest)


def sweep(options: Namespace, fields: Sequence[str]) -> int:
    """Plans, runs and reports; returns the code of the first run that failed, or 0."""
    check_writable_folder("--workdir", options.workdir)
    if options.ray is not None and importlib.util.find_spec("ray") is None:
        raise InputError("--ray needs Ray: pip install 'fdc_jax[ray]'")
    errors.refuse_repeated(fields)
    # A bare flag would take the next one for its value.
    if bare := [word for word in fields if "=" not in word]:
        raise InputError(f"expected {bare[0]}=VALUE")
    if options.data and not named_path("--data", options.data).is_dir():
        raise InputError(f"--data: expected a folder, found {options.data}")
    for path in options.reference:  # Errors come before any work.
        reference.read(path)
    selects = options.select == "validation"
    if selects:
        fields = ["--config.data.validation_share=0.1", *fields]
    runs, missing = plan.planned_runs(options, fields)
    if selects and not runs[0].config.data.validation_share:
        raise InputError("--config.data.validation_share: expected a share above 0, found 0")
    unfinished = [run for run in runs if not run.results]
    needed = runs if options.fetch or options.dry_run else unfinished
    ready = plan.open_inputs(needed, missing, options.fetch, options.quiet)
    if options.fetch:
        for shared, text in ready.items():
            say(f"{plan.file_title(shared)}: {text}", options.quiet)
        return _say_missing(missing)
    machines: Machines = {}
    if options.dry_run or unfinished:
        with _stop_on_signals() as stop:
            machines = measurements.machine_facts(runs, options.measure, stop)
    shares = workers.share_devices(options.workers, machines)
    if not options.quiet:
        print(plan.as_text(runs, ready, missing, machines), flush=True)
    if options.dry_run:
        return 0
    failed = _perform(runs, missing, machines, shares, options)
    codes = []
    running = False
    for run in runs:
        outcome = failed.get(run.folder)
        if run.conflict and not run.lacks(missing):
            outcome = Outcome(2, f"the folder holds another run: {run.conflict}")
        if outcome:
            codes.append(outcome.code)
            say(f"failed with code {outcome.code}: {run}: {outcome.line} ({run.folder})")
        if run.state == "running":
            running = True
            say(f"still running: {run}, by {holder(run.folder / LOCK)}")
    if not running:
        _write_report(runs, missing, options)
    return [*codes, _say_missing(missing)][0]


def _stop_on_signals() -> AbstractContextManager[StopRequest]:
    text = "stopping the runs, which save a checkpoint"
    return errors.stop_on_signals("fdc_jax.paper", text)


def _say_missing(missing: dict[Input, str]) -> int:
    for shared, text in missing.items():
        say(f"missing: {plan.file_title(shared)}: {text}")
    return 2 if missing else 0


def _perform(
    runs: Sequence[PlannedRun],
    missing: dict[Input, str],
    machines: Machines,
    shares: Sequence[Worker],
    options: Namespace,
) -> dict[Path, Outcome]:
    """Performs the runs; returns outcomes of those that failed, by folder.

    `missing` gets images and weights that turn out to be unusable; their other runs are stopped.
    """
    failed: dict[Path, Outcome] = {}
    usable = [run for run in runs if not run.lacks(missing) and not run.conflict]
    if all(run.results for run in usable):
        return failed

    def end(run: PlannedRun, outcome: Outcome) -> None:
        if outcome.code == 2:  # Other runs may share images or weights that are unusable.
            plan.open_inputs([run], missing, fetch=True)
        if outcome.code and not run.lacks(missing):
            failed[run.folder] = outcome
        left = [run for run in usable if run.folder not in failed and not run.lacks(missing)]
        say(_ending(run, outcome, left, machines), options.quiet)

    with _stop_on_signals() as stop:
        attempt = workers.attempt
        if options.ray is not None:
            shares, attempt = workers.on_ray(options.ray, options.ray_gpus)
        workers.work(usable, shares, attempt, end, missing, stop, options.quiet)
    return failed


def _ending(
    run: PlannedRun, outcome: Outcome, runs: Sequence[PlannedRun], machines: Machines
) -> str:
    """Returns a line on how a run ended, and the time left if as many runs stay in parallel."""
    text = f"failed: {outcome.line}" if outcome.code else "done"
    states = [run.state for run in runs]
    left = len(runs) - states.count("done")
    needed = [need for need in plan.needs(runs, machines) if need.hours]
    seconds = 3600 * sum(need.hours for need in needed) / max(1, states.count("running"))
    sources = {need.source for need in needed}
    known = len(sources) == 1 and not math.isnan(seconds)
    duration = f", about {estimate.duration(seconds)} on {sources.pop()}" if known else ""
    return f"{run}: {text}; {counted(left, 'run')} left{duration}"


def _write_report(
    runs: Sequence[PlannedRun], missing: dict[Input, str], options: Namespace
) -> None:
    """Measures latencies, writes the report if it is not current, and prints its first tables."""
    usable = [run for run in runs if not run.lacks(missing) and not run.conflict]
    if not any(run.results for run in usable):
        return
    from fdc_jax.report import analysis  # which imports what takes seconds

    page = Path(options.workdir, "report", "report.html")
    with locked(Path(options.workdir, LOCK), wait=True):
        with _stop_on_signals() as stop:
            measurements.measure_latency(usable, options.quiet, stop)
        references = options.reference
        sweep = analysis.VALUES if options.select == "validation" else None
        if not report.is_current([options.workdir], page.parent, references, sweep):
            say(f"writes {page}", options.quiet)
            hosts = {run.benchmark: configuration.of_host(run.config) for run in usable}
            given = {"references": references, "hosts": hosts, "quiet": options.quiet}
            report.write([options.workdir], page.parent, sweep=sweep, **given)
    if not options.quiet:
        for table in ("benchmark", "selection"):
            path = page.parent / "tables" / f"{table}.txt"
            if path.exists():
                print(f"\n{path.read_text(encoding='utf-8')}")
        print(f"report: {page}")
