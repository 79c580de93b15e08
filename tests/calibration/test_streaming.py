"""Features from sources, memory maps, other libraries, number types and devices."""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax import heads
from fdc_jax.calibration import inputs
from fdc_jax.calibration.components import WHITENED, WHITENED_CLASSES
from fdc_jax.errors import InputError
from tests import small_runs
from tests.calibration import streams

LONG = (1300, 40, 700)


def chunked(task, size, pretrained=True, calls=None):
    """Returns a source that gives the task in chunks of `size` rows."""

    def source():
        if calls is not None:
            calls.append(size)
        for start in range(0, len(task.rows), size):
            rows = slice(start, start + size)
            yield (
                task.adapted[rows],
                task.pretrained[rows] if pretrained else None,
                task.labels[rows],
            )

    return source


def fitted_from(tasks, source_of, **settings):
    calibrator = streams.new(**settings)
    for task in tasks:
        calibrator.fit_task(source_of(task), None, streams.head_of(task, "linear"))
    calibrator.finalize()
    return calibrator


@pytest.mark.parametrize("size", [64, inputs.BLOCK_ROWS, 5000])
@pytest.mark.parametrize("settings", [{}, WHITENED, WHITENED_CLASSES])
@pytest.mark.parametrize("dual", [True, False])
def test_a_source_equals_arrays(dual, settings, size):
    stream = streams.stream(0, 3, samples=LONG, offset=0.0 if size == 64 else 30.0)
    calls: list[int] = []
    found = fitted_from(stream, lambda task: chunked(task, size, dual, calls), **settings)
    assert len(calls) == 2 * len(stream)
    whole = streams.fitted(stream, dual=dual, **settings)
    probe = streams.probe_inputs(stream)[: 1 + dual]
    # Blocks are the same whatever the chunks, hence so are the scores.
    streams.same_scores(found, whole, probe)
    # What is known of a task never changes when others follow.
    first = streams.fitted(stream[:1], dual=dual, **settings)
    for ours, theirs in zip(first.tasks[0].views, whole.tasks[0].views, strict=True):
        np.testing.assert_array_equal(ours.basis, theirs.basis)
    if settings:
        assert first.affinities[0][0][1:] == whole.affinities[0][0][1:]


def test_long_tasks_equal_the_reference():
    stream = streams.stream(1, 3, samples=LONG, offset=30.0)
    probe = streams.probe_inputs(stream)
    for kind in ("linear", "function"):
        expected = streams.fitted_reference(stream, kind).score(*probe)[0]
        found = streams.fitted(stream, kind).score(*probe).task_scores
        assert streams.relative_error(found, expected) < 1e-4


def test_messages_of_sources():
    task = streams.stream(4, 1)[0]
    head = streams.head_of(task, "linear")
    once = iter(list(chunked(task, 20)()))

    def broken(part):
        chunks = list(chunked(task, 20)())
        chunks[2] = part(*chunks[2])
        return lambda: chunks

    cases = [
        (lambda: once, "task 0: the second pass gave other samples than the first"),
        (lambda: [], "task 0: expected at least one sample"),
        (lambda: 3, "source of task 0: expected an iterable of chunks, found int"),
        (broken(lambda a, p, y: (a, p)), "source of task 0: expected .adapted, pretrained or None"),
        (broken(lambda a, p, y: (a, None, y)), "earlier samples had some, these have none"),
        (broken(lambda a, p, y: (a[:, 1:], p, y)), "adapted features of task 0: expected width 16"),
        (broken(lambda a, p, y: (a, p * np.nan, y)), "pretrained features of task 0: row 40 is"),
        (broken(lambda a, p, y: (a, p, y[1:])), "labels of task 0: expected 20 rows"),
    ]
    for source, message in cases:
        with pytest.raises(InputError, match=message):
            streams.new().fit_task(source, None, head)
    with pytest.raises(InputError, match="labels and pretrained must be None"):
        streams.new().fit_task(chunked(task, 20), task.labels, head)


