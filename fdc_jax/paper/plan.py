"""The plan of `fdc paper`: its runs, the images and weights that they need, and their hours.

A run is a process of `fdc run` in WORKDIR/BENCHMARK/LEARNER/seed_N. Its lock in that directory lets
several `fdc paper` share the work.
"""

import functools
import itertools
import math
import re
import shlex
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tabulate import tabulate

from fdc_jax import learners
from fdc_jax.command import configured
from fdc_jax.data import archive, benchmarks, cifar100, sources
from fdc_jax.errors import InputError, counted, did_you_mean
from fdc_jax.machine.files import holder, named_path, sha256
from fdc_jax.model import vit, weights
from fdc_jax.report import paper
from fdc_jax.run import configuration, estimate
from fdc_jax.run import setup as setups
from fdc_jax.run.config import Config
from fdc_jax.run.folder import RunFolder
from fdc_jax.run.records import Results

LOCK = ".worker"  # lock of `fdc paper` in the folder of a run; `fdc run` locks `.lock`
# The table of logit standardisation needs `ls`.
_FLAGS_OF_ALL = {"--config.calibrators": "fdc,gaussians,ls", "--config.report": "False"}
_OPENED_AT_ONCE = 4

_PAPER = f"{paper.NUMBERS['cost_device']} (the paper's, scaled)"

Input: TypeAlias = tuple[str, str]  # "data" or "weights", and a name
ByInput: TypeAlias = Mapping[Input, str]  # lines about images and weights
Machines: TypeAlias = Mapping[tuple[Any, ...], estimate.Machine]  # by `estimate.kind`


class Run(NamedTuple):
    """A benchmark, a learner and a seed, with the arguments of their `fdc run`."""

    benchmark: str
    learner: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]  # of `fdc run`
    config: Config  # shared by all seeds

    @property
    def titles(self) -> tuple[str, str, str]:
        """Benchmark, learner and seed as in tables."""
        benchmark = paper.benchmark_title(self.benchmark)
        return benchmark, learners.title(self.learner), f"seed {self.seed}"

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
        named = encoder.weights in weights.NAMED
        file = f"{encoder.weights} {encoder.variant}" if named else encoder.weights
        return ("data", self.benchmark), ("weights", file)

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
        if holder(self.folder / LOCK):
            return "running"
        return "begun" if RunFolder(self.folder).config_file.exists() else "to do"


