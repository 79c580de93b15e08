"""One command for a fresh accelerator: checks its numbers and measures its speed.

    python -m benchmarks.accelerator --minutes=8 --output=FOLDER
    python -m benchmarks.accelerator --variant=digits --image_size=32 --batch_size=4 --minutes=1

Each part runs in its own process, the most valuable part first. A part has a share of the time,
writes NAME.json and NAME.log into the output folder, and stops no other part. A part for which no
time is left is recorded as skipped. The exit code is 1 if a number is wrong or its part failed,
otherwise 0. The second command is a trial on a processor. Imports and compilation take nearly all
of the trial's time, so the parts share two parallel processes.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tabulate

from benchmarks import measure
from fdc_jax.errors import InputError
from fdc_jax.machine.files import check_writable_folder, write_json, write_text
from fdc_jax.model import vit

PROGRAM = "benchmarks.accelerator"
GOLDEN = Path(__file__).with_name("golden.json")
# Headings of the table's columns, by the key of a row.
COLUMNS = {"what": "", "images_per_second": "images/s", "milliseconds": "ms"}
COLUMNS |= {"times_baseline": "times baseline", "teraflops": "TFLOP/s", "share_of_peak": "of peak"}
COLUMNS |= {"compile_seconds": "compile, s", "temporary_gib": "temporary, GiB"}
COLUMNS |= {"peak_gib": "peak, GiB", "mib_over_baseline": "over baseline, MiB"}


class Part(NamedTuple):
    """A function of a module in this folder; `seconds` is its share of eight minutes."""

    module: str
    function: str
    seconds: int
    arguments: dict[str, Any] = {}  # noqa: RUF012
    device: bool = True  # True if JAX uses the device in the part's own process


FAST: dict[str, Any] = {"precision": "fast"}
PARTS = {
    # Numbers that must be right.
    "features": Part("golden", "features", 30),
    "scores": Part("golden", "scores", 30),
    "gradients": Part("golden", "gradients", 60),
    "digits": Part("golden", "digits", 60, device=False),
    # Speed.
    "step_parity": Part("speed", "training_step", 25, {"precision": "parity"}),
    "step_fast_cudnn": Part("speed", "training_step", 25, FAST | {"attention": "cudnn"}),
    "step_fast_xla": Part("speed", "training_step", 25, FAST | {"attention": "xla"}),
    "pytorch_expert": Part("pytorch", "training_step", 40, {"expert": True}, device=False),
    "pytorch_eager": Part("pytorch", "training_step", 20, {"expert": False}, device=False),
    "extraction": Part("speed", "extraction", 25),
    "latency": Part("speed", "latencies", 40),
    "statistics": Part("speed", "statistics", 25),
    "step_fast_large": Part("speed", "training_step", 25, FAST | {"times": 4}),
    "passes": Part("speed", "passes_of_learners", 40),
    "checkpoints": Part("speed", "checkpoints", 20),
    "learners": Part("speed", "steps_of_learners", 120),
}


# Parts, in their own process ---------------------------------------------------------------------


def work(options: Any) -> int:
    """Measures the parts named by --part in order; returns exit code 0."""
    from fdc_jax.machine import devices

    devices.keep_freed_memory()
    devices.keep_programs(Path(options.output))
    for name in options.part.split(","):
        with open(Path(options.output) / f"{name}.log", "w") as log:
            for stream in (1, 2):  # processes that a part starts inherit both
                os.dup2(log.fileno(), stream)
        measure_part(name, options)
    return 0


def measure_part(name: str, options: Any) -> None:
    """Measures a part and writes its record after every row and every comparison."""
    from benchmarks import golden
    from fdc_jax.machine import devices

    part, path, start = PARTS[name], Path(options.output) / f"{name}.json", time.monotonic()
    committed = {} if options.make_golden else json.loads(Path(options.golden).read_text())
    record: dict[str, Any] = measure.about(PROGRAM, options) | {"checks": [], "rows": []}
    try:
        function = getattr(importlib.import_module(f"benchmarks.{part.module}"), part.function)
        for result in function(options, **part.arguments):
            if isinstance(result, golden.Number):
                if options.make_golden and isinstance(result.expected, str):
                    digits = [float(f"{x:.7g}") for x in np.ravel(result.actual)]
                    number = np.reshape(digits, np.shape(result.actual)).tolist()
                    committed.setdefault(result.expected or result.name, number)
                record["checks"].append(golden.compare(result, committed))
            else:
                record["rows"].append(result)
            record |= {"device": devices.description()} if part.device else {}
            write_json(path, record)
        record["status"] = "done"
    except measure.Skipped as reason:
        record |= {"status": "skipped", "note": str(reason)}
    except Exception as error:  # The next part may run in this process.
        traceback.print_exc()
        record |= {"status": "failed", "note": f"{type(error).__name__}: {error}"[:200]}
    if options.make_golden:
        record["made"] = committed
    write_json(path, record | {"seconds": time.monotonic() - start})


# All parts ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(names: Sequence[str], options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a process that measures parts; kills its process group at the end."""
    command = [sys.executable, "-m", PROGRAM, *sys.argv[1:], f"--part={','.join(names)}"]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def finish(
    process: subprocess.Popen[bytes], names: Sequence[str], options: Any, limit: float
) -> dict[str, dict[str, Any]]:
    """Returns the records of a process's parts once it ends, or after `limit` seconds."""
    try:
        status, note = "failed", f"exit code {process.wait(max(limit, 0.0))}"
    except subprocess.TimeoutExpired:
        status, note = "out of time", ""
    return {name: read_record(name, options, status, note) for name in names}


