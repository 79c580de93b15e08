"""The first hour on an accelerator: what is worth measuring there, in one command.

    python -m benchmarks.first_hour --budget_minutes=40 --output=first_hour
    python -m benchmarks.first_hour --rehearse --output=rehearsal

Parts of less than ten minutes run one after the other, the most valuable first, each in a process
of its own. The folder receives NAME.json (of a run the folder NAME), NAME.log with what was
printed, `parts.json` with the state of every part, and `table.md`: what was measured beside the
paper's figures and the estimates of `benchmarks.ahead_of_time`. Killed or out of time (75), the
same command goes on where it was; parts that failed are tried again behind all others. --rehearse
has the same parts at a tiny size.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tabulate

from benchmarks import measure
from fdc_jax.errors import InputError, StopRequest, stop_on_signals
from fdc_jax.machine.files import check_writable_folder, read_json, write_json, write_text

PROGRAM = "benchmarks.first_hour"
# Seconds that a part may take at most, and that it has to save once it is asked to end.
LIMIT, GRACE = 540, 45
UNFINISHED = 75  # also what main.py ends with where the same command goes on
# Has Linux end a part when its parent is killed (PR_SET_PDEATHSIG), and becomes the program that
# follows; a part that goes on alone would keep the device busy.
_END_WITH_PARENT = (
    "-c",
    "import ctypes, os, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, 15)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
)
# Estimates by part of a device's name, the first that fits.
_ESTIMATES = Path(__file__).resolve().parents[1] / "results" / "ahead_of_time"
_TARGETS = {
    **{"TPU v5 lite": "v5e", "TPU v6 lite": "v6e", "TPU v5": "v5p"},
    **{"H100": "h100", "H200": "h200", "A100": "a100"},
}

# What each measures, the most valuable first: name, minutes without which it is not begun, program
# and flags. {form} stands for every attention that the device has, {some} for a third of the
# learners, {n} for their numbers and for seeds; the rest is in the sizes below.
_PARTS = (
    ("step_parity", 2, "training_step {step}"),
    ("step_fast_{form}", 2, "training_step {step} --precision=fast --attention={form}"),
    ("extraction_parity", 2, "extraction {large}"),
    ("extraction_fast_{form}", 2, "extraction {large} --precision=fast --attention={form}"),
    ("step_parity_pytorch", 4, "training_step {step} {pytorch}"),
    ("step_fast_pytorch", 4, "training_step {step} --precision=fast {pytorch}"),
    ("extraction_parity_pytorch", 4, "extraction {large} {pytorch}"),
    ("extraction_fast_pytorch", 4, "extraction {large} --precision=fast {pytorch}"),
    ("latency_parity", 2, "latency {case}"),
    ("latency_fast", 2, "latency {case} --precision=fast"),
    ("learners_{n}", 4, "learners {task} --precision=fast --learners={some}"),
    ("memory_parity", 3, "memory {stream} --run_step"),
    ("memory_fast", 3, "memory {stream} --run_step --precision=fast"),
    ("fit_on_device", 2, "calibration --tasks=3 {statistics}"),
    ("fit_on_host", 2, "calibration --tasks=3 {statistics}"),
    ("step_fast_large", 2, "training_step {large} --precision=fast"),
    ("profile_fast", 2, "step_profile {step} --precision=fast"),
    ("run_{n}", 2, "main.py {run} --config.seed={n}"),
)
_B16 = "--variant=B/16 --image_size=224"
_FULL = {
    **{"step": f"{_B16} --batch_size=64", "large": f"{_B16} --batch_size=256"},
    **{"pytorch": "--pytorch", "case": f"{_B16} --case=20x100", "stream": f"{_B16} --tasks=2,50"},
    "task": f"{_B16} --images=640 --epochs=20",
    "statistics": "--images=27000 --classes=90",
    "run": "--config=configs/cifar100.py --config.encoder.variant=Ti/16 --config.precision=fast",
}
_DIGITS = "--variant=digits --image_size=32 --batch_size=4"
_TINY = {
    **dict.fromkeys(("step", "large"), f"{_DIGITS} --warm_up=1 --repeats=2"),
    **{"pytorch": "--pytorch=eager", "case": f"{_DIGITS} --case=5x15 --warm_up=1 --batches=2"},
    "stream": f"{_DIGITS} --tasks=2,4 --classes=2 --images=10",
    "task": f"{_DIGITS} --classes=2 --images=6 --epochs=1",
    "statistics": "--images=330 --classes=22 --width=16",
    "run": "--config=configs/digits.py --config.train.epochs=1 --config.data.train_per_class=20",
}


class Part(NamedTuple):
    """What one process measures: `command` are Python's arguments, those of a run with main.py.

    It is not begun with less than `minutes` left.
    """

    name: str
    minutes: float
    command: Sequence[str]

    @property
    def is_run(self) -> bool:
        """Whether it goes on where it was stopped."""
        return self.command[0] == "main.py"

    def report(self, folder: Path) -> Path:
        """Returns the file that it writes in the end."""
        return folder / (f"{self.name}/results.json" if self.is_run else f"{self.name}.json")


def parts(options: argparse.Namespace, device: dict[str, Any]) -> list[Part]:
    """Returns all parts for what `describe` says of a machine."""
    sizes = _TINY if options.rehearse else _FULL
    thirds = [{"n": n + 1, "some": ",".join(device["learners"][n::3])} for n in range(3)]
    forms = [{"form": form} for form in device["attentions"]]
    own = [f"--config.encoder.weights={options.weights}", f"--config.data.dir={options.data_dir}"]
    found = []
    for name, minutes, text in _PARTS:
        is_run, is_pytorch = "{run}" in text, "{pytorch}" in text
        if (is_run and device["lacking"]) or (is_pytorch and not device["pytorch"]):
            continue
        for case in thirds if "{n}" in name else forms if "{form}" in name else [{}]:
            program, *flags = text.format(**sizes, **case).split()
            start = [program] if is_run else ["-m", f"benchmarks.{program}"]
            command = [*start, *flags, *(own if is_run and not options.rehearse else ())]
            found.append(Part(name.format(**case), minutes, command))
    return found


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Returns device, versions, what large products reach, and what `parts` needs to know."""
    import jax

    from benchmarks import flops
    from fdc_jax import evaluation, learners
    from fdc_jax.data import task_stream
    from fdc_jax.machine import devices
    from fdc_jax.model import vit, weights

    device, attentions, lacking, pytorch = jax.devices()[0], [], None, False
    if device.platform == "cpu" and not options.rehearse:
        raise InputError("expected an accelerator, found a CPU alone; see docs/accelerators.md")
    given = {"precision": "fast", "cudnn": devices.have_cudnn(devices.data_mesh())}
    for form in vit.ATTENTIONS:
        with contextlib.suppress(InputError):
            attentions.append(vit.build("B/16", 224, attention=form, **given).attention)
    if importlib.util.find_spec("torch"):
        import torch  # pyright: ignore[reportMissingImports]

        pytorch = device.platform == ("gpu" if torch.cuda.is_available() else "cpu")
    try:
        if not options.rehearse:
            weights.locate(options.weights, "Ti/16", weights.cache_folder())
            task_stream.open_dataset("cifar100", "train", options.data_dir)
    except InputError as error:
        lacking = str(error)
    size = 1536 if options.rehearse else 8192
    rates = {each: flops.product_rate(each, size)[0] for each in vit.PRECISIONS}
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    kinds = ("jax", "libtpu", "nvidia", "torch")
    return {
        "device": devices.describe(),
        "rehearsal": options.rehearse,
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "platform_version": device.client.platform_version,
        "versions": evaluation.versions(),
        "packages": {each: installed[each] for each in installed if each.startswith(kinds)},
        "product_tflops": {each: 1e-12 * float(rate) for each, rate in rates.items()},
        "attentions": list(dict.fromkeys(attentions)),
        "learners": learners.names(),
        "pytorch": pytorch,
        "lacking": lacking,
    }


