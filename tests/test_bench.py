"""Records of the league: what they carry, what does not add up, images for the code of others."""

import base64
import dataclasses
import functools
import itertools
import json
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fdc_jax
from fdc_jax import bench, evaluation
from fdc_jax.data import sources
from fdc_jax.data.dataset import listed
from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_json
from fdc_jax.run import configuration
from scripts import league_page
from tests import small_runs

REPOSITORY = Path(__file__).resolve().parents[1]
FACTS = {
    **{"method": "guess", "calibrator": "raw", "code": "somebody/toolbox", "commit": "0123abcd"},
    **{"changes": "none", "seed": 3, "passes": 2, "processor_seconds": 1.5, "versions": {}},
}


def numbers(text):
    """Decodes packed numbers without the package."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u2").astype(int)


@pytest.fixture
def records(whole, tmp_path):
    """A folder of the records of a small run."""
    assert bench.main([str(whole), f"--output={tmp_path / 'records'}", "--quiet"]) == 0
    return tmp_path / "records"


def test_records_of_a_run_say_what_it_measured(whole, records, capsys):
    results, columns = small_runs.results(whole), small_runs.predictions(whole)
    for name in ("raw", "fdc", "gaussians"):
        record = json.loads((records / f"cumulative_lora-{name}-1.json").read_text())
        assert record["accuracy"] == pytest.approx(results["accuracy"][name], abs=1e-9)
        assert record["routing_accuracy"] == pytest.approx(results["routing_accuracy"][name])
        assert record["curve"] == [point["accuracy"][name] for point in results["curve"]]
        assert record["task_recall"]["1"] == pytest.approx(record["routing_accuracy"])
        assert record["task_recall"]["2"] == 100.0  # of two tasks
        np.testing.assert_array_equal(
            numbers(record["predictions"]["label"]), columns[f"{name}_label"]
        )
        assert len(record["predictions"]["label_after"]) == len(record["curve"]) == 2
        assert record["passes"] == (1 if name == "raw" else 2)
        assert record["processor_seconds"] > 0
        assert record["storage_bytes"] == results["storage_bytes"].get(name, 0)
    assert bench.main([f"--check={records}"]) == 0
    assert capsys.readouterr().out == "3 records add up\n"


def worse(text):
    """Packed labels of which one, a right one of class 0, is another."""
    found = numbers(text)
    found[np.argmax(found == 0)] += 1
    return evaluation.pack(found)


def test_another_record_is_not_written_over(records, whole, tmp_path, capsys):
    given = [str(whole), f"--output={records}"]
    assert bench.main(given) == 0
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"commit": "of somebody"}))
    assert bench.main([*given, f"--facts={facts}"]) == 2
    assert "cumulative_lora-raw-1.json: is another record" in capsys.readouterr().err
    kept = json.loads((records / "cumulative_lora-raw-1.json").read_text())
    assert kept["commit"] != "of somebody"
    # Nor is it learned first.
    learn = ["--learner=cumulative_lora", f"--workdir={tmp_path / 'new'}", f"--output={records}"]
    assert bench.main(learn) == 2
    assert "another record of this method and seed; remove it" in capsys.readouterr().err
    facts.write_text(json.dumps({"calibrator": "fdc"}))
    assert bench.main([*learn, f"--facts={facts}"]) == 2
    assert "cumulative_lora-fdc-1.json: is another record" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_facts_may_be_of_one_calibrator(whole, tmp_path, capsys):
    facts = tmp_path / "facts.json"
    facts.write_text(
        json.dumps({"calibrator": "fdc", "rate": "3", "rates": {"3": 70.0}, "search_seconds": 5.0})
    )
    given = [str(whole), f"--output={tmp_path / 'records'}", f"--facts={facts}"]
    assert bench.main(given) == 0
    (record,) = bench.read(tmp_path / "records").values()
    assert (record["calibrator"], record["rate"]) == ("fdc", "3")
    facts.write_text(json.dumps({"calibrator": "ridge"}))
    assert bench.main(given) == 2
    said = "--facts: calibrator: expected one of raw, fdc, gaussians"
    assert said in capsys.readouterr().err


def test_a_record_says_settings_that_are_not_the_leagues(records, whole):
    changes = json.loads((records / "cumulative_lora-raw-1.json").read_text())["changes"]
    assert changes.startswith("Settings: ") and changes.endswith(".")
    config = fdc_jax.open_run(whole).config
    for field in ("encoder.image_size", "train.epochs"):
        assert f"{field} {config[field]}" in changes
    assert "seed" not in changes and "slca" not in changes and "data.source" not in changes
    league = configuration.flatten(configuration.load("league"))
    assert bench._changes(league | {"learner.slca.head_rate": 0.1, "seed": [7]}) == ""
    slca = league | {"learner.name": "slca", "learner.slca.head_rate": 0.1}
    assert bench._changes(slca) == "Settings: learner.slca.head_rate 0.1."
    own = league | {
        "learner.name": "a.package.mine",
        "learner.mine.pull": 2,
        "save_features": "all",
    }
    assert bench._changes(own) == "Settings: learner.mine.pull 2."


def test_what_a_run_knows_is_not_a_fact(whole, tmp_path, capsys):
    (tmp_path / "facts.json").write_text(json.dumps({"seed": 7}))
    given = [str(whole), f"--output={tmp_path / 'records'}", f"--facts={tmp_path / 'facts.json'}"]
    assert bench.main(given) == 2
    assert "facts.json: expected one of method, calibrator" in capsys.readouterr().err
    assert not (tmp_path / "records").exists()


def test_the_record_that_differs_from_most_is_named(records, capsys):
    path = records / "cumulative_lora-fdc-1.json"  # the first by name
    path.write_text(json.dumps(json.loads(path.read_text()) | {"class_order": [*"jihgfedcba"]}))
    assert bench.main([f"--check={records}"]) == 2
    like = records / "cumulative_lora-gaussians-1.json"
    assert f"{path}: class_order: not as in {like}" in capsys.readouterr().err


def packed(values, more):
    """Packed numbers with something behind them."""
    content = zlib.compress(np.array(values, "<u2").tobytes()) + more
    return base64.b64encode(content).decode()


def ends(record, text):
    """Replaces the labels at the end, which a record has twice."""
    record["predictions"]["label"] = record["predictions"]["label_after"][-1] = text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda it: it.update(accuracy=it["accuracy"] + 0.01), "accuracy: expected"),
        (lambda it: it.update(routing_accuracy=it["routing_accuracy"] - 1), "routing_accuracy"),
        (lambda it: it["task_recall"].update({"2": 99.0}), "task_recall: expected"),
        (lambda it: it["task_recall"].pop("5"), "task_recall: expected"),
        (lambda it: it["predictions"].pop("task_rank"), "task_recall: expected None by"),
        (lambda it: it["curve"].pop(), "curve: expected a number for each task"),
        (lambda it: it["curve"].__setitem__(0, 50.0), "curve: expected"),
        (lambda it: ends(it, worse(it["predictions"]["label"])), "accuracy"),
        (lambda it: ends(it, it["predictions"]["label"][:-8]), "label: "),
        (lambda it: ends(it, evaluation.pack([0] * 59)), "expected 60 numbers"),
        (lambda it: ends(it, evaluation.pack([10] * 60)), "60 numbers below 10"),
        (lambda it: ends(it, "~"), "not packed numbers"),
        (lambda it: it["predictions"].update(label=3), "predictions: label: expected text"),
        (lambda it: it.update(predictions=[]), "predictions: expected an object"),
        (lambda it: it.update(seed="../1"), "seed: expected a whole number"),
        (
            lambda it: it.update(curve={"0": 1.0}),
            "curve: expected a list of which",
        ),
        (lambda it: it.update(classes_per_task=[5, "5"]), "classes_per_task: expected a list"),
        (lambda it: it.update(passes=True), "passes: expected a whole number"),
        (lambda it: it.update(processor_seconds="9"), "processor_seconds: expected a number"),
        (lambda it: it.update(processor_seconds=float("nan")), "expected a number from 0 on"),
        (lambda it: it.update(storage_bytes=-3), "storage_bytes: expected a whole number from 0"),
        (lambda it: it.update(method="a|b"), "method: expected letters"),
        (lambda it: it.update(code="mine"), "code: expected fdc_jax or OWNER/REPOSITORY"),
        (lambda it: it.update(code="a/"), "code: expected fdc_jax or OWNER/REPOSITORY"),
        (lambda it: it.update(calibrator="mine"), "calibrator: expected one of raw"),
        (lambda it: it.update(changes="<!-- end -->"), "changes: expected one line of plain"),
        (lambda it: it.update(changes="<script>"), "changes: expected one line of plain"),
        (lambda it: it["curve"].__setitem__(0, 1e9), "curve and rates: expected percent"),
        (lambda it: it["test_images"].__setitem__(0, 0), "expected some of each task and class"),
        (lambda it: it["test_images"].__setitem__(0, 10**12), "expected some of each task and"),
        (
            lambda it: it["predictions"]["label_after"].__setitem__(0, evaluation.pack([9] * 30)),
            "label_after.0: expected 30 numbers below 5",
        ),
        (lambda it: ends(it, packed([0] * 60, b"more")), "not packed numbers"),
        (lambda it: it["task_recall"].update({"1": "all"}), "task_recall: expected an object of"),
        (lambda it: it["test_images"].pop(), "not of as many classes"),
        (lambda it: it.update(weights="another"), "weights: not as in"),
        (lambda it: it.update(calibrator="fdc"), "code, method, calibrator and seed are those of"),
        (
            lambda it: it["predictions"].update(
                label_after=[evaluation.pack([0] * n) for n in (30, 60)]
            ),
            "label: expected the last of label_after",
        ),
        (lambda it: it.pop("commit"), "expected commit"),
        (lambda it: it.update(acuracy=1.0), "found 'acuracy'; did you mean accuracy"),
        (lambda it: it["predictions"].update(task_ranks=""), "did you mean task_rank"),
        (lambda it: it.update(rates={"1": "70"}), "rates: expected an object of which each"),
        (lambda it: it.update(rates={"1": 70}, rate="1"), "rates: expected search_seconds, too"),
        (lambda it: it.update(rates={"1": 70}, rate="3", search_seconds=1), "among them the rate"),
        (
            lambda it: it.update(rates={"1": 70, "3": 75}, rate="1", search_seconds=1),
            "rate: expected the best of rates, found 1",
        ),
        (lambda it: it.update(changes="a\n## b"), "changes: expected one line of plain"),
    ],
)
def test_a_record_that_does_not_add_up_is_refused(records, change, said, capsys):
    path = records / "cumulative_lora-gaussians-1.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    assert bench.main([f"--check={records}"]) == 2
    error = capsys.readouterr().err
    assert f"{path}: " in error and said in error


@pytest.fixture
def images(tmp_path, cache, monkeypatch):
    """The images of a small protocol as files."""
    monkeypatch.setattr(configuration, "load", lambda *_: small_runs.config(cache))
    assert bench.main([f"--images={tmp_path / 'images'}", "--quiet"]) == 0
    return tmp_path / "images"


def test_predictions_of_other_code_on_the_images(images, whole, tmp_path):
    """Rows and labels follow from the names of files and folders alone."""
    files = sorted(images.glob("test/*/*.png"))
    label = np.array([int(file.parent.name[:3]) for file in files])
    np.testing.assert_array_equal(label, small_runs.predictions(whole)["label"])
    assert len(list(images.glob("train/*/*.png"))) == 120

    run = fdc_jax.open_run(whole)
    at = run.tasks.test_indices[7]
    np.testing.assert_array_equal(
        np.asarray(Image.open(files[7]).convert("RGB")), np.asarray(run.tasks.test.image(int(at)))
    )
    guess = np.where(np.arange(60) % 3, label, (label + 5) % 10)
    scores = np.eye(2)[guess // 5]
    dump = {"label_0": label[:30], "label_1": guess, "task_scores": scores}
    np.savez(tmp_path / "dump.npz", **dump)
    (tmp_path / "facts.json").write_text(json.dumps(FACTS))
    given = [str(tmp_path / "dump.npz"), f"--images={images}", f"--facts={tmp_path / 'facts.json'}"]
    assert bench.main([*given, f"--output={tmp_path / 'records'}", "--quiet"]) == 0
    record = json.loads((tmp_path / "records" / "guess-raw-somebody_toolbox-3.json").read_text())
    assert record["accuracy"] == pytest.approx(200 / 3)
    assert record["curve"] == pytest.approx([100.0, 200 / 3])
    assert record["task_recall"] == pytest.approx({"1": 200 / 3, "2": 100, "3": 100, "5": 100})
    assert {name: record[name] for name in FACTS} == FACTS
    assert record["data"] == small_runs.results(whole)["data"]
    files[0].write_bytes(b"")
    with pytest.raises(InputError, match="is not what was written; write the images again"):
        bench.of_dump(tmp_path / "dump.npz", images, FACTS)


def test_images_that_cannot_be_written_are_refused_before_any_is(images, tmp_path, capsys):
    assert bench.main([f"--images={images}"]) == 2
    assert "expected a new folder, found one" in capsys.readouterr().err
    assert bench.main([f"--images={tmp_path / 'new'}", "--config.train.epoch=7"]) == 2
    assert "did you mean --config.train.epochs?" in capsys.readouterr().err
    assert bench.main([f"--images={tmp_path / 'new'}", "--config.train.epochs=-1"]) == 2
    assert "config.train.epochs: expected" in capsys.readouterr().err


def test_images_are_written_in_the_order_of_a_file(images, tmp_path):
    names = json.loads((images / "protocol.json").read_text())["class_order"][::-1]
    (tmp_path / "order.txt").write_text("\n".join(names))
    fields = [f"--config.class_order={tmp_path / 'order.txt'}", "--config.class_order_seed=-1"]
    assert bench.main([f"--images={tmp_path / 'new'}", "--quiet", *fields]) == 0
    assert json.loads((tmp_path / "new" / "protocol.json").read_text())["class_order"] == names
    assert (tmp_path / "new" / "test" / f"000_{names[0]}").is_dir()


@pytest.mark.parametrize(
    ("arrays", "facts", "said"),
    [
        ({"label_0": None}, FACTS, "dump.npz: expected label_0, found label_1"),
        ({"label_1": [0] * 59}, FACTS, "dump.npz: label_1: expected 60 whole numbers from 0"),
        ({"task_scores": [[0, 1]] * 59}, FACTS, "expected shape (60, 2), found (59, 2)"),
        ({"label_1": [0.9] * 60}, FACTS, "label_1: expected 60 whole numbers from 0 to 9"),
        ({"label_1": [65536] * 60}, FACTS, "label_1: expected 60 whole numbers from 0 to 9"),
        ({"label_1": [-1] * 60}, FACTS, "label_1: expected 60 whole numbers from 0 to 9"),
        (
            {"label_0": [7] * 30},
            FACTS,
            "label_0: expected 30 whole numbers from 0 to 4, found int64 (30,), 7 to 7",
        ),
        ({"task_scores": [["a", "b"]] * 60}, FACTS, "expected finite numbers"),
        ({}, [], "facts.json: expected an object"),
        ({"task_scores": [[0, np.nan]] * 60}, FACTS, "expected finite numbers"),
        ({"task_score": [[0, 1]] * 60}, FACTS, "did you mean task_scores"),
        ({}, FACTS | {"code": "fdc_jax"}, "--facts: code: expected a repository"),
        ({}, FACTS | {"accuracy": 99.0}, "facts.json: expected one of method, calibrator"),
        ({}, FACTS | {"sead": 1}, "facts.json: expected one of method, calibrator"),
        ({}, {}, "expected calibrator, changes, code, commit, method"),
    ],
)
def test_a_dump_that_says_too_little_is_refused(images, arrays, facts, said, tmp_path, capsys):
    arrays = {"label_0": [0] * 30, "label_1": [0] * 60} | arrays
    given = {name: each for name, each in arrays.items() if each is not None}
    np.savez(tmp_path / "dump.npz", **given)
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    given = [str(tmp_path / "dump.npz"), f"--images={images}", f"--facts={tmp_path / 'facts.json'}"]
    assert bench.main([*given, f"--output={tmp_path / 'records'}"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"manifest": "[]"}, "manifest.json: expected checksums; write the images again"),
        ({"manifest": '{"sha256": {}, "sha256": {}}'}, "a name occurs twice among sha256"),
        ({"protocol": "{}"}, "protocol.json: is not what was written"),
        ({"manifest": '{"sha256": {}}', "protocol": "{}"}, "protocol.json: expected class_order"),
        ({"manifest": '{"sha256": {}}', "protocol": "[]"}, "protocol.json: expected an object"),
    ],
)
def test_a_damaged_folder_of_images_is_refused(images, tmp_path, files, said):
    np.savez(tmp_path / "dump.npz", label_0=[0] * 30, label_1=[0] * 60)
    for name, content in files.items():
        (images / f"{name}.json").write_text(content)
    with pytest.raises(InputError, match=said):
        bench.of_dump(tmp_path / "dump.npz", images, FACTS)


def test_a_record_of_another_protocol_is_not_put_beside_others(records, tmp_path):
    record = read_json(records / "cumulative_lora-raw-1.json") | {"seed": 2, "weights": "other"}
    with pytest.raises(InputError, match=r"records: weights: expected that of .*-fdc-1\.json"):
        bench.write(record, records)
    assert len(list(records.iterdir())) == 3
    (records / "a.json").write_text("[]")
    with pytest.raises(InputError, match=r"a\.json: expected a JSON object, found a list"):
        bench.write(record, records)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--check=records", "--seed=0"], "check records: does not go with --seed"),
        (["--check=records", "--learner=slca"], "check records: does not go with --learner"),
        (["run", "--config.seed=2", "--workdir=x"], "source run: does not go with --config"),
        (["--learner=slca", "--images=x"], "learner slca: does not go with --images"),
        (["--images=x", "--output=y"], "images x: does not go with --output"),
        (["--check="], "--check=: expected a value for each flag"),
        (["--images=x", "--config.seed", "2"], "--config.seed 2: expected a value for each flag"),
        (["dump.NPZ"], "expected a work directory, an .npz with --images, or --learner"),
        ([], "expected a work directory, an .npz with --images, or --learner"),
    ],
)
def test_what_would_be_ignored_is_refused(given, said, capsys):
    assert bench.main(given) == 2
    assert said in capsys.readouterr().err


def test_tasks_of_equal_scores_do_not_count_as_right():
    scores = np.array([[1.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    assert bench.task_rank(np.vstack([scores, [0, 0, 1]]), np.array([0, 0, 2])).tolist() == [
        1,
        0,
        0,
    ]


def test_a_learner_is_run_by_the_run_command(whole, tmp_path, monkeypatch):
    def run(stop, words):
        said.append(words)
        shutil.copytree(whole, tmp_path / "run")
        return 0

    said = []
    monkeypatch.setattr(bench.command, "main", run)
    given = ["--learner=rsiat", "--seed=2", f"--workdir={tmp_path / 'run'}"]
    fields = ["--config.encoder.weights=here.npz"]
    assert bench.main([*given, *fields, f"--output={tmp_path / 'records'}", "--quiet"]) == 0
    assert {"--config=league", "--config.learner.name=rsiat", "--config.seed=2", *fields} < {
        *said[0]
    }
    assert len(bench.read(tmp_path / "records")) == 3


def test_the_protocol_is_the_one_of_the_records():
    config = configuration.load("league")
    chosen = read_json(REPOSITORY / f"fdc_jax/assets/{config.data.images}_images.json")
    for record in bench.read(REPOSITORY / "results" / "league").values():
        assert record["classes_per_task"] == [config.classes_per_task] * 20
        counts = [len(chosen["test"][name]) for name in record["class_order"]]
        assert record["test_images"] == counts == [20] * 100
        assert [len(chosen["train"][name]) for name in record["class_order"]] == [60] * 100


def test_the_pages_shell_programs_divide_images_as_it_says(tmp_path):
    page = (REPOSITORY / "docs" / "league.md").read_text()
    held, photographs = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
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
    for split, numbers in (("train", range(50)), ("test", range(50, 60))):
        files = sorted((tmp_path / "held" / split).rglob("*.png"))
        expected = [f"{label}, {number}" for label in range(25) for number in numbers]
        assert [file.read_text() for file in files] == expected
    assert len(read_json(tmp_path / "held" / "protocol.json")["classes_per_task"]) == 5
    for split, numbers in (("train", range(1, 31)), ("test", range(31, 51))):
        folder = tmp_path / "photographs" / split
        assert sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.jpg")) == [
            f"{name}/image_{number:04d}.jpg" for name in ("watch", "yin_yang") for number in numbers
        ]


def test_photographs_are_of_the_protocol_that_the_page_states():
    records = bench.read(REPOSITORY / "results" / "league_photographs").values()
    for record in records:
        assert (record["classes_per_task"], record["test_images"]) == ([6] * 11, [20] * 66)


def test_trained_encoders_learned_the_orders_of_the_frozen_ones():
    """And the table's line of a row has the accuracies and means of its three records."""
    results = REPOSITORY / "results"
    orders = read_json(results / "league_orders.json")["orders"]
    assert list(orders) == ["similar", "dissimilar"]
    table = (REPOSITORY / "docs" / "league.md").read_text().partition("<!-- made: trained -->")[2]
    for path in (results / "league_similar").glob("*.json"):
        records = [read_json(results / name / path.name) for name in ("league", "league_similar")]
        records.append(read_json(results / "league_dissimilar" / path.name))
        for record, places in zip(records[1:], orders.values(), strict=True):
            assert record["class_order"] == [records[0]["class_order"][at] for at in places]
        assert len({record["rate"] for record in records}) == 1
        numbers = [record["accuracy"] for record in records]
        numbers += [np.mean(record["curve"]) for record in records]
        assert f"| {' | '.join(f'{number:.2f}' for number in numbers)} |" in table


