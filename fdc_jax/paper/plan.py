"""The plan of `fdc paper`: its runs, the images and weights that they need, and their hours.

A run is a process of `fdc run` in WORKDIR/BENCHMARK/LEARNER/seed_N. Its lock in that directory lets
several `fdc paper` processes share the work.
"""

import functools
import itertools
import math
import re
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tabulate import tabulate

from fdc_jax import learners
from fdc_jax.data import archive, benchmarks, cifar100, sources
from fdc_jax.errors import InputError, counted, did_you_mean
from fdc_jax.machine.files import holder, named_path, sha256
from fdc_jax.model import weights
from fdc_jax.report import paper
from fdc_jax.run import configuration, estimate
from fdc_jax.run import setup as setups
from fdc_jax.run.config import Config
from fdc_jax.run.folder import RunFolder
from fdc_jax.run.records import Results
from fdc_jax.run_command import configured

LOCK = ".worker"  # lock of `fdc paper` in the folder of a run; `fdc run` locks `.lock`
# The table of logit standardisation needs `ls`.
_FLAGS = ("--config.calibrators=fdc,gaussians,ls", "--config.report=False")
_OPENED_AT_ONCE = 4
_TO_DOWNLOAD = "to be downloaded: by --fetch, or by the first run"

_PAPER_SOURCE = f"{paper.NUMBERS['cost_device']} (the paper's, scaled)"

Input: TypeAlias = tuple[str, str]  # "data" or "weights", and a name
ByInput: TypeAlias = Mapping[Input, str]  # lines about images and weights
Machines: TypeAlias = Mapping[tuple[Any, ...], estimate.Machine]  # by `estimate.kind`


class PlannedRun(NamedTuple):
    """A run of the plan: one benchmark, learner and seed."""

    benchmark: str
    learner: str
    folder: Path
    arguments: tuple[str, ...]  # of `fdc run`
    config: Config

    @property
    def titles(self) -> tuple[str, str, str]:
        """Benchmark, learner and seed as in tables."""
        benchmark = paper.benchmark_title(self.benchmark)
        return benchmark, learners.title(self.learner), f"seed {self.config.seed[0]}"

    def __str__(self) -> str:
        return ", ".join(self.titles)

    @property
    def log(self) -> Path:
        """The file with the output of the run."""
        return self.folder / "log.txt"

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        return shlex.join(["python", "-m", "fdc_jax", "run", *self.arguments])

    @property
    def inputs(self) -> tuple[Input, Input]:
        """The images and the weights that the run shares with others."""
        encoder = self.config.encoder
        return ("data", self.benchmark), ("weights", f"{encoder.weights} {encoder.variant}")

    def lacks(self, missing: ByInput) -> bool:
        """Returns True if its images or its weights are missing."""
        return not missing.keys().isdisjoint(self.inputs)

    @property
    def results(self) -> Results | None:
        """Results of the finished run, or None."""
        results = RunFolder(self.folder).read_results()
        finished = results and results.num_tasks >= estimate.size(self.config).tasks
        return results if finished else None

    @property
    def conflict(self) -> str:
        """Fields whose values differ in the run that the folder holds, as text, or ""."""
        fields = configuration.flatten(self.config)
        if not self.config.train.epochs:  # The run chooses a number.
            del fields["train.epochs"]
        return RunFolder(self.folder).differing(fields)

    @property
    def state(self) -> str:
        """State: done, running, stopped, to do, or other if the folder has a different run."""
        if self.conflict:
            return "other"
        if self.results:
            return "done"
        if holder(self.folder / LOCK):
            return "running"
        return "stopped" if RunFolder(self.folder).config_file.exists() else "to do"


def say(text: str, quiet: bool = False) -> None:
    """Prints a line of the command on standard error."""
    if not quiet:
        print(f"fdc_jax.paper: {text}", file=sys.stderr, flush=True)


