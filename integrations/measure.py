"""Prints the table of docs/integrations.md: `python integrations/measure.py [--real] [HEADING...]`.

Runs the page's programs for the toolboxes that are installed, or, for toolboxes without a package,
a test that runs the program; their folders are in `MAMMOTH`, `PILOT` and `LIBCONTINUAL`. Every
program prints its numbers as a dictionary; seconds are processor time with imports. With `--real`,
programs get the images and the encoder of `real_images.py` in place of digits, and toolboxes
without a package have another test. A row that fails is named with its error, and the others are
measured.
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
# By heading of the page: packages, or the variable with the folder of a repository; and the test
# that runs the program if it does not run alone.
ROWS = {
    "PyTorch": ("torch", ""),
    "transformers and PEFT": ("transformers peft", ""),
    "Lightning": ("lightning", ""),
    "Avalanche": ("avalanche-lib", ""),
    "pytorch-ood": ("pytorch-ood", ""),
    "PILOT": ("PILOT", "test_pilot.py::test_learner_and_dump_score_as_refitted[gaussians]"),
    "Mammoth": (
        "MAMMOTH",
        "test_mammoth.py::test_model_and_its_copies_score_as_refitted[gaussians]",
    ),
    "LibContinual": (
        "LIBCONTINUAL",
        "test_libcontinual.py::test_inflora_scores_as_refitted[gaussians]",
    ),
}
REAL_TEST = "test_gaussians_surpass_raw_logits_on_real_images"
OWN = re.compile(r"fdc|calibrat|gaussians|\bboth\b|\bwalk\b|FDC|LAYER")
# Parts of a message that tell of a missing network, and what needs one.
OFFLINE = re.compile(r"Name or service not known|Network is unreachable|ConnectionError|URLError")
FETCHES = {"Mammoth": "datasets/seq_8vision.py fetches CLIP's weights at import: remove it"}
# Parts that `--real` replaces in every program, and in the program under a heading.
READ = {
    "pixels, labels = map(torch.tensor, load_digits(return_X_y=True))": (
        "from real_images import images, labels, test, vit"
    ),
    "pixels.float().reshape(-1, 1, 8, 8) / 8 - 1": "images",
    "pixels.float() / 16": "images",
    "torch.arange(len(labels)) % 3 == 0": "test",
    "torch.arange(10).split(2)": "torch.arange(20).split(4)",
}
REAL = {
    "PyTorch": {
        "nn.Sequential(nn.Linear(64, 64), nn.ReLU())": "vit()",
        "nn.Linear(64, 2)": "nn.Linear(192, 4)",
        "0.003": "0.0001",
        "range(30)": "range(5)",
    },
    "transformers and PEFT": {
        "ViTForImageClassification(ViTConfig(**size))": "vit(20)",
        '["q_proj", "v_proj"]': '["qkv"]',
        '["classifier"]': '["head"]',
        ".logits": "",
    },
    "Lightning": {
        "nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))": (
            "nn.Sequential(vit(), nn.Linear(192, 20))"
        ),
        'layer="2"': 'layer="1"',
        "lr=0.05": "lr=0.01",
    },
    "Avalanche": {
        "SimpleMLP(input_size=64, hidden_size=64, num_classes=10)": "vit(20)",
        'layer="classifier"': 'layer="head"',
        "lr=0.05": "lr=0.01",
    },
    "pytorch-ood": {
        "torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU())": "vit()",
        "torch.nn.Linear(32, 6)": "torch.nn.Linear(192, 12)",
        "< 6": "< 12",
        "[[0, 1, 2], [3, 4, 5]]": "[range(6), range(6, 12)]",
        "0.01)": "0.0001)",
        "range(60)": "range(5)",
    },
}


def program(heading: str, real: bool = False) -> str:
    """Returns the first program under a heading of the page, for digits or for real images."""
    page = (ROOT / "docs" / "integrations.md").read_text("utf-8")
    code = page.split(f"## {heading}\n")[1].split("```python\n")[1].split("```")[0]
    for old, new in (READ | REAL.get(heading, {})).items() if real else ():
        code = code.replace(old, new)
    return code


def spent() -> float:
    """Returns the processor time of processes that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(command: list[str], folder: str) -> tuple[dict[str, float], float, str]:
    """Returns the dictionary that a command prints, empty if it failed, seconds and its output."""
    paths = [str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1") | {"JAX_PLATFORMS": "cpu"}
    before, environment = spent(), os.environ | one | {"PYTHONPATH": os.pathsep.join(paths)}
    made = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    printed = re.findall(r"\{'\w+': [\d.]+.*?\}", made.stdout)
    numbers = ast.literal_eval(printed[0]) if printed and not made.returncode else {}
    return numbers, spent() - before, made.stdout + made.stderr


def reason(heading: str, output: str) -> str:
    """Returns why a program printed no numbers: its last error, and what needs a network."""
    errors = re.findall(r"^(?:E +)?(\w*(?:Error|ERROR|Exception)\b.*)", output, re.MULTILINE)
    line = errors[-1] if errors else "no numbers"
    if not OFFLINE.search(output):
        return line
    return f"no network; {FETCHES.get(heading, line)}"


def version(heading: str) -> str | None:
    """Returns the versions of packages or the commit of a repository; None if one is missing."""
    names = ROWS[heading][0]
    if not names.isupper():
        try:
            return ", ".join(map(importlib.metadata.version, names.split()))
        except importlib.metadata.PackageNotFoundError:
            return None
    folder = os.environ.get(names)
    if not folder:
        return None
    command = ["git", "-C", folder, "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "a copy"


def main(headings: list[str], real: bool) -> int:
    """Prints a row for every heading, by default all; returns the number of rows that failed."""
    print("| | version | lines | seconds | before | after | date |\n|---|---|---|---|---|---|---|")
    failed = 0
    for heading in headings or ROWS:
        own, code, test = version(heading), program(heading, real), ROWS[heading][1]
        if own is None:
            print(f"{heading}: not installed", file=sys.stderr)
            continue
        lines = sum(bool(OWN.search(line)) for line in code.splitlines())
        command = [sys.executable, "-W", "ignore", "-c", code]
        if test:
            test = f"{test.split('::')[0]}::{REAL_TEST}" if real else test
            path = f"{ROOT}/tests/integrations/{test}"
            command = [sys.executable, "-m", "pytest", "-n", "0", "-s", path]
        with tempfile.TemporaryDirectory() as folder:
            numbers, seconds, output = measured(command, str(ROOT) if test else folder)
        if not numbers:
            print(f"{heading}: {reason(heading, output)}", file=sys.stderr)
            failed += 1
            continue
        before, *after = (f"{name} {100 * value:.1f}" for name, value in numbers.items())
        day = time.strftime("%Y-%m-%d")
        row = (heading, own, lines, f"{seconds:.0f}", before, ", ".join(after), day)
        print("|", " | ".join(map(str, row)), "|", flush=True)
    return failed


if __name__ == "__main__":
    chosen = [argument for argument in sys.argv[1:] if argument != "--real"]
    sys.exit(bool(main(chosen, "--real" in sys.argv)))