def test_one_pass_is_compared_with_the_first_row_by_test_image():
    records = bench.read(REPOSITORY / "results" / "league").values()
    rows: dict = {}
    for each in records:
        rows.setdefault((each["code"], each["method"], each["calibrator"]), []).append(each)
    best = max(rows.values(), key=lambda row: np.mean([each["accuracy"] for each in row]))
    label = bench.truth(best[0])[0]
    first = np.array([numbers(each["predictions"]["label"]) == label for each in best]) * 100
    text = (REPOSITORY / "docs" / "league.md").read_text()
    for row in read_json(REPOSITORY / "results" / "league_one_pass.json")["rows"]:
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
    for folder, least in (("league", 0.02), ("league_photographs", 0.01)):
        for row in league_page.read(folder):
            labels = [numbers(each["predictions"]["label"]) for each in row]
            for one, other in itertools.combinations(labels, 2):
                assert np.mean(one != other) > least, league_page.key(row[0])


def test_three_rates_were_tried():
    for record in bench.read(REPOSITORY / "results" / "league").values():
        if "rates" in record:
            assert {*record["rates"]} == {"1/3", "1", "3"}


@pytest.mark.ci
def test_the_images_are_those_of_the_records_in_any_copy(shared_asset, tmp_path):
    record = next(iter(bench.read(REPOSITORY / "results" / "league").values()))
    prepared = str(shared_asset("tensorflow_datasets"))
    for split in sources.open_splits("cifar100", tmp_path, data_dir=prepared):
        rows, hashes = np.random.default_rng(0).permutation(len(split)), split.pixel_hashes()
        moved = [hashes[row] for row in rows]
        other = dataclasses.replace(
            split,
            labels=split.labels[rows],
            ids=tuple(map(str, range(len(rows)))),
            pixel_hashes=functools.partial(list, moved),
        )
        assert listed(other, "league").checksum == record["data"][f"{split.split}_sha256"]


