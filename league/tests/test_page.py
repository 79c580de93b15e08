"""The league's page: made from the records, and true to the protocol that it states."""

import itertools
import json
import re
import subprocess

import numpy as np
import pytest

from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_json
from fdc_jax.run import configuration
from league import page as league_page
from league import records, settings
from league.page import PAGE, RECORDS, ROOT
from league.tests.test_records import numbers


def test_the_protocol_is_the_one_of_the_records():
    config, chosen = settings.get_config(), read_json(ROOT / "images.json")
    for record in records.read(RECORDS / "cifar100").values():
        assert record["classes_per_task"] == [config.classes_per_task] * 20
        counts = [len(chosen["test"][name]) for name in record["class_order"]]
        assert record["test_images"] == counts == [20] * 100
        assert [len(chosen["train"][name]) for name in record["class_order"]] == [60] * 100
        assert record["weights"] == settings.WEIGHTS_SHA256


def test_the_pages_shell_programs_divide_images_as_it_says(tmp_path):
    page = PAGE.read_text()
    held, photographs = re.findall(r"```sh\n(for .*?)```", page, re.DOTALL)
    for label in range(26):
        for number in range(60):
            path = tmp_path / f"FOLDER/train/{label:03d}_c/{number:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{label}, {number}")
    sizes = {"watch": 61, "yin_yang": 50, "wrench": 49, "Faces_easy": 60, "BACKGROUND_Google": 60}
    for name, size in sizes.items():
        for number in range(1, size + 1):
            path = tmp_path / f"101_ObjectCategories/{name}/image_{number:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    for program in (held, photographs):
        subprocess.run(["sh", "-c", program], cwd=tmp_path, check=True)
    for split, chosen in (("train", range(50)), ("test", range(50, 60))):
        files = sorted((tmp_path / "held" / split).rglob("*.png"))
        expected = [f"{label}, {number}" for label in range(25) for number in chosen]
        assert [file.read_text() for file in files] == expected
    assert len(read_json(tmp_path / "held" / "protocol.json")["classes_per_task"]) == 5
    for split, chosen in (("train", range(1, 31)), ("test", range(31, 51))):
        folder = tmp_path / "photographs" / split
        assert sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.jpg")) == [
            f"{name}/image_{number:04d}.jpg" for name in ("watch", "yin_yang") for number in chosen
        ]


def test_photographs_are_of_the_protocol_that_the_page_states():
    for record in records.read(RECORDS / "photographs").values():
        assert (record["classes_per_task"], record["test_images"]) == ([6] * 11, [20] * 66)


def test_trained_encoders_learned_the_orders_of_the_frozen_ones():
    """And the table's line of a row has the accuracies and means of its three records."""
    orders = read_json(ROOT / "orders.json")["orders"]
    assert list(orders) == ["similar", "dissimilar"]
    table = PAGE.read_text().partition("<!-- made: trained -->")[2]
    for path in (RECORDS / "similar").glob("*.json"):
        folders = ("cifar100", "similar", "dissimilar")
        trained = [read_json(RECORDS / name / path.name) for name in folders]
        for record, places in zip(trained[1:], orders.values(), strict=True):
            assert record["class_order"] == [trained[0]["class_order"][at] for at in places]
        assert len({record["rate"] for record in trained}) == 1
        numbers = [record["accuracy"] for record in trained]
        numbers += [np.mean(record["curve"]) for record in trained]
        assert f"| {' | '.join(f'{number:.2f}' for number in numbers)} |" in table


def test_one_pass_is_compared_with_the_first_row_by_test_image():
    rows: dict = {}
    for each in records.read(RECORDS / "cifar100").values():
        rows.setdefault((each["code"], each["method"], each["calibrator"]), []).append(each)
    best = max(rows.values(), key=lambda row: np.mean([each["accuracy"] for each in row]))
    label = records.truth(best[0])[0]
    first = np.array([numbers(each["predictions"]["label"]) == label for each in best]) * 100
    text = PAGE.read_text()
    for row in read_json(ROOT / "one_pass.json")["rows"]:
        right = np.array([numbers(each) == label for each in row["labels"]]) * 100
        above = right.mean(axis=0) - first.mean(axis=0)
        interval = 1.96 * above.std(ddof=1) / len(above) ** 0.5
        means = right.mean(axis=1)
        accuracy = f"{means.mean():.2f}"
        if len(means) > 1:
            accuracy += f" ± {means.std(ddof=1):.2f}"
        seeds = ", ".join(map(str, row["seeds"]))
        assert f"| {seeds} | {accuracy} | {above.mean():+.2f} ± {interval:.2f} |" in text