# Running them -------------------------------------------------------------------------------------


def work(todo: Sequence[Part], folder: Path, seconds: float, stop: StopRequest) -> dict[str, Any]:
    """Runs what is left of the parts for some seconds, and returns the state of all by name.

    One that fails, or does not end in time, is tried again by a later call, behind those that
    failed less often; a run that is stopped goes on.
    """
    deadline, path, tried = time.monotonic() + seconds, folder / "parts.json", set()
    state = known = read_json(path) if path.exists() else {}
    for part in todo:
        old, new = known.get(part.name), {"command": list(part.command), "state": "not begun"}
        lost = old and old["state"] == "done" and not part.report(folder).exists()
        if not old or old["command"] != new["command"] or lost:
            state[part.name] = new | {"failures": 0, "seconds": 0.0, "said": ""}
    while not stop.requested():
        left = deadline - time.monotonic() - GRACE
        able = [part for part in todo if part.name not in tried and left >= 60 * part.minutes]
        able = [part for part in able if state[part.name]["state"] != "done"]
        if not able:
            break
        part = min(able, key=lambda part: state[part.name]["failures"])
        entry, start = state[part.name], time.monotonic()
        code, ended = _run(part, folder, min(LIMIT, left), stop)
        goes_on = part.is_run and (ended or code == UNFINISHED)
        entry["state"] = "done" if code == 0 else "stopped" if ended or goes_on else "failed"
        entry["failures"] += code != 0 and not goes_on and not stop.requested()
        entry["seconds"] += time.monotonic() - start
        entry["said"] = _last_line(part, folder)
        write_json(path, state)
        if not goes_on:
            tried.add(part.name)
        print(
            f"{part.name}: {entry['state']}, {entry['seconds']:.0f} s; {entry['said']}", flush=True
        )
    return {part.name: state[part.name] for part in todo}


