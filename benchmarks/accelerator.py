"""A quarter of an hour on an accelerator: whether its numbers are right, and how fast they come.

    python -m benchmarks.accelerator --minutes=8 --output=found
    python -m benchmarks.accelerator --variant=digits --image_size=32 --batch_size=4 --minutes=1

Parts run in processes of their own, the most valuable first. Each has a share of the time, writes
NAME.json and NAME.log into the output folder, and stops no other part. Parts that no longer fit are
skipped by name. The exit code is 1 if a number is wrong or its part failed, otherwise 0.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
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
# Columns of the table by the name of a row's value.
COLUMNS = {"what": "", "images_per_second": "images/s", "milliseconds": "ms"}
COLUMNS |= {"times_baseline": "times baseline", "teraflops": "TFLOP/s", "share_of_peak": "of peak"}
COLUMNS |= {"compile_seconds": "compile, s", "temporary_gib": "temporary, GiB"}
COLUMNS |= {"peak_gib": "peak, GiB", "mib_over_baseline": "over baseline, MiB"}


class Part(NamedTuple):
    """Calls a function of a module of this folder; `seconds` are its share of eight minutes."""

    module: str
    function: str
    seconds: int
    arguments: dict[str, Any] = {}  # noqa: RUF012
    device: bool = True  # whether JAX has the device in the part's own process


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
    "learners": Part("speed", "steps_of_learners", 120),
}


# One part, in a process of its own ----------------------------------------------------------------


def work(options: Any) -> int:
    """Measures one part, and writes its record after every row and every comparison."""
    from benchmarks import golden
    from fdc_jax.machine import devices

    part, folder = PARTS[options.part], Path(options.output)
    devices.keep_freed_memory()
    devices.keep_programs(folder)
    committed = {} if options.make_golden else json.loads(Path(options.golden).read_text())
    record = measure.about(PROGRAM, options) | {"status": "failed", "checks": [], "rows": []}
    try:
        function = getattr(importlib.import_module(f"benchmarks.{part.module}"), part.function)
        for found in function(options, **part.arguments):
            if isinstance(found, golden.Number):
                if options.make_golden and isinstance(found.expected, str):
                    digits = [float(f"{x:.7g}") for x in np.ravel(found.found)]
                    number = np.reshape(digits, np.shape(found.found)).tolist()
                    committed.setdefault(found.expected or found.name, number)
                record["checks"].append(golden.compare(found, committed))
            else:
                record["rows"].append(found)
            record |= {"device": devices.describe()} if part.device else {}
            write_json(folder / f"{options.part}.json", record)
        record["status"] = "done"
    except measure.Skipped as reason:
        record |= {"status": "skipped", "note": str(reason)}
    if options.make_golden:
        record["made"] = committed
    write_json(folder / f"{options.part}.json", record)
    return 0


# All parts ----------------------------------------------------------------------------------------


def start(name: str, options: Any, limit: float) -> dict[str, Any]:
    """Runs a part in a process that is ended at a limit, and returns its record."""
    folder = Path(options.output)
    path, log = folder / f"{name}.json", folder / f"{name}.log"
    path.unlink(missing_ok=True)
    begun, ended = time.monotonic(), "failed"
    with open(log, "w") as lines:
        command = [sys.executable, "-m", PROGRAM, *sys.argv[1:], f"--part={name}"]
        streams: Any = {"stdout": lines, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(command, **streams)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            ended = "out of time"
        except KeyboardInterrupt:
            ended = "interrupted"
        finally:
            # Also what the part started, such as a run.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    record: dict[str, Any] = {"checks": [], "rows": []}
    record |= json.loads(path.read_text()) if path.exists() else {}
    if record.get("status") not in ("done", "skipped"):
        # Flax and JAX say more behind the error.
        errors = re.findall(r"^[\w.]*Error\b.*", log.read_text(errors="replace"), re.MULTILINE)
        note = f"exit code {process.returncode} {''.join(errors[-1:])[:200]}"
        record |= {"status": ended, "note": note if ended == "failed" else ""}
    record["seconds"] = time.monotonic() - begun
    write_json(path, record)
    return record


def wrong(name: str, record: dict[str, Any]) -> list[str]:
    """Returns a line for every wrong number of a part, or for the part if it failed."""
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
    """Returns a table of the parts and one of their rows."""
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
        os.environ["JAX_PLATFORMS"] = "cpu"
    if options.variant == "digits":  # A trial, in which compilation takes longest.
        quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}".strip()
    check_writable_folder("--output", options.output)
    Path(options.output).mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end, records = time.monotonic() + 60 * options.minutes, {}
    for index, name in enumerate(names):
        left, seconds = end - time.monotonic(), [PARTS[each].seconds for each in names[index:]]
        reasons = {
            "interrupted": "interrupted" in (each["status"] for each in records.values()),
            "no time left": left < max(5, seconds[0] * options.minutes / 16),
            "PyTorch is not installed": PARTS[name].module == "pytorch"
            and importlib.util.find_spec("torch") is None,
        }
        record: dict[str, Any] = {"status": "skipped", "checks": [], "rows": []}
        record["note"] = next((reason for reason, holds in reasons.items() if holds), "")
        if not record["note"]:
            limit = max(3 * left * seconds[0] / sum(seconds), left / 3, 10)
            record = start(name, options, min(left, limit))
        records[name] = record
        print(f"{name}: {record['status']} {record.get('note', '')}", flush=True)
        for line in wrong(name, record):
            print(f"{name}: WRONG: {line}", flush=True)
    text = tables(records)
    write_text(Path(options.output) / "table.txt", text + "\n")
    known = dict.fromkeys(each["device"] for each in records.values() if "device" in each)
    print(f"\n{text}\n\n{', '.join(known)}; records and logs: {options.output}")
    if options.make_golden:
        made = json.loads(Path(options.golden).read_text())
        for record in records.values():
            made |= record.get("made", {})
        write_json(options.golden, made)
    return int(any(wrong(name, record) for name, record in records.items()))


if __name__ == "__main__":
    sys.exit(measure.run(PROGRAM, main))
