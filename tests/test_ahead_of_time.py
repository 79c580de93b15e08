"""The tables of docs/studies/ahead_of_time.md against the files in results/ahead_of_time/."""

import pytest

from fdc_jax import learners
from tests.test_numbers import REPOSITORY, saved, table_under

PAGE = "docs/studies/ahead_of_time.md"
FILES = sorted((REPOSITORY / "results" / "ahead_of_time").glob("*.json"))
EPOCHS = 20
GIB = 2**30
# Numbers of passes over the images of a task, by program.
PASSES = {
    "ewc_lora": {"squared_gradients": 1},
    "splitlora": {"attention_moments": 1},
    "inflora": {"attention_moments": 2},
    "inflora_ca": {"attention_moments": 2, "extraction": 1},
    "lora_subtraction": {"attention_moments": 1, "extraction": 1},
    "loda": {"attention_moments": 3},
    "rsiat": {"extraction": 2},
    "slca": {"extraction": 1},
    "e2_lora": {"extraction": 1},
}
NAMES = {
    "attention_moments": "second moments",
    "squared_gradients": "squared gradients",
    "extraction": "features of classes",
}


def records(*names):
    """Returns the records of one device in files, by program and batch size."""
    by_program = {}
    for name in names:
        for record in saved(f"ahead_of_time/{name}")["records"]:
            if record["devices"] == 1:
                by_program[record["program"], record["batch_size"]] = record
    return by_program


V5E = records("v5e", "v5e_256")
MILLISECONDS = {program: V5E[program, 64]["milliseconds"] for program, size in V5E if size == 64}
TRAINED = [name for name in learners.names(trained=True) if name in MILLISECONDS]


def memory(record):
    """Returns GiB of temporary memory as the page has them."""
    return f"{record['memory_bytes']['temporary'] / GIB:.2f}"


def cells(record):
    """Returns milliseconds, images per second, share of the peak and memory, as on the page."""
    images, share = record["images_per_second"], 100 * record["share_of_peak"]
    return [f"{record['milliseconds']:.1f}", f"{images:,.0f}", f"{share:.0f}", memory(record)]


def programs():
    """Returns a row per program of Cumulative-LoRA, its batch size and target."""
    rows = []
    for program, name in (("cumulative_lora", "step"), ("extraction", "extraction")):
        for size in (64, 256):
            for target, estimates in (("v5e", V5E), ("v6e", records("v6e"))):
                title = f"{name} of {size} images"
                rows.append([title, f"TPU {target}", *cells(estimates[program, size])])
    return rows


def steps():
    """Returns a row per learner, its step of 64 images on v5e."""
    return [[learners.title(name), *cells(V5E[name, 64])] for name in TRAINED]


def passes():
    """Returns a row per pass before or after a task: its estimate, and divided by the step's."""
    rows = []
    for program, name in NAMES.items():
        estimate = MILLISECONDS[program]
        quotient = f"{estimate / MILLISECONDS['cumulative_lora']:.2f}"
        seconds = f"{V5E[program, 64]['compile_processor_seconds']:.0f}"
        rows.append([name, f"{estimate:.1f}", quotient, memory(V5E[program, 64]), seconds])
    return rows


def shares():
    """Returns a row per learner with passes: how many, and their share of passes and training."""
    rows = []
    for name, numbers in PASSES.items():
        if name in TRAINED:
            extra = sum(count * MILLISECONDS[program] for program, count in numbers.items())
            share = extra / (extra + EPOCHS * MILLISECONDS[name])
            counts = [str(numbers.get(program, "")) for program in NAMES]
            rows.append([learners.title(name), *counts, f"{100 * share:.0f}"])
    return rows


def on_h100():
    """Returns a row per program, its temporary memory on one H100."""
    estimates = records("h100")
    titles = NAMES | {"extraction": "extraction"}
    rows = []
    for name in dict.fromkeys(program for program, _ in estimates):
        title = titles.get(name) or learners.title(name)
        rows.append([title, *(memory(estimates[name, size]) for size in (64, 256))])
    return rows


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("| program | target |", programs),
        ("| learner's step of 64 images |", steps),
        ("| pass over 64 images |", passes),
        ("| passes over a task |", shares),
        ("| on an H100 |", on_h100),
    ],
)
def test_tables_equal_their_files(header, expected):
    assert table_under(PAGE, header) == expected()


def test_page_names_command_and_commit_of_every_file():
    page = (REPOSITORY / PAGE).read_text()
    for path in FILES:
        record = saved(f"ahead_of_time/{path.stem}")
        assert record["command"] in page
        assert f"`{path.name}` | {record['versions']['commit'][:7]}" in page
    scoring, extraction = MILLISECONDS["scoring"], MILLISECONDS["extraction"]
    assert f"in {scoring:.3f} ms on v5e, beside {extraction:.1f} ms for" in page


def test_learners_declare_the_cost_of_their_passes():
    costs = {}
    for name, numbers in PASSES.items():
        costs[name] = numbers.get("squared_gradients", 0.0)
        costs[name] += 0.5 * (numbers.get("attention_moments", 0) + numbers.get("extraction", 0))
    declared = {name: learners.find(name).extra_passes for name in learners.names(trained=True)}
    assert costs == {name: cost for name, cost in declared.items() if cost}
