"""The league's command: records of runs, and of what other code predicted, that add up.

    fdc bench --learner=NAME [--seed=1] [--workdir=FOLDER] [--config.FIELD=VALUE ...]
    fdc bench WORKDIR [--facts=FACTS.json]
    fdc bench DUMP.npz --images=FOLDER --facts=FACTS.json
    fdc bench --images=FOLDER [--config.FIELD=VALUE ...]
    fdc bench --check=results/league

Learns the protocol of `configs/league.py`; or takes a finished work directory, or what other code
predicted of the images that the fourth line writes. A record is one JSON file (`FORM`).
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np
from jaxtyping import Float, Int

from fdc_jax import command, evaluation, learners
from fdc_jax.calibration import METHODS
from fdc_jax.data.dataset import Dataset
from fdc_jax.data.task_stream import open_stream
from fdc_jax.errors import InputError, Program, did_you_mean, stop_on_signals
from fdc_jax.features import feature_files
from fdc_jax.machine.files import (
    check_manifest,
    read_json,
    read_npz,
    read_object,
    sha256,
    write_folder_atomically,
    write_json,
    write_manifest,
    write_text,
)
from fdc_jax.model import weights
from fdc_jax.run import configuration, experiment, seeds
from fdc_jax.run import setup as setups
from fdc_jax.run.saved import Run

RECALL = (1, 2, 3, 5)
# What follows from the protocol, which all records of a folder share.
_PROTOCOL: dict[str, Any] = {
    "class_order": list[str],
    "classes_per_task": list[int],
    "test_images": list[int],  # of each class, as classes arrive
    "data": dict,  # checksums
    "weights": str,
}
# What only who ran it knows.
_FACTS: dict[str, Any] = {
    "method": str,
    "calibrator": str,
    "code": str,  # fdc_jax, or a repository
    "commit": str,
    "changes": str,  # of that code and of its hyperparameters, in words
    "seed": int,
    "passes": int,  # of an encoder, per test image
    "versions": dict,
}
_NUMBERS: dict[str, Any] = {
    "accuracy": float,
    "curve": list[float],  # accuracy after each task
    "routing_accuracy": float,
}
FORM = {**_FACTS, **_PROTOCOL, **_NUMBERS, "predictions": dict}
# What a record may lack or have as null.
MORE = {
    "processor_seconds": float,  # of everything
    "storage_bytes": int,  # beside the encoder and the heads
    "task_recall": dict[str, float],  # share of images with the true task among the best k
    "rate": str,  # what the method's own learning rates are multiplied by, one of `rates`
    "rates": dict[str, float],  # accuracy on held-out training images by it, "1/3", "1", "3"
    "search_seconds": float,  # of a processor, for `rates`
}
# What a finished run knows by itself.
_MEASURED = {"seed", "passes", "versions", "processor_seconds", "storage_bytes"}
# Fields of a run that its record has otherwise.
_ELSEWHERE = (
    configuration.NOT_COMPARED
    | configuration.TASKS
    | {
        *("benchmark", "calibrators", "class_order_seed", "learner.name"),
        *("data.test_per_class", "data.test_share", "data.train_per_class"),
    }
)
# Of each test image, packed.
PREDICTIONS = {
    "label": str,
    "label_after": list[str],  # perhaps, after each task that the image was there
    "task_rank": str,  # perhaps, how many other tasks score as high as the true one, or higher
}
# What the command may be asked for, and what goes with it; the first that it is given decides.
_WITH = {
    "check": (),
    "learner": ("seed", "workdir", "facts", "output", "config"),
    "source": ("images", "facts", "output"),
    "images": ("config",),
}
_TAKEN = "{}: is another record of this method and seed; remove it, or give another --output"
_WORDS = {
    str: "text",
    int: "a whole number from 0 on",
    float: "a number from 0 on",
    dict: "an object",
}


# Records -----------------------------------------------------------------------------------------


def truth(record: Mapping[str, Any]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " c"]]:
    """Returns the class of each test image and the task of each class, as classes arrive."""
    counts, sizes = record["test_images"], record["classes_per_task"]
    if not len(counts) == len(record["class_order"]) == sum(sizes):
        raise InputError("class_order, classes_per_task and test_images: not of as many classes")
    if not (0 < min(counts, default=0) and 0 < min(sizes) and sum(counts) < 10**8):
        raise InputError("classes_per_task and test_images: expected some of each task and class")
    return np.repeat(np.arange(len(counts)), counts), np.repeat(np.arange(len(sizes)), sizes)


def measure(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a record, in percent, from the predictions that it carries.

    Without labels after each task, the curve has the accuracy after the last one alone. Raises
    InputError where predictions are damaged, or not of these images.
    """
    label, task_of = truth(record)
    task, kept = task_of[label], record["predictions"]
    classes, tasks = len(task_of), len(record["classes_per_task"])
    found = evaluation.unpack(kept["label"], len(label), classes, "predictions.label")
    after = kept.get("label_after") or []
    if len(after) not in (0, tasks):
        raise InputError(f"predictions.label_after: expected {tasks}, found {len(after)}")
    curve = []
    for t, text in enumerate(after):
        seen = label[task <= t]
        known = int(np.sum(task_of <= t))
        each = evaluation.unpack(text, len(seen), known, f"predictions.label_after.{t}")
        curve.append(evaluation.accuracy(seen, each))
    if after and after[-1] != kept["label"]:
        raise InputError("predictions.label: expected the last of label_after")
    accuracy = evaluation.accuracy(label, found)
    numbers = {
        "accuracy": accuracy,
        "curve": curve or [accuracy],
        "routing_accuracy": evaluation.accuracy(task, task_of[found]),
    }
    if kept.get("task_rank"):
        rank = evaluation.unpack(kept["task_rank"], len(label), tasks, "predictions.task_rank")
        numbers["task_recall"] = recall(rank)
    return numbers


