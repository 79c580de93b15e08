"""Features and calibrators of a large set of images as one pipeline of Ray Data.

    images = ray.data.read_parquet(...)   # rows with `task`, `row`, `label` and what `encode` reads
    fitted = fit(images, load_encoders, workers=8)
    fitted["gaussians"].save("calibrator.npz")

Actors hold the encoders, and take blocks of images in whatever order. What a task leaves is fitted
where its features come together, and sent back alone; one merge joins the tasks in their order. A
worker that dies is replaced and its blocks are computed again, and the arrays are byte by byte
those of one machine that fitted the same features in the order of `row`, but for the confidence of
`gaussians`, which joined tasks do not teach.
"""

import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray.data

from fdc_jax import calibration
from fdc_jax.calibration import Calibrator

# From the columns of a block of images to `adapted` [n, d] and, where there are some, `pretrained`
# and `previous`, features by the encoders after the task, before all and before the task.
Encode = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]

METHODS = ("gaussians", "mahalanobis", "ncm")


class Encoder:
    """An actor's encoders, loaded once."""

    def __init__(self, load: Callable[[], Encode]) -> None:
        self.encode = load()

    def __call__(self, block: dict[str, np.ndarray]) -> dict[str, Any]:
        """Returns the features of a block in place of its images."""
        kept = {name: block[name] for name in ("task", "row", "label")}
        return kept | {name: np.asarray(each) for name, each in self.encode(block).items()}


def of_one_task(
    rows: dict[str, np.ndarray], methods: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what the features of one task leave, pickled, by method."""
    order, task = np.argsort(rows["row"]), int(rows["task"][0])
    views = {
        name: np.stack(rows[name][order])
        for name in ("adapted", "pretrained", "previous")
        if name in rows and not (name == "previous" and task == 0)
    }
    fitted = []
    for method in methods:
        calibrator = calibration.make(method, **settings)
        calibrator.first = task
        calibrator.fit_task(labels=rows["label"][order], **views)
        fitted.append(calibrator)
    return {"task": np.array([task]), "fitted": np.array([pickle.dumps(fitted)], object)}


def fit(
    images: ray.data.Dataset,
    load: Callable[[], Encode],
    methods: Sequence[str] = METHODS,
    workers: int = 2,
    batch_size: int = 256,
    **settings: Any,
) -> dict[str, Calibrator]:
    """Returns calibrators by name, fitted on all tasks of a data set.

    Args:
        images: with the integers `task` from 0, `row`, which orders a task's images, and `label`.
        load: called once in every actor, returns its encoders.
        methods: those that need no head, and one pass.
        workers: actors with an encoder each.
        batch_size: images in a block.
        settings: of the methods.

    Raises:
        InputError: a task is missing, or the calibrators refuse one.
    """
    features = images.map_batches(
        Encoder, fn_constructor_args=(load,), concurrency=workers, batch_size=batch_size
    )
    leave = functools.partial(of_one_task, methods=tuple(methods), settings=settings)
    parts = features.groupby("task").map_groups(leave, batch_format="numpy").take_all()
    whole: list[Any] = []
    for part in sorted(parts, key=lambda each: each["task"]):
        fitted = pickle.loads(part["fitted"])
        if whole:
            for calibrator, piece in zip(whole, fitted, strict=True):
                calibrator.join(piece)
        else:
            whole = fitted
    for calibrator in whole:
        calibrator.finalize()
    return dict(zip(methods, whole, strict=True))
