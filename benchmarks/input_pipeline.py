"""Speed of decoding and transforming images on the host, by data, by threads and by what is kept.

    python -m benchmarks.input_pipeline --data=cifar100 --data_dir=$HOME/tensorflow_datasets
    python -m benchmarks.input_pipeline --data=jpeg,digits --workers=1,2,4 --output=input.json

`jpeg` is a folder of synthetic photographs of 500 x 375 pixels, written for the occasion. Each
contender walks over the same images once a turn, and contenders take turns, so that whatever else
the machine does slows all of them. Beside the clock, `processor` counts the seconds of all cores,
which other programs change little. Medians after a warm-up, which fills the caches:

    training             read, decode, crop, resize, mirror
    training_kept        the same from decoded images in memory (data.cache_gib)
    evaluation           read, decode, resize, crop
    evaluation_kept      the same from decoded images in memory
"""

import argparse
import collections
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.measure import numbers, parsed, parser_of, run, timed, write_report
from fdc_jax.data import batches, dataset, sources
from fdc_jax.data.batches import ByteCache
from fdc_jax.data.dataset import Dataset
from fdc_jax.machine import devices
from fdc_jax.machine.files import user_cache

PROGRAM = "benchmarks.input_pipeline"
JPEG_SIZE = (500, 375)
_LINE = (
    "{data:9} {contender:19} {workers:2} threads: {images_per_second:8.0f} images/s, "
    "{images_per_processor_second:8.0f} a processor second"
)


def photographs(root: Path, number: int) -> None:
    """Writes JPEG files of smooth colours and some noise, about 80 kB each, one of them to test."""
    rng = np.random.default_rng(0)
    for index in range(number + 1):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
        smooth = np.asarray(coarse.resize(JPEG_SIZE, Image.Resampling.BICUBIC), np.int16)
        noise = rng.integers(-12, 13, smooth.shape, np.int16)
        folder = root / ("train" if index else "test") / "photograph"
        folder.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))
        picture.save(folder / f"{index:06d}.jpg", quality=90)


def contenders(
    source: Dataset, number: int, workers: int, options: argparse.Namespace
) -> dict[str, Callable[[], Iterable[Any]]]:
    """Returns, by name, functions that start a walk over the images."""
    train = (source, np.arange(number), None, min(options.batch_size, number), 0, 0)
    evaluate = (*train[:3], options.batch_size)
    keep: dict[str, Any] = {"image_size": options.image_size, "workers": workers}
    kept: dict[str, Any] = keep | {"decoded": ByteCache(1 << 40)}
    return {
        "training": lambda: batches.TrainBatches(*train, **keep),
        "training_kept": lambda: batches.TrainBatches(*train, **kept),
        "evaluation": lambda: batches.EvaluationBatches(*evaluate, **keep),
        "evaluation_kept": lambda: batches.EvaluationBatches(*evaluate, **kept),
    }


def measure(source: Dataset, workers: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one record per contender."""
    number = min(options.images, len(source))
    starts = contenders(source, number, workers, options)
    seconds: dict[str, list[np.ndarray]] = {name: [] for name in starts}
    for _ in range(1 + options.repeats):
        for name, start in starts.items():
            seconds[name].append(timed(lambda walk=start: collections.deque(walk(), 0))[1])
    records = []
    for name, each in seconds.items():
        clock, processor = np.median(each[1:], axis=0)
        about = {"data": source.name, "contender": name, "workers": workers, "images": number}
        speeds = {
            "images_per_second": number / clock,
            "images_per_processor_second": number / processor,
        }
        records.append(about | speeds | {"seconds": {"clock": clock, "processor": processor}})
    return records


def main() -> None:
    """Measures all data with all numbers of threads and writes the records as JSON."""
    sizes = {"images": 512, "image_size": 224, "batch_size": 64, "repeats": 5}
    flags = {"data": "cifar100,jpeg", "data_dir": "", "workers": "1,2", **sizes}
    options = parsed(parser_of(__doc__, PROGRAM, **flags))
    workers = numbers(options, "workers")
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.data.split(","):
            given: dict[str, Any] = {"data_dir": options.data_dir}
            if name == "jpeg":
                photographs(Path(folder, name), options.images)
                given = {"source": f"{folder}/{name}"}
            cache = Path(folder) if name == "jpeg" else user_cache()
            source, _ = sources.open_splits(name, cache, **given)
            for number in workers:
                for record in measure(source, number, options):
                    print(_LINE.format(**record), flush=True)
                    records.append(record)
    found = {"device": devices.describe(), "cores": dataset.default_workers(), "records": records}
    write_report(PROGRAM, options, found)


if __name__ == "__main__":
    sys.exit(run(PROGRAM, main))