def test_seeds_of_a_row_are_trainings_of_their_own():
    """Code that ignores its seed repeats 99.75 % of labels; good heads on photographs, 98.9 %."""
    for folder, least in (("cifar100", 0.02), ("photographs", 0.01)):
        for row in league_page.read(folder):
            labels = [numbers(each["predictions"]["label"]) for each in row]
            for one, other in itertools.combinations(labels, 2):
                assert np.mean(one != other) > least, league_page.key(row[0])


def test_three_rates_were_tried():
    for record in records.read(RECORDS / "cifar100").values():
        if "rates" in record:
            assert {*record["rates"]} == {"1/3", "1", "3"}


def test_the_raw_head_of_other_code_is_its_own():
    heads = [
        league_page.head([{"code": code, "calibrator": name}])
        for code in ("fdc_jax", "a/b")
        for name in ("raw", "gaussians")
    ]
    assert heads == ["Raw", "class Gaussians", "own", "class Gaussians"]


def test_a_method_without_a_title_is_refused():
    with pytest.raises(InputError, match=r"methods\.json: expected an entry for guess"):
        league_page.title("guess", {})
    for entry in ({"title": "Guess"}, {"title": "Guess", "what": "Guesses.", "comand": "x"}):
        with pytest.raises(InputError, match=r"guess: expected title, what and perhaps authors, c"):
            league_page.title("guess", {"guess": entry})


def test_the_page_is_made_from_the_records():
    """Of the figure, whose digits depend on the machine's fonts, what it says."""
    text, figure = league_page.page()
    assert PAGE.read_text() == text
    assert figure.startswith("<?xml")
    assert text.count("All classes are ranked, not the best alone.") == 1


def test_code_that_runs_by_itself_says_what_it_changed_and_how_it_is_run(monkeypatch, tmp_path):
    """And what the code that the program runs has in common still stands on the page once."""
    own = read_json(RECORDS / "cifar100" / "ease-raw-lamda_cl_lamda_pilot-1.json")
    own |= {"method": "guess", "code": "somebody/toolbox", "changes": "Pixels alone.", "rates": {}}
    read = league_page.read
    monkeypatch.setattr(league_page, "read", lambda it: read(it) + [[own]] * (it == "cifar100"))
    known = json.loads(league_page.METHODS_FILE.read_text())
    about = {"title": "Guess", "what": "Guesses.", "command": "python guess.py IMAGES DUMP.npz"}
    monkeypatch.setattr(league_page, "METHODS_FILE", tmp_path / "methods.json")
    league_page.METHODS_FILE.write_text(json.dumps(known | {"guess": about}))
    text = league_page.page()[0]
    assert text.count("All classes are ranked, not the best alone.") == 1
    said = text.partition("### Guess\n")[2]
    assert "Code: somebody/toolbox at `5240714`. Pixels alone." in said
    assert f"`{about['command']}`\n" in said


def test_every_method_of_a_table_has_a_section(monkeypatch):
    """One of photographs alone, too."""
    read = league_page.read
    shown = {"cifar100": ("e2_lora", "rsiat", "slca"), "photographs": ("rsiat", "simplecil")}
    monkeypatch.setattr(
        league_page,
        "read",
        lambda folder: [
            row for row in read(folder) if row[0]["method"] in shown.get(folder, ("e2_lora",))
        ],
    )
    text = league_page.page()[0]
    *first, last = re.findall("^### (.*)", text, re.MULTILINE)
    assert ({*first}, last) == ({"E2-LoRA", "RSIAT", "SLCA"}, "SimpleCIL")
    assert "86.67 |  | 91.09 |" in text.partition("### SimpleCIL")[2]


def test_links_and_fields_of_the_page_exist():
    text = PAGE.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    fields = re.findall(r"--config\.([\w.]+)=", text)
    assert fields and {*fields} <= configuration.flatten(settings.get_config()).keys()