def _run(part: Part, folder: Path, seconds: float, stop: StopRequest) -> tuple[int, bool]:
    """Returns the exit code of a part, and whether it was asked to end."""
    into = f"--workdir={folder / part.name}" if part.is_run else f"--output={part.report(folder)}"
    # What was compiled by a part that did not end need not be compiled again.
    environment = {"JAX_COMPILATION_CACHE_DIR": str(folder.absolute() / "compiled")} | os.environ
    if part.name.endswith("_on_host"):
        environment["JAX_PLATFORMS"] = "cpu"
    deadline, ended = time.monotonic() + seconds, False
    with open(folder / f"{part.name}.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, *_END_WITH_PARENT, *part.command, into],
            **{"stdout": log, "stderr": subprocess.STDOUT, "env": environment},
            start_new_session=True,
        )
        try:
            while process.poll() is None and not ended:
                ended = stop.requested() or time.monotonic() > deadline
                time.sleep(0.1)
            if ended:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE - 10)
        finally:
            # And what it started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.wait(), ended


def _last_line(part: Part, folder: Path) -> str:
    text = (folder / f"{part.name}.log").read_text(errors="replace").rstrip()
    return text[text.rfind("\n") + 1 :][:200]


# What was found -----------------------------------------------------------------------------------


def rows(
    found: dict[str, Any], records: Sequence[dict[str, Any]] = ()
) -> Iterator[tuple[str, str, str, str]]:
    """Yields what a report has measured, its value, the paper's on an A100, and an estimate.

    Args:
        found: the report of a part.
        records: of `benchmarks.ahead_of_time`, for the same devices.
    """
    from fdc_jax.report import paper

    given = found.get("settings", {})

    def estimate(program: str) -> str:
        for each in records:
            same = all(each[name] == given[name] for name in ("batch_size", "precision"))
            if (
                each["program"] == program
                and same
                and given["attention"] in ("auto", each["attention"])
            ):
                speed = each.get("images_per_second")
                text = f"{each['memory_bytes']['peak'] / 2**30:.2f} GiB"
                return text if speed is None else f"{speed:.0f} images/s, {text}"
        return ""

    latency, cost = (paper.columns(table, "cifar100") for table in ("latency", "cost"))
    for name, each in found.get("contenders", {}).items():
        share = f", {100 * each['utilisation']:.0f} % of peak" if each["utilisation"] else ""
        program = "extraction" if "benchmarks.extraction" in found["command"] else "cumulative_lora"
        known = estimate(program) if name == "jax" else ""
        yield name, f"{each['images_per_second']:.1f} images/s{share}", "", known
    for name, each in found.get("views", {}).items():
        memory = latency["raw_mib"] + (name != "raw") * latency[f"{name}_mib"]
        published = f"{latency[f'{name}_ms']:.1f} ms, {memory:.1f} MiB"
        memory = (each["peak_memory_bytes"] or 0) / 2**20
        yield name, f"{np.mean(each['milliseconds']):.1f} ms, {memory:.1f} MiB", published, ""
    for each in found.get("learners", ()):
        name, speed = each["learner"], f"{each['images_per_second']:.1f} images/s"
        relative = f"{each['step_relative_clock']:.2f} times {found['learners'][0]['learner']}"
        yield f"step of {name}", f"{speed}, {relative}", "", estimate(name)
    for each in found.get("records", ()):
        peak = each["peak_bytes"]["device"] or sum(each["step_bytes"].values())
        published = f"{cost['peak_memory_gib']:.2f} GiB"
        known = estimate(given["learner"])
        yield f"peak at {each['tasks']} tasks", f"{peak / 2**30:.2f} GiB", published, known
    for each in found.get("results", ()):
        name, seconds = f"{each['images'] // each['tasks']} images", each["fit_seconds_last_task"]
        yield f"fit of {name}", f"{1e3 * seconds['clock']:.0f} ms", "", ""
    for name, milliseconds in found.get("milliseconds", {}).items():
        yield name, f"{milliseconds:.2f} ms", "", ""
    if "accuracy" in found:
        text = ", ".join(f"{kind} {value:.2f}" for kind, value in found["accuracy"].items())
        yield "accuracy, percent", text, "", ""
        minutes = found["timing"]["training_seconds"] / 60
        speed = f"{found['timing']['training_images_per_second']:.0f} images/s"
        published = f"ViT-B/16: {cost['training_minutes']} minutes"
        yield "training", f"{minutes:.1f} minutes, {speed}", published, ""


