"""Where the time of a training step of Cumulative-LoRA goes, by part of the encoder.

    python -m benchmarks.step_profile --variant=Ti/16 --image_size=224 --batch_size=16 --cores=1
    python -m benchmarks.step_profile --precision=fast --output=profile.json

JAX's profiler records how long each compiled operation takes; each belongs to the part of the
encoder that its name in the compiled program tells. Fused operations count for the part that the
last of them belongs to. What the repeats take beyond that is `between operations`.
"""

import argparse
import collections
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import measure, training_step

PROGRAM = "benchmarks.step_profile"
# First match wins; `op_name` of a compiled operation.
PARTS = (
    ("products of the MLP", r"MlpBlock_3/Dense_\d/dot_general"),
    ("GELU", r"MlpBlock_3/"),
    ("query, key, value, out", r"Attention_1/(query|key|value|out)/"),
    ("products of attention", r"Attention_1/[a-z,>-]+/(dot_general|transpose)"),
    ("softmax", r"Attention_1/"),
    ("norms", r"LayerNorm|encoder_norm"),
    ("residuals", r"encoderblock_\d+/(add|add_any|slice|pad)"),
    ("embedding", r"embedding/|posembed_input"),
)
OTHER, BETWEEN = "head, loss, optimiser, copies", "between operations"
# They contain operations that are recorded, too.
_CONTROL = ("while", "call", "conditional")


def part_of(name: str) -> str:
    """Returns the part of the encoder that an operation of this name belongs to."""
    return next((part for part, pattern in PARTS if re.search(pattern, name)), OTHER)


def instructions(program: str) -> Iterator[tuple[str, str, str]]:
    """Yields the computation, the name and the line of every instruction of a compiled program."""
    computation = ""
    for line in program.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            computation = opened[1]
        elif instruction := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = ", line):
            yield computation, instruction[1], line


def names(program: str) -> dict[str, str]:
    """Returns `op_name` by instruction of a compiled program, as text.

    An instruction without a name of its own has that of the computation that it calls.
    """
    found: dict[str, str] = {}
    roots: dict[str, str] = {}
    calls: dict[str, str] = {}
    for computation, name, line in instructions(program):
        if named := re.search(r'op_name="([^"]+)"', line):
            found[name] = roots[computation] = named[1]
        elif called := re.search(r"calls=%?([\w.-]+)", line):
            calls[name] = called[1]
    return found | {name: roots[to] for name, to in calls.items() if to in roots}


def seconds_by_operation(folder: str) -> dict[str, float]:
    """Returns the seconds of each compiled operation in a recording of JAX's profiler."""
    import jax

    (path,) = Path(folder).rglob("*.xplane.pb")
    found: dict[str, float] = collections.defaultdict(float)
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                operation = recorded(line.name, event.name, dict(event.stats))
                if operation and not operation.startswith(_CONTROL):
                    found[operation] += event.duration_ns * 1e-9
    return found


def recorded(line: str, event: str, stats: Mapping[str, Any]) -> str:
    """Returns the compiled operation that an event is of; TPUs have its text for a name."""
    operation = stats.get("hlo_op", event if line == "XLA Ops" else "")
    return str(operation).split(" = ")[0].removeprefix("%")


def profile(options: argparse.Namespace) -> dict[str, float]:
    """Returns milliseconds of a step by part, a mean over repeats and devices."""
    import jax

    _, update, *fixed, trained, batch = training_step.prepared(options)
    state = [trained, update.initialise(trained)]
    compiled = update.step.lower(*fixed, *state, batch, 1.0).compile()

    def repeat() -> float:
        clock = time.perf_counter()
        *state[:], loss = compiled(*fixed, *state, batch, 1.0)
        loss.block_until_ready()
        return time.perf_counter() - clock

    for _ in range(options.warm_up):
        repeat()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            seconds = [repeat() for _ in range(options.repeats)]
        operations = seconds_by_operation(folder)
    known = names(compiled.as_text())
    parts: dict[str, float] = collections.defaultdict(float)
    for operation, each in operations.items():
        # Every device has its own recording of its share of the batch.
        milliseconds = 1e3 * each / options.repeats / jax.device_count()
        parts[part_of(known.get(operation, ""))] += milliseconds
    parts[BETWEEN] = max(0.0, 1e3 * statistics.mean(seconds) - sum(parts.values()))
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def main() -> None:
    """Prints a line per part."""
    parser = measure.parser_of(__doc__, PROGRAM, **measure.ENCODER, **measure.TURNS)
    options = measure.parsed(parser)
    measure.use_cores(options.cores)
    from fdc_jax.machine import devices

    devices.keep_freed_memory()
    parts = profile(options)
    whole = sum(parts.values())
    for part, each in parts.items():
        print(f"{part}: {each:.1f} ms, {100 * each / whole:.1f} %")
    print(f"a step: {whole:.1f} ms; {devices.describe()}")
    report = {"device": devices.describe(), "milliseconds": parts}
    measure.write_report(PROGRAM, options, report)


if __name__ == "__main__":
    sys.exit(measure.run(PROGRAM, main))
