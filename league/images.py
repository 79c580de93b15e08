"""The league's images as folders: for runs of this package, and for other code."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fdc_jax.data.dataset import Dataset
from fdc_jax.data.task_stream import TaskStream
from fdc_jax.errors import InputError
from fdc_jax.machine.files import write_folder_atomically, write_json, write_manifest
from league import settings

# By split and class, the first 12 hexadecimal digits of each image's `pixels_sha256`.
LIST = Path(__file__).with_name("images.json")


Listed = dict[str, list[str]]  # by class


def rows(split: Dataset, wanted: Listed) -> dict[str, list[int]]:
    """Returns the rows of the listed images by class; the split may have any order.

    Raises:
        InputError: a listed image is missing.
    """
    kinds = (split.class_names[label] for label in split.labels.tolist())
    pairs = zip(kinds, (pixels.hex()[:12] for pixels in split.pixel_hashes()), strict=True)
    row_of = {pair: row for row, pair in enumerate(pairs)}
    pairs = [(kind, checksum) for kind in wanted for checksum in wanted[kind]]
    missing = [pair for pair in pairs if pair not in row_of]
    if missing:
        raise InputError(
            f"{split.name}, split {split.split}: expected the images of {LIST.name}, "
            f"{len(missing)} are missing, among them {' '.join(missing[0])}"
        )
    return {kind: [row_of[kind, checksum] for checksum in wanted[kind]] for kind in wanted}


def write_listed(folder: str | Path, splits: Sequence[Dataset], listed: dict[str, Listed]) -> None:
    """Writes the listed images of splits as SPLIT/CLASS/NUMBER.png, numbered as in the list."""
    chosen = {split.split: rows(split, listed[split.split]) for split in splits}
    with write_folder_atomically(folder) as temporary:
        for split in splits:
            for kind, indices in chosen[split.split].items():
                _save(split, indices, temporary / split.split / kind)


def export(folder: str | Path, tasks: TaskStream) -> None:
    """Writes the images of a protocol for other code, with `protocol.json` and a manifest.

    Names of class folders begin with the position in the class order, so that the order of folders
    and files is the order of labels and rows.
    """
    with write_folder_atomically(folder) as temporary:
        train = np.concatenate(tasks.train_indices)
        for split, indices in ((tasks.train, train), (tasks.test, tasks.test_indices)):
            position = tasks.positions[split.labels[indices]]
            for at, name in enumerate(tasks.class_names):
                of_class = indices[position == at].tolist()
                _save(split, of_class, temporary / split.split / f"{at:03d}_{name}")
        protocol = {
            "class_order": tasks.class_names,
            "classes_per_task": list(tasks.classes_per_task),
            "test_images": np.bincount(tasks.test_labels).tolist(),
            "data": {"train_sha256": tasks.train.checksum, "test_sha256": tasks.test.checksum},
            "weights": settings.WEIGHTS_SHA256,
        }
        write_json(temporary / "protocol.json", protocol)
        write_manifest(temporary)


def _save(split: Dataset, indices: Sequence[int], folder: Path) -> None:
    folder.mkdir(parents=True)
    for number, index in enumerate(indices):
        split.image(index).save(folder / f"{number:05d}.png")