def make(options: Namespace, overrides: dict[str, str]) -> tuple[list[Run], dict[Input, str]]:
    """Returns all runs, the most valuable first, and what is missing of their images.

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
    flags = _FLAGS_OF_ALL | overrides
    data: dict[str, dict[str, str]] = {}
    missing: dict[Input, str] = {}
    for benchmark in benchmark_names:
        if benchmark not in benchmarks.BENCHMARKS:
            raise InputError(did_you_mean("--benchmarks", benchmark, benchmarks.BENCHMARKS))
        data[benchmark] = {}
        try:
            if "--config.data.source" not in overrides:
                data[benchmark] = _find_data(benchmark, options.data)
        except InputError as error:
            missing["data", benchmark] = str(error)
    configs = {}
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
        arguments = tuple(map("=".join, run_flags.items()))
        config = configs[benchmark, learner]
        runs.append(Run(benchmark, learner, int(seed), folder, arguments, config))
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


# Images and weights -------------------------------------------------------------------------------


def title(shared: Input) -> str:
    """Returns the name of images or weights in tables."""
    kind, name = shared
    return paper.benchmark_title(name) if kind == "data" else f"weights {name}"


def open_inputs(
    runs: Sequence[Run], missing: dict[Input, str], fetch: bool, say: Callable[[str], None]
) -> dict[Input, str]:
    """Opens the images and weights of all runs as they do, each once, several at a time.

    Archives are unpacked. Nothing is downloaded without `fetch`.

    Args:
        runs: the runs of the plan.
        missing: gets a line for those that cannot be used; those that it has are passed over.
        fetch: download what the runs would download.
        say: prints a line.

    Returns:
        By input, a line with size and checksum.
    """
    configs: dict[Input, Config] = {}
    for run in runs:
        for shared in run.inputs:
            configs.setdefault(shared, run.config)
    ready: dict[Input, str] = {}
    with ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
        pending = {
            pool.submit(open_input, shared, config, fetch): shared
            for shared, config in configs.items()
            if shared not in missing
        }
        for number, future in enumerate(as_completed(pending), 1):
            shared = pending[future]
            try:
                ready[shared] = future.result()
            except InputError as error:
                missing[shared] = str(error)
            if len(pending) > number:
                say(f"opened {title(shared)}, {number} of {len(pending)}")
    return ready


def open_input(shared: Input, config: Config, fetch: bool = False) -> str:
    """Returns the size and the checksum of images or weights; raises InputError."""
    cache = setups.cache_folder(config)
    encoder, data = config.encoder, config.data
    if shared[0] == "weights":
        if not fetch and weights.is_to_download(encoder.weights, encoder.variant, cache):
            return "to be downloaded: by --fetch, or by the first run"
        path = weights.locate(encoder.weights, encoder.variant, cache, show_progress=fetch)
        weights.used(path)
        return f"ready, {path.stat().st_size / 2**20:,.0f} MiB, sha256 {sha256(path)[:16]}"
    if not fetch and sources.is_to_download(config.benchmark, cache, data.source, data.dir):
        return "to be downloaded: by --fetch, or by the first run"
    tasks = setups.open_images(config, quiet=not fetch)
    return (
        f"ready, {len(tasks.train.labels):,} training and {len(tasks.test.labels):,} test images, "
        f"sha256 {tasks.train.checksum[:8]}, {tasks.test.checksum[:8]}"
    )


def cause(run: Run, line: str) -> Input | None:
    """Returns the images or weights that a line of a failed run is about, or None."""
    config, cache = run.config, setups.cache_folder(run.config) / "data"
    images, encoder = run.inputs
    names = {
        images: ["config.data.", str(cache), cifar100.URL, config.data.source, config.data.dir],
        encoder: ["config.encoder.weights", config.encoder.weights],
    }
    for shared, parts in names.items():
        if any(part in line for part in filter(None, parts)):
            return shared
    return None


# Hours and GiB ------------------------------------------------------------------------------------


class Need(NamedTuple):
    """The needs of a run that is not finished; NaN if unknown."""

    hours: float
    source: str  # device of the hours, and where they are from
    gib: float


def needs(runs: Sequence[Run], machines: Machines) -> list[Need]:
    """Returns the needs of every run, 0 if it is finished.

    Hours are those of finished runs of the learner, else of its encoder, else of a timed step, else
    the paper's, scaled.
    """
    speeds: dict[tuple[Any, ...], tuple[float, str]] = {}
    finished = [run.results for run in runs]
    for kind, machine in machines.items():
        if machine.seconds:
            speeds[kind] = machine.seconds, f"{machine.device} (a timed step)"
    for run, results in zip(runs, finished, strict=True):
        if results and (speed := estimate.seconds_per_pass(results)):
            kind = estimate.kind(run.config)
            speeds[kind] = speeds[*kind, run.learner] = speed, f"{results.device} (finished runs)"
    result = []
    for run, results in zip(runs, finished, strict=True):
        if results:
            result.append(Need(0.0, "", 0.0))
            continue
        kind = estimate.kind(run.config)
        size = estimate.size(run.config)
        passes = estimate.passes(configuration.flatten(run.config), size)
        known = speeds.get((*kind, run.learner), speeds.get(kind))
        seconds, source = known or (_seconds_of_paper(run.benchmark) * _cost(run.config), _PAPER)
        if math.isnan(seconds):
            source = ""
        left = 1 - len(RunFolder(run.folder).recorded_tasks()) / size.tasks
        gib = math.nan
        if machine := machines.get(kind):
            state = machine.state_bytes[run.benchmark, run.learner]
            gib = estimate.disk(run.config, size, state, machine.width) / 2**30
        result.append(Need(seconds * left * passes / 3600, source, gib))
    return result


def _cost(config: Config) -> float:
    """Returns the cost of an image in units of the paper's encoder, ViT-B/16 at 224 pixels."""
    encoder = config.encoder
    _, variant = weights.recognise(encoder.weights, encoder.variant, encoder.heads)
    of_paper = estimate.cost(vit.VARIANTS["B/16"], 224)
    return estimate.cost(variant, encoder.image_size) / of_paper


@functools.cache
def _seconds_of_paper(benchmark: str) -> float:
    """Returns the paper's seconds of a pass (table of costs, Cumulative-LoRA); NaN if unknown."""
    lines = paper.published()
    of_benchmark = (lines["benchmark"] == benchmark) & (lines["learner"] == "cumulative_lora")
    costs = lines[of_benchmark & lines["quantity"].isin(["training_minutes", "fdc_minutes"])]
    minutes = math.fsum(costs["value"]) if len(costs) == 2 else math.nan
    config = configured([f"--config={benchmark}:cumulative_lora"])
    return 60 * minutes / estimate.passes(configuration.flatten(config), estimate.size(config))


def describe(
    runs: Sequence[Run],
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
    lines += [f"{title(shared)}: {text}" for shared, text in ready.items()]
    lines += [f"missing: {title(shared)}: {text}" for shared, text in missing.items()]
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
        warning = "; too few" if gib > free else ""
        lines.append(f"disk: {gib:,.1f} GiB, {free:,.0f} GiB are free{warning}")
    return "\n".join(lines)


def _amount(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.2f}"