def summary(todo: Sequence[Part], state: dict[str, Any], folder: Path, device: Any) -> str:
    """Returns the table of what is done, and a line for each part that is left."""
    count, _, kind = device["device"].split(" ", 2)
    target = next((target for name, target in _TARGETS.items() if name in kind), "")
    path = _ESTIMATES / f"{target}.json"
    records = read_json(path)["records"] if path.exists() else []
    records = [each for each in records if each["devices"] == int(count)]
    done = [part for part in todo if state[part.name]["state"] == "done"]
    table = [
        (part.name, *row) for part in done for row in rows(read_json(part.report(folder)), records)
    ]
    reached = ", ".join(f"{kind} {rate:.3g}" for kind, rate in device["product_tflops"].items())
    left = [(part.name, *map(state[part.name].get, ("state", "said"))) for part in todo]
    left = [row for row in left if row[1] != "done"]
    if device["lacking"]:
        left.append(("runs of CIFAR-100", "not begun", device["lacking"]))
    header = ["", "", "measured", "paper, A100, float32", f"estimate, {target or 'none'}"]
    return "\n\n".join(
        ["A rehearsal at a tiny size, which measures nothing."] * device["rehearsal"]
        + [f"{device['device']}; large products in 10^12 operations a second: {reached}"]
        + [tabulate.tabulate(table, header, tablefmt="github")]
        + [tabulate.tabulate(left, ["left", "", ""], tablefmt="github")] * bool(left)
    )


def main() -> None:
    """Runs what the budget has room for, and prints and writes the table."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(prog=PROGRAM, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, help="the folder for everything")
    parser.add_argument("--budget_minutes", type=float, default=40.0, help="after which it ends")
    parser.add_argument("--weights", default="augreg", help="config.encoder.weights of ViT-Ti/16")
    parser.add_argument("--data_dir", default="", help="config.data.dir, with CIFAR-100")
    parser.add_argument("--rehearse", action="store_true", help="all parts at a tiny size")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        return write_json(options.output, describe(options))
    if not options.budget_minutes >= 2:  # nor a NaN
        raise InputError(f"--budget_minutes: expected at least 2, found {options.budget_minutes:g}")
    folder = Path(options.output)
    check_writable_folder("--output", folder)
    folder.mkdir(parents=True, exist_ok=True)
    here = Part("device", 0, ["-m", PROGRAM, *sys.argv[1:], "--here"])
    before = read_json(here.report(folder)) if here.report(folder).exists() else None
    with stop_on_signals() as stop:
        code, _ = _run(here, folder, 60 * options.budget_minutes - GRACE, stop)
        if code:
            raise InputError(f"the device could not be used: {_last_line(here, folder)}")
        device = read_json(here.report(folder))
        if before and before["device"] != device["device"]:
            write_json(here.report(folder), before)
            found = f"expected {before['device']}, found {device['device']}"
            raise InputError(f"--output={folder}: {found}; another device needs another folder")
        todo = parts(options, device)
        left = 60 * options.budget_minutes - (time.monotonic() - start)
        state = work(todo, folder, left, stop)
    text = summary(todo, state, folder, device) + "\n"
    write_text(folder / "table.md", text)
    print(text, end="")
    if any(each["state"] in ("not begun", "stopped") for each in state.values()):
        sys.exit(UNFINISHED)


if __name__ == "__main__":
    sys.exit(measure.run(PROGRAM, main))