def recall(rank: Int[np.ndarray, " n"]) -> dict[str, float]:
    """Returns the percentage of images with the true task among the best k, by `task_rank`."""
    return {str(k): 100.0 * float(np.mean(rank < k)) for k in RECALL}


def check(record: Any, place: str) -> None:
    """Raises InputError where a record is none, or a number is not that of its predictions."""
    _require(record, FORM, MORE, place)
    _require(record["predictions"], {"label": str}, PREDICTIONS, f"{place}: predictions")
    if not re.fullmatch(r"\w[\w./ +-]*", record["method"]):
        raise InputError(f"{place}: method: expected letters, digits, dots, dashes and spaces")
    if record["calibrator"] not in METHODS:
        raise InputError(f"{place}: calibrator: expected one of {', '.join(METHODS)}")
    if not re.fullmatch(r"fdc_jax|\w[\w.-]*/[\w.-]+", record["code"]):
        raise InputError(f"{place}: code: expected fdc_jax or OWNER/REPOSITORY")
    if re.search(r"<[\w!/]|\n", record["changes"]):
        raise InputError(f"{place}: changes: expected one line of plain text, without <...>")
    rate, rates, seconds = (record.get(name) for name in ("rate", "rates", "search_seconds"))
    if max([*record["curve"], *(rates or {}).values()], default=0) > 100:
        raise InputError(f"{place}: curve and rates: expected percent")
    if (rate or rates or seconds) and (seconds is None or rate not in (rates or {})):
        raise InputError(f"{place}: rates: expected search_seconds, too, and among them the rate")
    if rates and rates[rate] < max(rates.values()):
        raise InputError(f"{place}: rate: expected the best of rates, found {rate}")
    try:
        found = measure(record)
    except InputError as error:
        raise InputError(f"{place}: {error}") from error
    if len(record["curve"]) != len(record["classes_per_task"]):
        raise InputError(f"{place}: curve: expected a number for each task")
    given = {name: record.get(name) for name in (*_NUMBERS, "task_recall")}
    given["curve"] = given["curve"][-len(found["curve"]) :]
    for name, value in given.items():
        if (of := _numbers(value)) != (by := _numbers(found.get(name))):
            raise InputError(f"{place}: {name}: expected {by} by its predictions, found {of}")


def _require(found: Any, needed: Mapping[str, Any], more: Mapping[str, Any], place: str) -> None:
    """Raises InputError where a value from JSON lacks something, or has it in another form."""
    if not isinstance(found, dict):
        raise InputError(f"{place}: expected an object")
    if missing := sorted(needed.keys() - found.keys()):
        raise InputError(f"{place}: expected {', '.join(missing)}")
    known = {**needed, **more}
    if unknown := sorted(found.keys() - known.keys()):
        raise InputError(did_you_mean(place, unknown[0], known))
    for name, kind in known.items():
        value = found.get(name)
        if not (_is(value, kind) or (value is None and name not in needed)):
            words = f"{'a list' if get_origin(kind) is list else 'an object'} of which each is "
            words = words * bool(get_args(kind)) + _WORDS[(kind, *get_args(kind))[-1]]
            raise InputError(f"{place}: {name}: expected {words}")


