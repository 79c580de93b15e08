"""Prints the table of docs/integrations.md: `python integrations/measure.py [HEADING...]`.

Runs the page's programs for the toolboxes that are installed, or, for toolboxes without a package,
a test that runs the program; their folders are in `MAMMOTH`, `PILOT` and `LIBCONTINUAL`. Every
program prints its numbers as a dictionary; seconds are processor time with imports.
"""

import ast
import importlib.metadata
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
# By heading of the page: the package, or the variable with the folder of a repository; and the test
# that runs the program if it does not run alone.
ROWS = {
    "PyTorch": ("torch", ""),
    "transformers and PEFT": ("peft", ""),
    "Lightning": ("lightning", ""),
    "Avalanche": ("avalanche-lib", ""),
    "pytorch-ood": ("pytorch-ood", ""),
    "PILOT": ("PILOT", "integrations/test_pilot.py::test_learner_and_dump[gaussians]"),
    "Mammoth": ("MAMMOTH", "integrations/test_mammoth.py::test_model[gaussians]"),
    "LibContinual": ("LIBCONTINUAL", "integrations/test_libcontinual.py::test_inflora[gaussians]"),
}
OWN = re.compile(r"fdc|calibrat|gaussians|\bboth\b|\bwalk\b|FDC|LAYER")


def program(heading: str) -> str:
    """Returns the first program under a heading of the page."""
    page = (ROOT / "docs" / "integrations.md").read_text("utf-8")
    return page.split(f"## {heading}\n")[1].split("```python\n")[1].split("```")[0]


def spent() -> float:
    """Returns the processor time of processes that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(command: list[str], folder: str) -> tuple[dict[str, float], float]:
    """Returns the dictionary that a command prints, and its seconds."""
    paths = [str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1") | {"JAX_PLATFORMS": "cpu"}
    before, environment = spent(), os.environ | one | {"PYTHONPATH": os.pathsep.join(paths)}
    made = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    printed = re.findall(r"\{'\w+': [\d.]+.*?\}", made.stdout)
    if not printed:
        raise SystemExit(f"{' '.join(command)[:200]}: no numbers\n{made.stdout}{made.stderr}")
    return ast.literal_eval(printed[0]), spent() - before


def version(heading: str) -> str | None:
    """Returns the version of a package or the commit of a repository; None if it is missing."""
    name, _ = ROWS[heading]
    if not name.isupper():
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None
    folder = os.environ.get(name)
    if not folder:
        return None
    command = ["git", "-C", folder, "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "a copy"


def main(headings: list[str]) -> None:
    """Prints a row for every heading, by default all."""
    print("| | version | lines | seconds | before | after | date |\n|---|---|---|---|---|---|---|")
    for heading in headings or ROWS:
        own, code, test = version(heading), program(heading), ROWS[heading][1]
        if own is None:
            print(f"{heading}: not installed", file=sys.stderr)
            continue
        lines = sum(bool(OWN.search(line)) for line in code.splitlines())
        command = [sys.executable, "-W", "ignore", "-c", code]
        if test:
            command = [sys.executable, "-m", "pytest", "-n", "0", "-s", f"{ROOT}/tests/{test}"]
        with tempfile.TemporaryDirectory() as folder:
            numbers, seconds = measured(command, str(ROOT) if test else folder)
        before, *after = (f"{name} {100 * value:.1f}" for name, value in numbers.items())
        day = time.strftime("%Y-%m-%d")
        row = (heading, own, lines, f"{seconds:.0f}", before, ", ".join(after), day)
        print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