def planned_runs(
    options: Namespace, fields: Sequence[str]
) -> tuple[list[PlannedRun], dict[Input, str]]:
    """Makes the plan: all runs in the order of seeds, learners and benchmarks.

    Returns the runs, and a line about every benchmark whose images are missing, by input.

    Args:
        options: parsed options of the command.
        fields: flags `--config.FIELD=VALUE` of all runs.

    Raises:
        InputError: a name or a field is unknown, or a value is not allowed.
    """
    benchmark_names, learner_names, seeds = (
        list(dict.fromkeys(text.split(",")))
        for text in (options.benchmarks, options.learners, options.seeds)
    )
    given = _by_name(fields)
    for field, flag in (("--config.seed", "--seeds"), ("--config.learner.name", "--learners")):
        if field in given:
            raise InputError(f"{field}: expected {flag}")
    data: dict[str, list[str]] = {}
    missing: dict[Input, str] = {}
    for benchmark in benchmark_names:
        if benchmark not in benchmarks.BENCHMARKS:
            raise InputError(did_you_mean("--benchmarks", benchmark, benchmarks.BENCHMARKS))
        data[benchmark] = []
        try:
            if "--config.data.source" not in given:
                data[benchmark] = _find_data(benchmark, options.data)
        except InputError as error:
            missing["data", benchmark] = str(error)
    runs = []
    for seed, learner, benchmark in itertools.product(seeds, learner_names, benchmark_names):
        learners.find(learner, "--learners")
        flags = _by_name([f"--config={benchmark}:{learner}", *data[benchmark], *_FLAGS, *fields])
        settings = [*flags.values(), f"--config.seed={seed}"]
        config, _ = setups.recognise(configured(settings))
        folder = Path(options.workdir, benchmark, learner, f"seed_{seed}")
        runs.append(
            PlannedRun(benchmark, learner, folder, (*settings, f"--workdir={folder}"), config)
        )
    return runs, missing


def _by_name(flags: Sequence[str]) -> dict[str, str]:
    """Returns the last flag of every name, by name."""
    return {flag.partition("=")[0]: flag for flag in flags}


def _find_data(benchmark: str, data: str) -> list[str]:
    """Returns the flags that name the data of a benchmark, none if the run needs no flag.

    Raises:
        InputError: the data are missing.
    """
    if benchmark == "digits":
        return []
    paths = sorted(named_path("--data", data).iterdir(), key=Path.is_file) if data else []
    file, page = benchmarks.ARCHIVES.get(benchmark, (cifar100.ARCHIVE_NAME, ""))
    for path in paths:
        if benchmark == "cifar100" and path.name == benchmark:
            return [f"--config.data.dir={data}"]  # prepared by TFDS
        if _simplified(path.name) in map(_simplified, (file, benchmark)):
            return [f"--config.data.source={path}"]
    if page:
        text = f"put {file} (archive or folder; size not published) into --data=FOLDER, {page}"
        raise InputError(text)
    return []


def _simplified(name: str) -> str:
    """Returns a name in lower case, without punctuation and the suffix of an archive."""
    return re.sub(r"[\W_]", "", archive.stem(name).lower())


# Images and weights -------------------------------------------------------------------------------


def file_title(shared: Input) -> str:
    """Returns the name of images or weights in tables."""
    kind, name = shared
    return paper.benchmark_title(name) if kind == "data" else f"weights {name}"


def open_inputs(
    runs: Sequence[PlannedRun], missing: dict[Input, str], fetch: bool, quiet: bool = True
) -> dict[Input, str]:
    """Opens the images and weights of all runs, as the runs would; every input once.

    Archives are unpacked. Nothing is downloaded without `fetch`.

    Args:
        runs: the runs of the plan.
        missing: lines by input. Its inputs are skipped; inputs that cannot be used are added.
        fetch: download what the runs would download.
        quiet: print no progress.

    Returns:
        By input, a line with size and checksum.
    """
    configs: dict[Input, Config] = {}
    ready: dict[Input, str] = {}
    for run in runs:
        for shared in run.inputs:
            if shared not in missing:
                configs.setdefault(shared, run.config)

    def check(shared: Input) -> None:
        try:
            ready[shared] = open_input(shared, configs[shared], fetch)
        except InputError as error:
            missing[shared] = str(error)
        say(f"checked {file_title(shared)}", quiet)

    with ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
        list(pool.map(check, configs))
    return ready


def open_input(shared: Input, config: Config, fetch: bool = False) -> str:
    """Opens images or weights; returns a line with size and checksum, or raises InputError."""
    cache = setups.cache_folder(config)
    encoder, data = config.encoder, config.data
    if shared[0] == "weights":
        if not fetch and weights.is_to_download(encoder.weights, encoder.variant, cache):
            return _TO_DOWNLOAD
        path = weights.locate(encoder.weights, encoder.variant, cache, show_progress=fetch)
        weights.used(path)
        return f"ready, {path.stat().st_size / 2**20:,.0f} MiB, sha256 {sha256(path)[:16]}"
    if not fetch and sources.is_to_download(config.benchmark, cache, data.source, data.dir):
        return _TO_DOWNLOAD
    tasks = setups.open_images(config, quiet=not fetch)
    return (
        f"ready, {len(tasks.train.labels):,} training and {len(tasks.test.labels):,} test images, "
        f"sha256 {tasks.train.checksum[:8]}, {tasks.test.checksum[:8]}"
    )