def _is(value: Any, kind: Any) -> bool:
    """Returns whether a value from JSON is of a kind; whole numbers are numbers, too."""
    if parts := get_args(kind):
        each = list(value.values()) if isinstance(value, dict) else value
        right = isinstance(value, get_origin(kind)) and isinstance(each, list)
        return right and all(_is(part, parts[-1]) for part in each)
    if kind in (int, float):
        right = isinstance(value, (int, kind)) and not isinstance(value, bool)
        return right and 0 <= value < 2**53
    return isinstance(value, kind)


def _numbers(value: Any) -> Any:
    """Returns a number, or those of a list or a dictionary, rounded; None where there is none."""
    if isinstance(value, dict):
        return {key: round(each, 6) for key, each in value.items()}
    return value and np.round(value, 6).tolist()


def read(folder: str | Path) -> dict[Path, dict[str, Any]]:
    """Returns the records of a folder by their files; InputError where one does not add up.

    All are of one protocol, and there is at least one.
    """
    records = {path: read_json(path) for path in sorted(Path(folder).glob("*.json"))}
    if not records:
        raise InputError(f"{folder}: expected records, found none")
    rows: dict[tuple[Any, ...], Path] = {}
    for path, record in records.items():
        check(record, str(path))
        row = tuple(record[name] for name in ("code", "method", "calibrator", "seed"))
        if rows.setdefault(row, path) != path:
            raise InputError(f"{path}: code, method, calibrator and seed are those of {rows[row]}")
    for name in _PROTOCOL:
        said = {path: json.dumps(record[name], sort_keys=True) for path, record in records.items()}
        most = Counter(said.values()).most_common(1)[0][0]
        like = next(path for path, text in said.items() if text == most)
        if other := [path for path, text in said.items() if text != most]:
            raise InputError(f"{other[0]}: {name}: not as in {like}")
    return records


def write(record: dict[str, Any], folder: str | Path) -> Path:
    """Checks a record and writes it, a line for each field, under a name that says whose it is."""
    check(record, "the record")
    path = _file(folder, *(record[name] for name in ("method", "calibrator", "code", "seed")))
    if other := min(Path(folder).glob("*.json"), default=None):
        there = read_object(other)
        if differ := [field for field in _PROTOCOL if there.get(field) != record[field]]:
            raise InputError(f"{folder}: {differ[0]}: expected that of {other}, found another")
    if path.exists() and read_json(path) != json.loads(json.dumps(record)):
        raise InputError(_TAKEN.format(path))
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def _file(folder: str | Path, method: str, calibrator: str, code: str, seed: int) -> Path:
    """Returns where a record is written; ours have no code in their names."""
    words = (method, calibrator, *[code] * (code != "fdc_jax"), str(seed))
    name = "-".join(re.sub(r"\W+", "_", word).lower() for word in words)
    return Path(folder) / f"{name}.json"


# Where they come from ----------------------------------------------------------------------------


