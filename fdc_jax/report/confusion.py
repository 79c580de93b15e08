"""Where the images of each task went, from the stored predictions of a run."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from fdc_jax import evaluation

SHARES = (
    "right_task_right_class",
    "right_task_wrong_class",
    "wrong_task_oracle_right",
    "wrong_task_oracle_wrong",
)


def task_confusion(predictions: Mapping[str, Int[np.ndarray, " n"]]) -> dict[str, Any]:
    """Counts routes between tasks, and splits each task's images by their two decisions.

    The class given the task is that of the same scores: TSF may turn an image's class within its
    task. Runs older than `fdc_oracle_label` have that of the raw heads alone, which then stands in
    where FDC chose another task.

    Args:
        predictions: columns of `predictions.npz`.

    Returns:
        `num_images`, the test images of each task; then under `raw` and `fdc` each: `confusion`,
        numbers of images by true task (row) and chosen task (column); and the four shares of
        `evaluation.Decomposition` by name, in percent of each task's images, None for a task
        without images.

    Raises:
        InputError: columns that contradict each other.
    """
    task = np.asarray(predictions["task"])
    count = 1 + int(max(np.max(predictions[name]) for name in ("task", "raw_task", "fdc_task")))
    result: dict[str, Any] = {"num_images": np.bincount(task, minlength=count).tolist()}
    for name in ("raw", "fdc"):
        chosen, label = predictions[f"{name}_task"], predictions[f"{name}_label"]
        oracle = predictions["oracle_label"]
        if name == "fdc":
            oracle = predictions.get("fdc_oracle_label", oracle)
        oracle = np.where(chosen == task, label, oracle)
        shares: dict[str, list[float | None]] = {share: [] for share in SHARES}
        for t in range(count):
            mine = task == t
            cells: Any = {}
            if mine.any():
                columns = (task, predictions["label"], chosen, label, oracle)
                cells = evaluation.decompose(*(column[mine] for column in columns))._asdict()
            for share in SHARES:
                shares[share].append(cells.get(share))
        result[name] = {
            "confusion": evaluation.task_confusion(task, chosen, count).tolist(),
            **shares,
        }
    return result