def test_a_source_may_reuse_its_buffers():
    stream = streams.stream(5, 2, samples=LONG)

    def reusing(task):
        def source():
            buffers = [np.empty((64, 16), np.float32), np.empty((64, 12), np.float32)]
            for adapted, pretrained, labels in chunked(task, 64)():
                for buffer, values in zip(buffers, (adapted, pretrained), strict=True):
                    buffer[: len(values)] = values
                yield buffers[0][: len(labels)], buffers[1][: len(labels)], labels

        return source

    found = fitted_from(stream, reusing)
    streams.same_scores(found, streams.fitted(stream), streams.probe_inputs(stream))


def test_memory_maps_are_read_block_by_block(tmp_path, monkeypatch):
    task = streams.stream(6, 1, samples=LONG)[0]
    np.save(tmp_path / "features.npy", task.adapted)
    features = np.load(tmp_path / "features.npy", mmap_mode="r")
    largest = []
    convert = inputs.float32

    def watched(array):
        if isinstance(array, np.memmap):
            largest.append(len(array))
        return convert(array)

    monkeypatch.setattr(inputs, "float32", watched)
    found = streams.new()
    found.fit_task(features, task.labels, streams.head_of(task, "linear"))
    assert max(largest) == inputs.BLOCK_ROWS and sum(largest) == 2 * len(features)
    found.finalize()
    streams.same_scores(found, streams.fitted([task], dual=False), [features[:9]])


class ArrayTensor:
    """An array of another library: offers one protocol and nothing else."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array, dtype)


class DlpackTensor:
    def __init__(self, array):
        self.__dlpack_device__ = array.__dlpack_device__
        self.__dlpack__ = array.__dlpack__


@pytest.mark.parametrize("convert", [ArrayTensor, DlpackTensor, jnp.asarray])
def test_arrays_of_other_libraries(convert):
    stream, device = streams.stream(7, 2), convert is jnp.asarray  # which stays on the device
    found = streams.new(device)
    for task in stream:
        head = heads.LinearHead(jnp.asarray(task.weight), jnp.asarray(task.bias))
        views = convert(task.adapted), convert(task.labels), head, convert(task.pretrained)
        found.fit_task(*views)
    found.finalize()
    probe = streams.probe_inputs(stream, size=300)
    expected = streams.fitted(stream, device=device).score(*probe)
    scores = found.score(*map(convert, probe))
    np.testing.assert_array_equal(scores.task_scores, expected.task_scores)


@pytest.mark.parametrize(
    ("dtype", "convert"),
    [
        (jnp.bfloat16, np.asarray),
        (jnp.bfloat16, jnp.asarray),
        (np.float16, np.asarray),
        (np.float16, jnp.asarray),
        (np.float64, np.asarray),
    ],
)
def test_number_types_are_widened_before_any_statistic(dtype, convert):
    stream = streams.stream(8, 2, samples=LONG)

    def given(view):
        return convert(view.astype(dtype))

    def widened(view):
        return view.astype(dtype).astype(np.float32)

    found, expected = (
        streams.fitted(streams.mapped(stream, change, change))
        .score(*map(change, streams.probe_inputs(stream)))
        .task_scores
        for change in (given, widened)
    )
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


SHARDED = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from fdc_jax import calibration
from tests.calibration import streams

assert len(jax.devices()) == 4
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
split = NamedSharding(mesh, PartitionSpec("data"))
stream = streams.stream(9, 2, samples=(600, 48))
probe = streams.probe_inputs(stream)
on_host = streams.fitted(stream)
on_host.save(sys.argv[1])
on_device = calibration.load(sys.argv[1])
place = {
    "sharded": lambda array: jax.device_put(array, split),
    "elsewhere": lambda array: jax.device_put(array, jax.devices()[2]),
}
for name, put in place.items():
    spread = streams.fitted(streams.mapped(stream, put, put))
    for found, expected in ((on_device, on_device), (spread, on_host)):
        scores = found.score(*map(put, probe)).task_scores
        np.testing.assert_array_equal(scores, expected.score(*probe).task_scores, name)
print("equal")
"""


def test_arrays_on_several_devices(tmp_path):
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path / "calibrator.npz")],
        env=small_runs.with_devices(4) | {"PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "equal"
