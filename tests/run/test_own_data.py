"""Photographs of a user's own, from a list to predictions, also with classes that come later."""

import shutil

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from PIL import Image

import fdc_jax
from configs import own
from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_json
from fdc_jax.run import configuration
from fdc_jax.run import setup as setups
from fdc_jax.run.folder import RunFolder, known_classes
from fdc_jax.run.seeds import opening_lines
from tests import small_runs
from tests.small_runs import stopped

# By name, those that come later lie between the others.
OLD, NEW = ("ash", "box", "oak", "yew"), ("bay", "elm", "fir")
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
    "untrained": False,
}


def add(source, *names):
    """Puts classes into a folder, six photographs to train on and three to test on of each.

    A photograph is noise around the colour of its class.
    """
    for name in names:
        number = ALL.index(name)
        rng = np.random.default_rng(number)
        colour = 80 + 30 * np.array([number % 3, number // 3, number % 2])
        for index in range(9):
            pixels = np.clip(rng.normal(colour, 25, (36, 40, 3)), 0, 255).astype(np.uint8)
            folder = source / ("test" if index > 5 else "train") / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{index}.png")


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """The folder `trees` of photographs."""
    root = small_runs.shared(tmp_path_factory, "own", lambda root: add(root / "trees", *ALL))
    return root / "trees"


def config(source, cache, **fields):
    settings = own.get_config()
    settings.data.source, settings.cache_dir = str(source), str(cache)
    settings.classes_per_task = SIZES
    named = {name.replace("__", "."): value for name, value in fields.items()}
    settings.update_from_flattened_dict(SETTINGS | named)
    return configuration.typed(settings)


@pytest.fixture(scope="module")
def finished_run(trees, cache, tmp_path_factory):
    """A run that knew all classes from the start, in the order of those of `grown`."""
    known = config(trees, cache, class_order=ALL)
    return small_runs.shared(tmp_path_factory, "own_whole", lambda it: small_runs.run(known, it))


def claim(config, workdir):
    """Checks a run and writes its `config.json`, as the command does before it trains."""
    known = known_classes([workdir], config.classes_per_task)
    RunFolder(workdir).claim(setups.build(config, True, known), seed=1)


def grow(cache, folder):
    source, workdir = folder / "trees", folder / "end"
    add(source, *OLD)
    few = dict(classes_per_task=SIZES[:2])
    first = small_runs.run(config(source, cache, num_tasks=1, **few), workdir)
    assert first["class_names"] == [*OLD[:3]]
    stopped(config(source, cache, **few), workdir, 4)
    add(source, *NEW)
    second = small_runs.run(config(source, cache, num_tasks=2), workdir)
    assert second["class_names"] == [*OLD]
    stopped(config(source, cache), workdir, 4)
    assert small_runs.events(workdir, "training")[-1]["task"] == 2
    small_runs.copied(workdir, folder / "amid")
    small_runs.run(config(source, cache), workdir)


@pytest.fixture(scope="module")
def grown(cache, tmp_path_factory):
    """A run that stopped after a task, was stopped in the second, got classes and stopped again.

    The folder has its work directory, `end`, and a copy of it amid the third task.
    """
    return small_runs.shared(tmp_path_factory, "own_grown", lambda it: grow(cache, it))


@pytest.mark.ci
def test_grown_run_equals_a_run_of_all_classes(finished_run, grown):
    end, amid = grown / "end", grown / "amid"
    small_runs.same_outcome(finished_run, end, without=["class_order"])
    small_runs.nothing_done_twice(end)
    actual, expected = small_runs.contents(end), small_runs.contents(finished_run)
    for name in expected:
        if name.startswith(("calibrators/", "features/")):
            assert actual[name] == expected[name], name
    run = fdc_jax.open_run(amid, data_dir=str(grown / "trees"))
    assert (run.num_tasks, run.class_names, len(run.heads())) == (2, [*OLD], 2)
    # Earlier evaluations stay, with their times.
    assert small_runs.results(amid)["curve"] == small_runs.results(end)["curve"][:2]


@pytest.mark.ci
def test_a_run_opens_without_its_images(finished_run, trees, cache, monkeypatch):
    monkeypatch.setenv("FDC_JAX_CACHE", str(cache))
    run = fdc_jax.open_run(finished_run, data_dir="nowhere")
    with pytest.raises(InputError, match=r"config.data.source: .*nowhere: expected a folder or an"):
        run.test_images(np.arange(4))
    files = [trees / f"test/{name}/6.png" for name in ALL]
    expected = np.array(ALL)[run.predictions["fdc_label"][::3]]
    assert_array_equal(run.predict(files, method="fdc")["class"], expected)
    run = fdc_jax.open_run(finished_run, data_dir=str(trees))
    assert len(run.test_images(np.arange(4))) == 4


def test_changes_of_known_classes_are_refused(trees, cache, tmp_path):
    workdir = tmp_path / "run"
    claim(config(trees, cache, class_order=ALL), workdir)
    before = small_runs.contents(workdir)
    for field, value, message in (
        ("num_tasks", 2, "num_tasks was 0, is 2; choose"),
        ("classes_per_task", (3, 3, 1), r"classes_per_task was \[3, 1, 3\], is \[3, 3, 1\];"),
        ("class_order", ALL[::-1], r"class_order was \['ash', 'box', .*, is \['fir', 'elm',"),
    ):
        with pytest.raises(InputError, match=message):
            small_runs.run(config(trees, cache, **{"class_order": ALL, field: value}), workdir)
    assert small_runs.contents(workdir) == before


CHANGES = {
    "no such class": lambda it: [shutil.rmtree(it / split / "box") for split in ("test", "train")],
    "other images; a run": lambda it: shutil.copy(it / "test/oak/6.png", it / "test/box/9.png"),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_images_of_known_classes_must_stay(cache, tmp_path, reason):
    """Also of a class that is not learned yet, and with further classes beside it."""
    first, source = tmp_path / "first", tmp_path / "trees"
    add(source, *OLD)
    claim(config(source, cache, num_tasks=1, classes_per_task=SIZES[:2]), first)
    add(source, *NEW)
    CHANGES[reason](source)
    before = (first / "config.json").read_bytes()
    sizes = (*SIZES[:2], 2) if reason == "no such class" else SIZES
    message = rf"first: expected the class box of trees as this run knows it, found {reason}"
    with pytest.raises(InputError, match=message):
        claim(config(source, cache, classes_per_task=sizes), first)
    assert (first / "config.json").read_bytes() == before


def test_the_same_command_learns_new_classes_as_further_tasks(cache, tmp_path):
    """Known classes keep their tasks, also where the last one was not full."""
    source, workdir = tmp_path / "trees", tmp_path / "run"
    pairs = config(source, cache, classes_per_task=2)
    kept = []
    for names in (NEW, OLD):
        add(source, *names)
        claim(pairs, workdir)
        kept.append(read_json(workdir / "config.json"))
    first, second = (saved["known classes"] for saved in kept)
    assert [*first] == [*NEW] and [*second] == [*NEW, *OLD] and second.items() > first.items()
    assert [saved["classes of planned tasks"] for saved in kept] == [[2, 1], [2, 1, 2, 2]]
    # Other sizes are another run.
    advice = r"classes_per_task was 2, is 3; .* \(classes_per_task=2,1,2,2,N learns N further"
    with pytest.raises(InputError, match=advice):
        claim(config(source, cache, classes_per_task=3), workdir)


# Settings -----------------------------------------------------------------------------------------


def test_defaults_for_own_images_are_stated_and_saved(cache, tmp_path):
    add(tmp_path / "trees", *OLD)
    grey = Image.fromarray(np.array([[0, 5000]], np.uint16))
    grey.save(tmp_path / "trees/train/ash/grey.png")
    fields = {"train__epochs": 0, "classes_per_task": 0}
    setup = setups.build(config(tmp_path / "trees", cache, **fields), quiet=True)
    assert (setup.config.train.epochs, setup.tasks.planned) == (40, (2, 2))
    assert setup.config.data.grey_bits == 13
    lines = opening_lines(setup)
    assert "training   40 epochs of batches of 6, 2 classes a task\n" in lines
    assert "input range model" in lines
    text = "images     grey images whose 13 bits are scaled to 8: 1 (train/ash/grey.png)"
    assert text in lines.splitlines()


def test_an_order_is_read_from_its_file(tmp_path):
    order = tmp_path / "order.txt"
    order.write_text("\n".join(ALL) + "\n", "utf-8-sig")
    assert config("trees", "cache", class_order=(str(order),)).class_order == ALL
    with pytest.raises(InputError, match=r"seed: expected -1 together with .* found 7"):
        config("trees", "cache", class_order=ALL, class_order_seed=7)
