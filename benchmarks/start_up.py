"""Time from the command to the first training step, without and with compiled programs at hand.

    python -m benchmarks.start_up
    python -m benchmarks.start_up --config=cifar100 --set data.dir=DIR --set encoder.weights=FILE

Every start is a process of its own, which stops after one training step. `cold` finds an empty
cache folder; `warm` finds what the cold start left there, as the second run of a user does. JAX's
own counters say how many programs were found and how many were not. `processor` seconds are those
of all cores, which other programs change little.
"""

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

# Run as a file, the repository's root is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import check_output, in_a_process, run, write_report
from fdc_jax.errors import InputError, Interrupted

_ROOT = Path(__file__).resolve().parents[1]


def child(name: str, settings: list[str], folder: Path, started: float) -> dict[str, Any]:
    """Starts a run, ends it after its first step, and returns the seconds since the start."""
    import jax

    from fdc_jax import command, configuration, interruption, preparation, results

    seconds: dict[str, float] = {}
    processor: dict[str, float] = {}

    def reached(stage: str) -> None:
        seconds.setdefault(stage, time.time() - started)
        processor.setdefault(stage, time.process_time())

    reached("imports")
    events: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))

    class FirstStep(interruption.StopRequest):
        """Asks to stop as soon as the run asks whether to, which is after a step."""

        def requested(self) -> bool:
            reached("first_step")
            return True

        def poll(self) -> None:
            if "first_step" in seconds:
                raise Interrupted("stopped after the first step")

    prepare = preparation.prepare

    def prepared(*arguments: Any, **options: Any) -> preparation.Experiment:
        result = prepare(*arguments, **options)
        reached("preparation")
        return result

    preparation.prepare = prepared
    config = importlib.import_module(f"configs.{name}").get_config()
    config.cache_dir = str(folder / "cache")
    config.report = False
    for setting in settings:
        field, _, value = setting.partition("=")
        if field not in configuration.flatten(config):
            raise InputError(f"--set {setting}: the configuration has no field {field}")
        try:
            config.update_from_flattened_dict({field: _typed(value)})
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"--set {setting}: {str(error).strip()}") from error
    try:
        with tempfile.TemporaryDirectory(dir=folder) as workdir:
            command.run(config, workdir, True, FirstStep())
    except Interrupted:
        pass
    if "first_step" not in seconds:
        raise InputError("expected a task of at least two training steps")
    compiled = folder / "cache" / "compiled"
    prefix = "/jax/compilation_cache/"
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "programs_found": events[f"{prefix}cache_hits"],
        "programs_missed": events[f"{prefix}cache_misses"],
        "cache_files": sum(path.is_file() for path in compiled.rglob("*")),
        "cache_bytes": sum(path.stat().st_size for path in compiled.rglob("*") if path.is_file()),
        "device": jax.devices()[0].device_kind,
        "versions": results.versions(),
    }


def _typed(value: str) -> Any:
    try:
        return json.loads(value.lower() if value in ("True", "False") else value)
    except json.JSONDecodeError:
        return value


def start(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Starts one process and returns what it measured."""
    return in_a_process(
        "benchmarks.start_up",
        [
            f"--config={options.config}",
            *(f"--set={setting}" for setting in options.set),
            *(f"--child={folder}", f"--started={time.time()}"),
        ],
        options.config,
        OPENBLAS_NUM_THREADS="1",
        TF_CPP_MIN_LOG_LEVEL="2",
    )


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts cold and warm in turns, cold in an empty folder each time; returns medians."""
    found: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            for starts in found.values():
                starts.append(start(options, Path(folder)))
    return [
        {
            **starts[-1],
            "start": name,
            **{
                clock: {
                    stage: statistics.median(each[clock][stage] for each in starts)
                    for stage in starts[-1][clock]
                }
                for clock in ("seconds", "processor_seconds")
            },
        }
        for name, starts in found.items()
    ]


def line(record: dict[str, Any]) -> str:
    """A record for the screen."""
    seconds = record["seconds"]
    return (
        f"{record['start']}: first step after {seconds['first_step']:.1f} s (imports until "
        f"{seconds['imports']:.1f} s, preparation until {seconds['preparation']:.1f} s), "
        f"{record['processor_seconds']['first_step']:.1f} s of processor time; programs "
        f"found {record['programs_found']}, missed {record['programs_missed']}; cache "
        f"{record['cache_files']} files, {record['cache_bytes'] / 2**20:.1f} MiB"
    )


def main() -> None:
    """Prints a line per kind of start and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--config", default="digits", help="a file of configs/")
    parser.add_argument("--set", action="append", default=[], help="FIELD=VALUE of the config")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", help="a .json file for the measurements")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.config, options.set, Path(options.child), options.started)))
        return
    if not (_ROOT / "configs" / f"{options.config}.py").is_file() or options.repeats < 1:
        raise InputError(
            "expected a --config of configs/ and --repeats of at least 1, found "
            f"{options.config!r} and {options.repeats}"
        )
    check_output(options)
    records = measure(options)
    for record in records:
        print(line(record), flush=True)
    write_report("benchmarks.start_up", options, {"records": records})


if __name__ == "__main__":
    sys.exit(run("benchmarks/start_up.py", main))