# Hours and GiB ------------------------------------------------------------------------------------


class Need(NamedTuple):
    """The needs of a run that is not finished; NaN if unknown."""

    hours: float
    source: str  # device of the hours, and where they are from
    gib: float


def needs(runs: Sequence[PlannedRun], machines: Machines) -> list[Need]:
    """Returns the needs of every run, 0 if it is finished.

    The speed comes from the first known source: finished runs of the learner, finished runs with
    the same encoder, a timed step, the paper's times, scaled.
    """
    speeds: dict[tuple[Any, ...], tuple[float, str]] = {}
    for kind, machine in machines.items():
        if machine.seconds:
            speeds[kind] = machine.seconds, f"{machine.device} (a timed step)"
    finished = [run.results for run in runs]
    for run, results in zip(runs, finished, strict=True):
        if results and (speed := estimate.seconds_per_pass(results)):
            kind = estimate.kind(run.config)
            speeds[kind] = speeds[*kind, run.learner] = speed, f"{results.device} (finished runs)"
    return [
        Need(0.0, "", 0.0) if results else _need(run, speeds, machines)
        for run, results in zip(runs, finished, strict=True)
    ]


def _need(run: PlannedRun, speeds: Mapping[Any, tuple[float, str]], machines: Machines) -> Need:
    """Returns the needs of a run that is not finished, from seconds per pass and their source."""
    kind = estimate.kind(run.config)
    size = estimate.size(run.config)
    known = speeds.get((*kind, run.learner)) or speeds.get(kind)
    scaled = _seconds_of_paper(run.benchmark) * estimate.cost(run.config)
    seconds, source = known or (scaled, _PAPER_SOURCE)
    left = 1 - len(RunFolder(run.folder).recorded_tasks()) / size.tasks
    gib = math.nan
    if machine := machines.get(kind):
        state = machine.state_bytes[run.benchmark, run.learner]
        gib = estimate.disk(run.config, size, state, machine.width) / 2**30
    hours = seconds * left * estimate.passes(configuration.flatten(run.config), size) / 3600
    return Need(hours, "" if math.isnan(hours) else source, gib)


@functools.cache
def _seconds_of_paper(benchmark: str) -> float:
    """Returns the paper's seconds per pass and per unit of `estimate.cost`; NaN if unknown.

    The paper's table of costs has the minutes of Cumulative-LoRA alone.
    """
    rows = paper.published().query("learner == 'cumulative_lora' and benchmark == @benchmark")
    minutes: Any = rows[rows["quantity"].isin(["training_minutes", "fdc_minutes"])]["value"]
    config = configured([f"--config={benchmark}:cumulative_lora"])
    passes = estimate.passes(configuration.flatten(config), estimate.size(config))
    # The sum is NaN if one of the two is missing.
    return 60 * minutes.sum(min_count=2) / passes / estimate.cost(config)


def as_text(
    runs: Sequence[PlannedRun],
    ready: ByInput,
    missing: ByInput,
    machines: Machines,
) -> str:
    """Returns the plan as text: a table with a row per run, images and weights, and totals."""
    needed = needs(runs, machines)
    states = ["no data" if run.lacks(missing) else run.state for run in runs]
    rows = [
        (number, *run.titles, state, _amount(need.hours), _amount(need.gib), need.source)
        for number, (run, state, need) in enumerate(zip(runs, states, needed, strict=True), 1)
    ]
    columns = ("", "benchmark", "learner", "seed", "state", "hours", "GiB", "hours of")
    lines = [tabulate(rows, columns, disable_numparse=True), ""]
    lines += [f"{file_title(shared)}: {text}" for shared, text in ready.items()]
    lines += [f"missing: {file_title(shared)}: {text}" for shared, text in missing.items()]
    for run, state in zip(runs, states, strict=True):
        if state == "other":
            lines.append(f"other: {run}: {run.conflict} ({run.folder})")
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    lines.append(f"{counted(len(runs), 'run')}: {counts}")
    for source in sorted({need.source for need in needed} - {""}):
        hours = sum(need.hours for need in needed if need.source == source)
        if not math.isnan(hours):
            lines.append(f"left: about {estimate.duration(3600 * hours)} on {source}")
    gib = sum(need.gib for need in needed)
    if not math.isnan(gib):
        existing = next(path for path in runs[0].folder.absolute().parents if path.exists())
        free = shutil.disk_usage(existing).free / 2**30
        warning = "; not enough" if gib > free else ""
        lines.append(f"disk: {gib:,.1f} GiB, {free:,.0f} GiB are free{warning}")
    return "\n".join(lines)


def _amount(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.2f}"