def test_the_raw_head_of_other_code_is_its_own():
    heads = [
        league_page.head([{"code": code, "calibrator": name}])
        for code in ("fdc_jax", "a/b")
        for name in ("raw", "gaussians")
    ]
    assert heads == ["Raw", "class Gaussians", "own", "class Gaussians"]


def test_a_method_without_a_title_is_refused():
    with pytest.raises(InputError, match=r"league_methods\.json: expected an entry for guess"):
        league_page.title("guess", {})
    for entry in ({"title": "Guess"}, {"title": "Guess", "what": "Guesses.", "comand": "x"}):
        with pytest.raises(InputError, match=r"guess: expected title, what and perhaps authors, c"):
            league_page.title("guess", {"guess": entry})


def test_the_page_is_made_from_the_records():
    """Of the figure, whose digits depend on the machine's fonts, what it says."""
    text, figure = league_page.page()
    assert (REPOSITORY / "docs" / "league.md").read_text() == text
    assert figure.startswith("<?xml")
    assert text.count("All classes are ranked, not the best alone.") == 1


def test_code_that_runs_by_itself_says_what_it_changed_and_how_it_is_run(monkeypatch, tmp_path):
    """And what the code that the program runs has in common still stands on the page once."""
    own = read_json(REPOSITORY / "results" / "league" / "ease-raw-lamda_cl_lamda_pilot-1.json")
    own |= {"method": "guess", "code": "somebody/toolbox", "changes": "Pixels alone.", "rates": {}}
    read = league_page.read
    monkeypatch.setattr(league_page, "read", lambda it: read(it) + [[own]] * (it == "league"))
    known = json.loads(league_page.ABOUT.read_text())
    about = {"title": "Guess", "what": "Guesses.", "command": "python guess.py IMAGES DUMP.npz"}
    monkeypatch.setattr(league_page, "ABOUT", tmp_path / "methods.json")
    league_page.ABOUT.write_text(json.dumps(known | {"guess": about}))
    text = league_page.page()[0]
    assert text.count("All classes are ranked, not the best alone.") == 1
    said = text.partition("### Guess\n")[2]
    assert "Code: somebody/toolbox at `5240714`. Pixels alone." in said
    assert f"`{about['command']}`\n" in said


def test_every_method_of_a_table_has_a_section(monkeypatch):
    """One of photographs alone, too."""
    read = league_page.read
    shown = {"league": ("e2_lora", "rsiat", "slca"), "league_photographs": ("rsiat", "simplecil")}
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