def of_run(workdir: str | Path, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a record for each calibrator of a finished run; `facts` say more of it.

    Where they name a calibrator, its record alone is returned.
    """
    run = Run(workdir)
    if (results := run.results) is None:
        raise InputError(f"{workdir}: expected a finished run, found no results.json")
    columns = run.predictions
    label, task, records = columns["label"], columns["task"], []
    after = [each.get("labels", {}) for each in run.read_records()]
    scores: dict[str, Any] = {}
    if run.features_folder.is_dir():
        stored = feature_files.load(run.features_folder)
        fitted = {name: run.calibrator(name) for name in run.calibrators}
        heads = next(iter(fitted.values())).heads  # the final ones, of all alike
        views = stored.test_adapted, stored.test_pretrained
        scores = experiment.score(fitted, heads, *views)[0]
    names = [each for each in results["accuracy"] if each != "oracle"]
    if "calibrator" in facts:
        if facts["calibrator"] not in names:
            raise InputError(f"--facts: calibrator: expected one of {', '.join(names)}")
        names = [facts["calibrator"]]
    changes = _changes(run.config)
    for name in names:
        predictions: dict[str, Any] = {"label": evaluation.pack(columns[f"{name}_label"])}
        if len(after) == run.num_tasks and all(name in each for each in after):
            predictions["label_after"] = [each[name] for each in after]
        if name in scores:
            predictions["task_rank"] = evaluation.pack(task_rank(scores[name].task_scores, task))
        record = {
            "method": results["learner"],
            "code": "fdc_jax",
            "commit": results["versions"]["commit"] or "",
            "changes": changes,
            "seed": results["seed"],
            "passes": 2 if name in ("fdc", "gaussians") else 1,  # E_T and E_0
            "processor_seconds": (results["timing"] or {}).get("processor_seconds"),
            "storage_bytes": results["storage_bytes"].get(name, 0),
            "versions": results["versions"],
            **facts,
            "calibrator": name,
            "class_order": run.class_names,
            "classes_per_task": [len(np.unique(label[task == t])) for t in np.unique(task)],
            "test_images": np.bincount(label).tolist(),
            "data": results["data"],
            "weights": results["encoder"]["sha256"],
            "predictions": predictions,
        }
        points = {"curve": [point["accuracy"][name] for point in results["curve"]]}
        records.append(record | measure(record) | points)
    return records


def _changes(config: dict[str, Any]) -> str:
    """Returns the settings of a run that are not those of `configs/league.py`, as a sentence."""
    league = configuration.flatten(configuration.load("league"))
    said = [
        f"{field} {json.dumps(value)}"
        for field, _, value in configuration.differences(league, config)
        if field not in _ELSEWHERE and not learners.of_another(field, config["learner.name"])
    ]
    return f"Settings: {', '.join(said)}." * bool(said)


def of_dump(path: str | Path, images: str | Path, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the record of what other code predicted of the images of `write_images`.

    An `.npz` has `label_t` [n_t] of the test images seen after task t, from 0, for each t; labels
    and rows as in the folder; perhaps `task_scores` [n, tasks].
    """
    check_manifest(Path(images), "write the images again")
    protocol, arrays = read_json(Path(images) / "protocol.json"), read_npz(path)
    _require(protocol, _PROTOCOL, {}, f"{images}/protocol.json")
    _require(facts, _FACTS, MORE, "--facts")
    if facts["code"] == "fdc_jax":
        raise InputError("--facts: code: expected a repository; fdc_jax has work directories")
    record = {**facts, **protocol}
    names = [f"label_{t}" for t in range(len(record["classes_per_task"]))]
    ends = np.cumsum(record["classes_per_task"])
    if unknown := sorted(arrays.keys() - {*names, "task_scores"}):
        raise InputError(did_you_mean(str(path), unknown[0], [*names, "task_scores"]))
    for name, end in zip(names, ends, strict=True):
        if name not in arrays:
            raise InputError(f"{path}: expected {name}, found {', '.join(arrays)[:80] or 'none'}")
        size, found = sum(record["test_images"][:end]), arrays[name]
        right = found.shape == (size,) and found.dtype.kind in "iu"
        if not right or not 0 <= found.min() <= found.max() < end:
            wanted = f"expected {size} whole numbers from 0 to {end - 1}"
            values = f", {found.min()} to {found.max()}" if right else ""
            found = f"{found.dtype} {found.shape}{values}"
            raise InputError(f"{path}: {name}: {wanted}, found {found}")
    after = [evaluation.pack(arrays[name]) for name in names]
    record["predictions"] = predictions = {"label": after[-1], "label_after": after}
    if "task_scores" in arrays:
        classes, task_of = truth(record)
        rank = task_rank(arrays["task_scores"], task_of[classes])
        predictions["task_rank"] = evaluation.pack(rank)
    return [record | measure(record)]


def task_rank(
    scores: Float[np.ndarray, "n tasks"], task: Int[np.ndarray, " n"]
) -> Int[np.ndarray, " n"]:
    """Returns how many tasks score as high as the true one or higher.

    Raises:
        InputError: scores are of another shape, or not finite numbers.
    """
    if scores.shape != (len(task), task.max() + 1):
        wanted = len(task), int(task.max() + 1)
        raise InputError(f"task_scores: expected shape {wanted}, found {scores.shape}")
    if scores.dtype.kind not in "fiu" or not np.isfinite(scores).all():
        raise InputError("task_scores: expected finite numbers, found others")
    return (scores >= scores[np.arange(len(task)), task, None]).sum(axis=1) - 1


def write_images(folder: str | Path, fields: Sequence[str]) -> str:
    """Writes the protocol's images, `train/CLASS/NUMBER.png` and `test/CLASS/NUMBER.png`.

    Names of classes begin with their place in the order; `protocol.json` is what records share, and
    the manifest has the checksum of every file. Returns that of the weights, shortened.
    """
    if Path(folder).exists():
        raise InputError(f"--images={folder}: expected a new folder, found one")
    config = command.configured(["--config=league", *fields])
    configuration.validate(config)
    cache, encoder = setups.cache_folder(config), config.encoder
    checksum = sha256(weights.locate(encoder.weights, encoder.variant, cache))
    tasks = open_stream(config, cache)

    def save(split: Dataset, indices: Sequence[int], place: Path) -> None:
        for number, index in enumerate(indices):
            label = split.labels[index]
            name = f"{tasks.positions[label]:03d}_{split.class_names[label]}"
            file = place / split.split / name / f"{number:05d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            split.image(int(index)).save(file)

    with write_folder_atomically(folder) as place:
        save(tasks.train, np.concatenate(tasks.train_indices).tolist(), place)
        save(tasks.test, tasks.test_indices.tolist(), place)
        protocol = {
            "class_order": tasks.class_names,
            "classes_per_task": list(tasks.classes_per_task),
            "test_images": np.bincount(tasks.test_labels).tolist(),
            "data": {"train_sha256": tasks.train.checksum, "test_sha256": tasks.test.checksum},
            "weights": checksum,
        }
        write_json(place / "protocol.json", protocol)
        write_manifest(place)
    return checksum[:8]


# The command -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, `sys.argv` when None; returns 0 or a code of `errors.CODES`."""
    text = "Write or check records of the league: docs/league.md; its fields: --config.FIELD=VALUE."
    program = Program("bench", text)
    add = program.add_argument
    add("source", nargs="?", help="a finished work directory, or an .npz of predictions")
    add("--learner", metavar="NAME", help="learn the protocol: one of ours, or a module of yours")
    add("--seed", type=int, help="of the training (default 1)")
    add("--workdir", metavar="FOLDER", help="default runs/league_NAME_SEED")
    add("--images", metavar="FOLDER", help="the images as files: written, or those of an .npz")
    add("--facts", metavar="FILE", help="what a record says of the method: docs/league.md")
    add("--output", metavar="FOLDER", help="of the records (default results/league)")
    add("--check", metavar="FOLDER", help="compute the numbers of its records again")
    words = sys.argv[1:] if arguments is None else list(arguments)
    fields = [word for word in words if word.startswith("--config.")]

    def body(options: argparse.Namespace) -> None:
        say = (lambda text: None) if options.quiet else print
        source, images = options.source, options.images
        given = [name for name, value in vars(options).items() if value is not None]
        given += ["config"] if fields else []
        what = next((name for name in _WITH if name in given), None)
        dumped = (source or "").lower().endswith(".npz")
        if what is None or (what == "source" and dumped and not images):
            raise InputError("expected a work directory, an .npz with --images, or --learner")
        if "" in vars(options).values() or any("=" not in field for field in fields):
            raise InputError(f"{' '.join(words)}: expected a value for each flag, fields' after =")
        if more := set(given) - {"quiet", "traceback", what, *_WITH[what]}:
            raise InputError(f"{what} {vars(options)[what]}: does not go with --{min(more)}")
        if options.check:
            return say(f"{len(read(options.check))} records add up")
        facts = read_json(Path(options.facts)) if options.facts else {}
        known = {**_FACTS, **MORE}
        if not dumped:
            known = {name: known[name] for name in known if name not in _MEASURED}
        _require(facts, {}, known, options.facts)
        output = Path(options.output or "results/league")
        if options.learner:
            seed = 1 if options.seed is None else options.seed
            source = options.workdir or f"runs/league_{options.learner}_{seed}"
            heads = [facts["calibrator"]] if "calibrator" in facts else METHODS
            for path in (_file(output, options.learner, name, "fdc_jax", seed) for name in heads):
                if path.exists() and not Path(source).exists():  # before anything is learned
                    raise InputError(_TAKEN.format(path))
            own = [f"--config=league:{options.learner}", f"--config.seed={seed}"]
            config = command.configured([*own, *fields])
            with stop_on_signals() as stop:
                seeds.run(config, source, options.quiet, stop)
                command.show(config, source, options.quiet)
        if what == "images":
            return say(f"wrote {images} for weights {write_images(images, fields)}")
        for record in of_dump(source, images, facts) if dumped else of_run(source, facts):
            path = write(record, output)
            say(f"{record['accuracy']:6.2f} %  {path}")

    return program.run(body, [word for word in words if word not in fields])


if __name__ == "__main__":
    sys.exit(main())
