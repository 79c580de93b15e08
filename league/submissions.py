"""Records from work directories of this package, and from what other code predicted."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float, Int

import fdc_jax
from fdc_jax import evaluation, learners
from fdc_jax.errors import InputError, did_you_mean
from fdc_jax.features import feature_files
from fdc_jax.machine.files import check_manifest, read_json, read_npz
from fdc_jax.run import configuration, experiment
from league import records, settings

# Facts that a run knows by itself.
MEASURED = {"seed", "passes", "versions", "processor_seconds", "storage_bytes"}
# Fields of a configuration that `changes` does not repeat.
_ELSEWHERE = configuration.TASKS | {
    *("benchmark", "calibrators", "class_order_seed", "learner.name"),
    *("data.test_per_class", "data.test_share", "data.train_per_class"),
}


def of_run(workdir: str | Path, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a record for each calibrator of a finished run, or for the one that `facts` name."""
    optional = (set(records.FACTS) | set(records.OPTIONAL)) - MEASURED
    records.require(facts, "--facts", (), tuple(optional))
    run = fdc_jax.open_run(workdir)
    if run.results is None:
        raise InputError(f"{workdir}: expected a finished run, found no results.json")
    results: dict[str, Any] = msgspec.to_builtins(run.results)
    columns, after = run.predictions, [record.labels for record in run.read_records()]
    label, task = columns["label"], columns["task"]
    scores: dict[str, Any] = {}
    if run.features_folder.is_dir():
        features = feature_files.load(run.features_folder)
        fitted = {name: run.calibrator(name) for name in run.calibrators}
        heads = next(iter(fitted.values())).heads
        views = features.test_adapted, features.test_pretrained
        scores = experiment.score(fitted, heads, *views)[0]
    names = [name for name in results["accuracy"] if name != "oracle"]
    if "calibrator" in facts:
        if facts["calibrator"] not in names:
            raise InputError(f"--facts: calibrator: expected one of {', '.join(names)}")
        names = [facts["calibrator"]]
    made = []
    for name in names:
        predictions: dict[str, Any] = {"label": evaluation.pack(columns[f"{name}_label"])}
        predictions["label_after"] = [labels[name] for labels in after]
        if name in scores:
            rank = task_rank(scores[name].task_scores, task)
            predictions["task_rank"] = evaluation.pack(rank)
        record = {
            "method": results["learner"],
            "code": "fdc_jax",
            "commit": results["versions"]["commit"] or "",
            "changes": changes(run.config),
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
        made.append(record | records.measure(record))
    return made


def changes(config: dict[str, Any]) -> str:
    """Returns a sentence with the settings of a run that differ from `settings.py`."""
    league = configuration.flatten(settings.get_config())
    options = f"learner.{learners.section(config['learner.name'])}."
    said = [
        f"{field} {json.dumps(config[field])}"
        for field in configuration.differences(league, config)
        if field in configuration.COMPARED - _ELSEWHERE or field.startswith(options)
    ]
    return f"Settings: {', '.join(said)}." * bool(said)


def of_dump(path: str | Path, images: str | Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record of other code's predictions for a folder of `images.export`.

    The `.npz` has `label_t` [n_t] for each task t from 0, the predicted labels of the test images
    seen after it in the order of the folder, and perhaps `task_scores` [n, tasks].
    """
    check_manifest(Path(images), "write the images again")
    protocol, arrays = read_json(Path(images) / "protocol.json"), read_npz(path)
    records.require(protocol, f"{images}/protocol.json", records.PROTOCOL)
    records.require(facts, "--facts", records.FACTS, records.OPTIONAL)
    if facts["code"] == "fdc_jax":
        raise InputError("--facts: code: expected a repository; fdc_jax has work directories")
    record = {**facts, **protocol}
    label, task_of = records.truth(record)
    names = [f"label_{t}" for t in range(len(record["classes_per_task"]))]
    if unknown := sorted(arrays.keys() - {*names, "task_scores"}):
        raise InputError(did_you_mean(str(path), unknown[0], [*names, "task_scores"]))
    for name in names:
        if name not in arrays or arrays[name].dtype.kind not in "iu":
            given = f"{name} of {arrays[name].dtype}" if name in arrays else ", ".join(arrays)[:80]
            raise InputError(f"{path}: expected whole numbers {name}, found {given or 'nothing'}")
    after = [evaluation.pack(arrays[name]) for name in names]
    record["predictions"] = {"label": after[-1], "label_after": after}
    if "task_scores" in arrays:
        rank = task_rank(arrays["task_scores"], task_of[label])
        record["predictions"]["task_rank"] = evaluation.pack(rank)
    return record | records.measure(record)


def task_rank(
    scores: Float[np.ndarray, "n tasks"], task: Int[np.ndarray, " n"]
) -> Int[np.ndarray, " n"]:
    """Returns how many other tasks score at least as high as the true one.

    Raises:
        InputError: scores have another shape, or are not finite numbers.
    """
    shape = len(task), int(task.max()) + 1
    if scores.shape != shape:
        raise InputError(f"task_scores: expected shape {shape}, found {scores.shape}")
    if scores.dtype.kind not in "fiu" or not np.isfinite(scores).all():
        raise InputError("task_scores: expected finite numbers, found others")
    return (scores >= scores[np.arange(len(task)), task, None]).sum(axis=1) - 1
