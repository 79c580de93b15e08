"""Photographs of a user's own, from a list to predictions, also with classes that come later."""

import csv
import sys

import numpy as np
import pytest
from absl import flags
from ml_collections import config_flags
from PIL import Image

import fdc_jax
from configs import own
from fdc_jax import predict
from fdc_jax.data import prepare
from fdc_jax.errors import InputError
from fdc_jax.learners import inflora
from fdc_jax.run import configuration
from tests import small_runs
from tests.small_runs import stopped

# By name, those that come later lie between the others.
OLD, NEW = ("oak", "ash", "yew", "box"), ("elm", "fir", "bay")
# The largest task comes first: with the rows of heads, processors change how they round.
ALL, SIZES = OLD + NEW, (3, 1, 3)
SETTINGS = {
    "encoder.variant": "digits",
    "encoder.weights": "digits",
    "encoder.image_size": 32,
    "train.epochs": 2,
    "train.batch_size": 6,
    "checkpoint.every_steps": 3,
    "report": False,
}


def photograph(number, rng):
    """Stripes with noise, of a direction and a colour."""
    y, x = np.mgrid[:36, :40] / 3
    angle = number * np.pi / 7
    waves = np.sin(x * np.cos(angle) + y * np.sin(angle) + rng.uniform(0, 6))
    pixels = 128 + 60 * waves[..., None] * np.eye(3)[number % 3] + rng.normal(0, 25, (36, 40, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def make_root(root):
    rng = np.random.default_rng(0)
    root.mkdir()
    for number, name in enumerate(ALL):
        for index in range(9):
            photograph(number, rng).save(root / f"{name}_{index}.png")
    for names, listed in ((OLD, "old.csv"), (NEW, "new.csv"), (ALL, "all.csv")):
        files = [(name, n) for name in names for n in range(9)]
        rows = [(f"{name}_{n}.png", name, "test" if n > 5 else "train") for name, n in files]
        with open(root / listed, "w", newline="") as file:
            csv.writer(file).writerows([("file", "label", "split"), *rows])
    (root / "order.txt").write_text("\n".join(ALL) + "\n")
    prepare.prepare("trees", root / "all.csv", root / "whole", quiet=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Photographs, six to train on and three to test on a class; lists of old, new and all."""
    return small_runs.shared(tmp_path_factory, "own", make_root)


def config(data, cache, **fields):
    found = own.get_config()
    found.benchmark, found.data.dir, found.cache_dir = "trees", str(data), str(cache)
    found.classes_per_task = SIZES
    found.update_from_flattened_dict(SETTINGS)
    found.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
    return found


@pytest.fixture(scope="module")
def whole(root, cache, tmp_path_factory):
    """A run that knew all classes from the start."""
    known = config(root / "whole", cache)
    return small_runs.shared(tmp_path_factory, "own_whole", lambda it: small_runs.run(known, it))


def grow(root, cache, place):
    data, workdir = root / "data", place / "end"
    prepare.prepare("trees", root / "old.csv", data, quiet=True)
    few = dict(classes_per_task=SIZES[:2])
    first = small_runs.run(config(data, cache, num_tasks=1, **few), workdir)
    assert (first["num_tasks"], first["class_names"], first["num_classes"]) == (1, [*OLD[:3]], 3)
    assert first["num_test_images"] == 9
    small_runs.copied(workdir, place / "first")
    stopped(config(data, cache, **few), workdir, 2)
    assert small_runs.events(workdir, "training")[-1]["task"] == 1
    prepare.prepare("trees", root / "new.csv", data, append=True, quiet=True)
    second = small_runs.run(config(data, cache, num_tasks=2), workdir)
    assert (second["num_tasks"], second["class_names"]) == (2, [*OLD])
    stopped(config(data, cache), workdir, 2)
    assert small_runs.events(workdir, "training")[-1]["task"] == 2
    small_runs.copied(workdir, place / "amid")
    small_runs.run(config(data, cache), workdir)


@pytest.fixture(scope="module")
def grown(root, cache, tmp_path_factory):
    """A run that stopped after a task, was stopped in the second, got classes and stopped again.

    Returns the work directory of the end, and copies of it after the first task and amid the third.
    """
    place = small_runs.shared(tmp_path_factory, "own_grown", lambda it: grow(root, cache, it))
    return [place / name for name in ("end", "first", "amid")]


@pytest.mark.ci
def test_it_ends_as_if_all_had_been_known(whole, grown):
    end, first, amid = grown
    small_runs.same_outcome(whole, end)
    small_runs.nothing_done_twice(end)
    for name in ("calibrator.npz", "calibrators/calibrator_003.npz"):
        with np.load(whole / name) as expected, np.load(end / name) as found:
            small_runs.assert_equal(dict(found), dict(expected))
    names = sorted(path.name for path in (whole / "features").iterdir())
    assert names == sorted(path.name for path in (end / "features").iterdir())
    for name in names:
        ours, theirs = (np.load(place / "features" / name) for place in (end, whole))
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    # What was measured early stays as it was, to the byte.
    assert small_runs.results(amid)["curve"] == small_runs.results(end)["curve"][:2]
    for name in ("tasks/task_000.json", "features/train_adapted_0.npy"):
        assert (first / name).read_bytes() == (end / name).read_bytes()


def test_results_have_the_users_names(whole):
    results, columns = small_runs.results(whole), small_runs.predictions(whole)
    assert (results["benchmark"], results["split"]) == ("trees", "given")
    assert results["class_names"] == columns["class_names"].tolist() == list(ALL)
    assert results["config"]["classes_per_task"] == list(SIZES)
    assert (results["num_tasks"], results["num_classes"], results["num_test_images"]) == (3, 7, 21)
    assert np.bincount(columns["label"]).tolist() == [3] * 7
    assert np.bincount(columns["task"]).tolist() == [3 * size for size in SIZES]


@pytest.mark.ci
def test_its_earlier_results_stand_while_it_goes_on(grown, cache, monkeypatch):
    monkeypatch.setenv("FDC_JAX_CACHE", str(cache))
    run = fdc_jax.open_run(grown[2])
    assert (run.num_tasks, run.class_names) == (2, [*OLD])
    assert len(run.heads()) == run.calibrator().num_tasks == 2
    assert run.encoder(2)["key"].shape == run.encoder(1)["key"].shape
    assert len(run.test_images(np.arange(3))) == 3


def test_without_its_data_a_run_opens_and_names_photographs(whole, root, cache, monkeypatch):
    monkeypatch.setenv("FDC_JAX_CACHE", str(cache))
    run = fdc_jax.open_run(whole, data_dir=str(root / "nowhere"))
    assert list(run.class_names) == list(ALL)
    assert len(run.heads()) == 3 and run.experiment.setup.classes_per_task == SIZES
    with pytest.raises(InputError, match=r"benchmark must be one of .*nowhere; found 'trees'"):
        run.test_images(np.arange(4))
    found = predict.predict(run, [root / f"{name}_{n}.png" for name in ALL for n in (6, 7, 8)])
    expected = np.array(ALL)[run.predictions["fdc_label"]]
    np.testing.assert_array_equal(found["class"], expected)


REFUSED = [
    (dict(num_tasks=2), "holds a run of another configuration: num_tasks was 0, is 2; choose"),
    (dict(num_tasks=4), r"config.num_tasks: expected at most the 3 tasks of trees, found 4"),
    (dict(num_tasks=-1), r"config.num_tasks: expected a whole number in \[0, inf\), found -1"),
    (dict(classes_per_task=(3, 3, 1)), r"classes_per_task was \[3, 1, 3\], is \[3, 3, 1\];"),
    (dict(class_order=(*OLD[1::-1], *OLD[2:], *NEW)), r"class_order was \[\], is \['ash', 'oak',"),
    (dict(class_order_seed=7), "class_order_seed was -1, is 7;"),
    (dict(train__epochs=3), "another configuration: train.epochs was 2, is 3;"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda each: str(each)[:30])
def test_what_is_no_continuation_is_refused(root, whole, cache, tmp_path, fields, message):
    workdir = small_runs.copied(whole, tmp_path / "run")
    before = (workdir / "config.json").read_bytes()
    with pytest.raises(InputError, match=message):
        small_runs.run(config(root / "whole", cache, **fields), workdir)
    assert (workdir / "config.json").read_bytes() == before
    small_runs.same_outcome(workdir, whole)


@pytest.mark.ci
def test_other_images_and_other_sizes_are_refused(root, grown, cache, tmp_path):
    """Of data that did not grow from those of the run, and where the last task would get more."""
    first = small_runs.copied(grown[1], tmp_path / "first")
    with pytest.raises(InputError, match=r"configuration: test images sha256 was '.*', is '.*'"):
        small_runs.run(config(root / "whole", cache), first)
    workdir = tmp_path / "uneven"
    prepare.prepare("trees", root / "new.csv", tmp_path / "data", quiet=True)
    uneven = config(tmp_path / "data", cache, classes_per_task=2)
    stopped(uneven, workdir, 2)
    prepare.prepare("trees", root / "old.csv", tmp_path / "data", append=True, quiet=True)
    message = r"expected in task 2 the classes bay, as before; found bay, oak; give the size of ev"
    with pytest.raises(InputError, match=message):
        small_runs.run(uneven, workdir)


@pytest.mark.ci
def test_the_same_tasks_in_other_words_are_the_same_and_reported(root, grown, cache, tmp_path):
    """The report has the user's names, and no number of the paper."""
    workdir = small_runs.copied(grown[0], tmp_path / "run")
    order = (str(root / "order.txt"),)
    same = config(root / "data", cache, num_tasks=3, class_order=order, report=True)
    assert small_runs.run(same, workdir) == small_runs.results(grown[0])
    page = (workdir / "report" / "report.html").read_text()
    assert "Cumulative-LoRA on trees" in page and "--config.benchmark=trees" in page
    assert all(name in page for name in ALL)
    for table in (workdir / "report" / "tables").glob("*.csv"):
        rows = list(csv.reader(table.read_text().splitlines()))
        assert all("paper" not in row for row in rows), table.name


def test_who_plans_ahead_says_so(root, cache, tmp_path, caplog):
    """InfLoRA protects the more the more of its tasks are done."""
    data = tmp_path / "data"
    prepare.prepare("trees", root / "old.csv", data, quiet=True)
    few = config(data, cache, classes_per_task=SIZES[:2], learner__name="inflora")
    stopped(few, tmp_path / "run", 2)
    prepare.prepare("trees", root / "new.csv", data, append=True, quiet=True)
    more = config(data, cache, learner__name="inflora")
    stopped(more, tmp_path / "run", 2)
    assert f"was planned for 2 tasks, is for 3; {inflora.TASK_COUNT}: a run that" in caplog.text
    caplog.clear()
    stopped(more, tmp_path / "run", 2)
    assert "planned" not in caplog.text


# Settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(benchmark=""), "config.benchmark: expected the name of a prepared data set, found"),
        (dict(classes_per_task=-1), "classes_per_task: expected a whole number, or a list"),
        (dict(classes_per_task=(3, 0, 3)), r"classes_per_task: expected .* found \[3, 0, 3\]"),
        (dict(classes_per_task="five"), "classes_per_task: expected a whole number.* 'five'"),
        (dict(class_order=("a", "b"), class_order_seed=7), "seed: expected -1 beside .* found 7"),
        (dict(class_order=("nowhere.txt",)), "class_order: cannot read nowhere.txt: No such file"),
    ],
)
def test_settings_that_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        configuration.validate(config("data", "cache", **fields))


def test_an_order_is_read_from_its_file(tmp_path, monkeypatch):
    """And sizes of tasks from the command line."""
    given, order = flags.FlagValues(), tmp_path / "order.txt"
    fields = ("benchmark=trees", "classes_per_task=3,1,3", f"class_order={order}")
    arguments = ["main.py", *(f"--config.{field}" for field in fields)]
    monkeypatch.setattr(sys, "argv", arguments)
    config_flags.DEFINE_config_dict("config", own.get_config(), flag_values=given)
    given(arguments)
    order.write_text("\n".join(ALL) + "\n")
    for _ in range(2):
        configuration.validate(given.config)
        assert (given.config.classes_per_task, given.config.class_order) == (SIZES, ALL)
    for content, message in ((b"", "found nothing"), (b"oak\n", "found oak"), (b"\xff\n", "read")):
        order.write_bytes(content)
        with pytest.raises(InputError, match=f"config.class_order: .*{message}"):
            configuration.validate(config("data", "cache", class_order=(str(order),)))