def read_record(name: str, options: Any, status: str, note: str = "") -> dict[str, Any]:
    """Returns the record of a part, with `status` if the part did not finish."""
    path = Path(options.output) / f"{name}.json"
    record = {"checks": [], "rows": []} | (json.loads(path.read_text()) if path.exists() else {})
    if "status" not in record:
        record |= {"status": status, "note": note}
        write_json(path, record)
    return record


def one_by_one(names: Sequence[str], options: Any) -> Iterator[dict[str, dict[str, Any]]]:
    """Runs each part in its own process; yields {name: record} for each."""
    end = time.monotonic() + 60 * options.minutes
    for index, name in enumerate(names):
        left, shares = end - time.monotonic(), [PARTS[part].seconds for part in names[index:]]
        if left < max(5, shares[0] * options.minutes / 16):
            yield {name: read_record(name, options, "skipped", "no time left")}
            continue
        limit = max(3 * left * shares[0] / sum(shares), left / 3, 10)
        with started([name], options) as process:
            yield finish(process, [name], options, min(left, limit))


def trial(names: Sequence[str], options: Any) -> Iterator[dict[str, dict[str, Any]]]:
    """Runs all parts in two parallel processes; yields the records of each process by name."""
    end = time.monotonic() + 60 * options.minutes
    groups = [[name for name in names if PARTS[name].device == used] for used in (True, False)]
    with contextlib.ExitStack() as stack:
        pairs = [(stack.enter_context(started(group, options)), group) for group in groups if group]
        for process, group in pairs:
            yield finish(process, group, options, end - time.monotonic())


def wrong(name: str, record: dict[str, Any]) -> list[str]:
    """Returns a line for every wrong number of a part, and a line if a part in `golden` failed."""
    lines = [
        f"{check['check']}: error {check['error']}, tolerance {check['tolerance']:g}, found "
        f"{check['found']}, expected {check['expected']}"
        for check in record["checks"]
        if not check["right"]
    ]
    if record["status"] == "failed" and PARTS[name].module == "golden":
        lines.append("the part failed, see its log")
    return lines


def tables(records: dict[str, dict[str, Any]]) -> str:
    """Returns a table of the parts, followed by a table of their rows."""
    parts, rows = [], []
    for name, record in records.items():
        checks = record["checks"]
        right = f"{sum(check['right'] for check in checks)} of {len(checks)}" if checks else ""
        parts.append([name, record["status"], record.get("seconds"), right, record.get("note", "")])
        rows += [[row.get(column) for column in COLUMNS] for row in record["rows"]]
    text = tabulate.tabulate(parts, ("part", "", "s", "right", ""), floatfmt=".0f")
    if rows:
        text += "\n\n" + tabulate.tabulate(rows, list(COLUMNS.values()), floatfmt=".4g")
    return text


def main() -> int:
    """Runs all parts and prints their tables; returns 1 if a number is wrong."""
    flags: dict[str, Any] = {"minutes": 8.0, "variant": "B/16", "image_size": 224, "batch_size": 64}
    flags |= {"parts": ",".join(PARTS), "golden": str(GOLDEN), "make_golden": False, "part": ""}
    parser = measure.parser_of(__doc__, PROGRAM, **flags)
    parser.set_defaults(output="runs/accelerator")
    options = measure.parsed(parser, suffix="")
    if options.part:
        return work(options)
    vit.build(options.variant, options.image_size)  # raises InputError
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise InputError(f"--parts: expected some of {', '.join(PARTS)}, found {unknown}")
    if options.make_golden:
        names = [name for name in names if PARTS[name].module == "golden"]
    is_trial, flags_of_xla = measure.is_trial(options), os.environ.get("XLA_FLAGS", "")
    if options.make_golden or is_trial:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if is_trial:  # Compilation takes longest.
        quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        os.environ["XLA_FLAGS"] = f"{flags_of_xla} {quick}".strip()
    check_writable_folder("--output", options.output)
    Path(options.output).mkdir(parents=True, exist_ok=True)
    for name in names:  # remove records of an earlier call
        (Path(options.output) / f"{name}.json").unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    records: dict[str, dict[str, Any]] = {}
    try:
        for finished in (trial if is_trial else one_by_one)(names, options):
            records |= finished
            for name, record in finished.items():
                print(f"{name}: {record['status']} {record.get('note', '')}", flush=True)
                for line in wrong(name, record):
                    print(f"{name}: WRONG: {line}", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    rest = (name for name in names if name not in records)
    records |= {name: read_record(name, options, "interrupted") for name in rest}
    records = {name: records[name] for name in names}
    text = tables(records)
    write_text(Path(options.output) / "table.txt", text + "\n")
    kinds = dict.fromkeys(part["device"] for part in records.values() if "device" in part)
    print(f"\n{text}\n\n{', '.join(kinds)}; records and logs: {options.output}")
    if options.make_golden:
        made = json.loads(Path(options.golden).read_text())
        for record in records.values():
            made |= record.get("made", {})
        write_json(options.golden, made)
    return int(any(wrong(name, record) for name, record in records.items()))


if __name__ == "__main__":
    sys.exit(measure.run(PROGRAM, main))
