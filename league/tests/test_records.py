"""Records: what they carry, and what does not add up."""

import base64
import json
import zlib

import numpy as np
import pytest

import fdc_jax
from fdc_jax import evaluation
from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_json
from fdc_jax.run import configuration
from league import __main__ as command
from league import records, settings, submissions
from tests import small_runs


def numbers(text):
    """Decodes packed numbers without the package."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u2").astype(int)


def test_records_of_a_run_say_what_it_measured(whole, folder, capsys):
    results, columns = small_runs.results(whole), small_runs.predictions(whole)
    for name in ("raw", "fdc", "gaussians"):
        record = json.loads((folder / f"cumulative_lora-{name}-1.json").read_text())
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
    assert command.main(["check", str(folder)]) == 0
    assert capsys.readouterr().out == f"3 records in {folder} add up\n"


def worse(text):
    """Packed labels of which one, a right one of class 0, is another."""
    found = numbers(text)
    found[np.argmax(found == 0)] += 1
    return evaluation.pack(found)


def test_another_record_is_not_written_over(folder, whole, tmp_path, capsys):
    given = ["record", str(whole), f"--output={folder}"]
    assert command.main(given) == 0
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"commit": "of somebody"}))
    assert command.main([*given, f"--facts={facts}"]) == 2
    assert "cumulative_lora-raw-1.json: is another record" in capsys.readouterr().err
    kept = json.loads((folder / "cumulative_lora-raw-1.json").read_text())
    assert kept["commit"] != "of somebody"


def test_facts_may_be_of_one_calibrator(whole, tmp_path, capsys):
    facts = tmp_path / "facts.json"
    facts.write_text(
        json.dumps({"calibrator": "fdc", "rate": "3", "rates": {"3": 70.0}, "search_seconds": 5.0})
    )
    given = ["record", str(whole), f"--output={tmp_path / 'records'}", f"--facts={facts}"]
    assert command.main(given) == 0
    (record,) = records.read(tmp_path / "records").values()
    assert (record["calibrator"], record["rate"]) == ("fdc", "3")
    facts.write_text(json.dumps({"calibrator": "ridge"}))
    assert command.main(given) == 2
    said = "--facts: calibrator: expected one of raw, fdc, gaussians"
    assert said in capsys.readouterr().err


def test_a_record_says_settings_that_are_not_the_leagues(folder, whole):
    changes = json.loads((folder / "cumulative_lora-raw-1.json").read_text())["changes"]
    assert changes.startswith("Settings: ") and changes.endswith(".")
    config = fdc_jax.open_run(whole).config
    for field in ("encoder.image_size", "train.epochs"):
        assert f"{field} {config[field]}" in changes
    assert "seed" not in changes and "slca" not in changes and "data.source" not in changes
    league = configuration.flatten(settings.get_config())
    assert submissions.changes(league | {"learner.slca.head_rate": 0.1, "seed": [7]}) == ""
    slca = league | {"learner.name": "slca", "learner.slca.head_rate": 0.1}
    assert submissions.changes(slca) == "Settings: learner.slca.head_rate 0.1."
    own = league | {
        "learner.name": "a.package.mine",
        "learner.mine.pull": 2,
        "save_features": "all",
    }
    assert submissions.changes(own) == "Settings: learner.mine.pull 2."


def test_what_a_run_knows_is_not_a_fact(whole, tmp_path, capsys):
    (tmp_path / "facts.json").write_text(json.dumps({"seed": 7}))
    given = [
        "record",
        str(whole),
        f"--output={tmp_path / 'records'}",
        f"--facts={tmp_path / 'facts.json'}",
    ]
    assert command.main(given) == 2
    assert (
        "--facts: Additional properties are not allowed ('seed' was unexpected)"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "records").exists()


def test_a_record_of_another_protocol_is_named(folder, capsys):
    path = folder / "cumulative_lora-gaussians-1.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"class_order": [*"jihgfedcba"]}))
    assert command.main(["check", str(folder)]) == 2
    like = folder / "cumulative_lora-fdc-1.json"  # the first by name
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
        (
            lambda it: it["predictions"].update(label=3),
            "predictions.label: expected packed class-order positions",
        ),
        (lambda it: it.update(predictions=[]), "predictions: expected an object with label"),
        (
            lambda it: it.update(seed="../1"),
            'seed: expected the training seed, a whole number from 0, found "../1"',
        ),
        (lambda it: it.update(curve={"0": 1.0}), "curve: expected a list of percent"),
        (
            lambda it: it.update(classes_per_task=[5, "5"]),
            "classes_per_task.1: expected a list of whole numbers",
        ),
        (lambda it: it.update(passes=True), "passes: expected passes of an encoder"),
        (
            lambda it: it.update(processor_seconds="9"),
            "processor_seconds: expected processor seconds",
        ),
        (lambda it: it.update(processor_seconds=float("nan")), "a number from 0, found NaN"),
        (lambda it: it.update(storage_bytes=-3), "a whole number from 0, found -3"),
        (lambda it: it.update(method="a|b"), "method: expected letters"),
        (lambda it: it.update(code="mine"), "code: expected fdc_jax or OWNER/REPOSITORY"),
        (lambda it: it.update(code="a/"), "code: expected fdc_jax or OWNER/REPOSITORY"),
        (lambda it: it.update(calibrator="mine"), "calibrator: expected one of raw"),
        (lambda it: it.update(changes="<!-- end -->"), "changes: expected one line of plain"),
        (lambda it: it.update(changes="<script>"), "changes: expected one line of plain"),
        (lambda it: it["curve"].__setitem__(0, 1e9), "curve.0: expected a list of percent"),
        (
            lambda it: it["test_images"].__setitem__(0, 0),
            "test_images.0: expected a list of whole numbers from 1",
        ),
        (
            lambda it: it["test_images"].__setitem__(0, 10**12),
            "test_images.0: expected a list of whole numbers",
        ),
        (
            lambda it: it["predictions"]["label_after"].__setitem__(0, evaluation.pack([9] * 30)),
            "label_after.0: expected 30 numbers below 5",
        ),
        (lambda it: ends(it, packed([0] * 60, b"more")), "not packed numbers"),
        (
            lambda it: it["task_recall"].update({"1": "all"}),
            "task_recall.1: expected an object with",
        ),
        (lambda it: it["test_images"].pop(), "not of as many classes"),
        (lambda it: it.update(weights="another"), "weights: not as in"),
        (lambda it: it.update(calibrator="fdc"), "code, method, calibrator and seed are those of"),
        (
            lambda it: it["predictions"].update(
                label_after=[evaluation.pack([0] * n) for n in (30, 60)]
            ),
            "label: expected the last of label_after",
        ),
        (lambda it: it.pop("commit"), "'commit' is a required property"),
        (lambda it: it.update(acuracy=1.0), "'acuracy' was unexpected"),
        (
            lambda it: it["predictions"].update(task_ranks=""),
            "predictions: Additional properties are not allowed ('task_ranks'",
        ),
        (
            lambda it: it.update(rates={"1": "70"}),
            "rates.1: expected the held-out accuracy in percent",
        ),
        (lambda it: it.update(rates={"1": 70}, rate="1"), "rates: expected search_seconds, too"),
        (lambda it: it.update(rates={"1": 70}, rate="3", search_seconds=1), "among them the rate"),
        (
            lambda it: it.update(rates={"1": 70, "3": 75}, rate="1", search_seconds=1),
            "rate: expected the best of rates, found 1",
        ),
        (lambda it: it.update(changes="a\n## b"), "changes: expected one line of plain"),
    ],
)
def test_a_record_that_does_not_add_up_is_refused(folder, change, said, capsys):
    path = folder / "cumulative_lora-gaussians-1.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    assert command.main(["check", str(folder)]) == 2
    error = capsys.readouterr().err
    assert f"{path}: " in error and said in error


def test_a_record_of_another_protocol_is_not_put_beside_others(folder, tmp_path):
    record = read_json(folder / "cumulative_lora-raw-1.json") | {"seed": 2, "weights": "other"}
    with pytest.raises(InputError, match=r"the record: weights: not as in .*-fdc-1\.json"):
        records.write(record, folder)
    assert len(list(folder.iterdir())) == 3
    (folder / "a.json").write_text("[]")
    with pytest.raises(InputError, match=r"a\.json: expected a JSON object, found a list"):
        records.write(record, folder)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["record", "run", "--images=x"], "run: expected --images=FOLDER for an .npz, and only"),
        (["record", "dump.NPZ"], "dump.NPZ: expected --images=FOLDER for an .npz"),
        (["check", "nowhere"], "nowhere: expected records, found none"),
    ],
)
def test_commands_that_lack_something_are_refused(given, said, capsys):
    assert command.main(given) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("more", ["--config.seed=2", "--output=x"])
def test_flags_of_other_commands_are_refused(more, capsys):
    with pytest.raises(SystemExit):
        command.main(["check", "records", more])
    assert f"unrecognized arguments: {more}" in capsys.readouterr().err


def test_tasks_of_equal_scores_do_not_count_as_right():
    scores = np.array([[1.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    rank = submissions.task_rank(np.vstack([scores, [0, 0, 1]]), np.array([0, 0, 2]))
    assert rank.tolist() == [1, 0, 0]
