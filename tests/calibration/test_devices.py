"""Features that are on a device stay there, on several devices with their rows shared."""

import collections

import jax
import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.calibration import compiled, inputs, sweep
from tests import small_runs
from tests.calibration import streams
from tests.errors import input_error

WIDTHS = (16,), (12,)


def test_features_on_a_device_stay_there(monkeypatch):
    """No array of features is fetched: neither by an explicit transfer, nor by an implicit one."""
    tasks, fetch, shapes = streams.known(3, 3), jax.device_get, []
    adapted, pretrained = streams.probe_inputs(tasks, size=50)
    fitted = streams.fitted(tasks)
    settings = [{"retained_energy": eta} for eta in (0.5, 0.6, 0.75, 0.95)]
    settings[2] |= {"attenuation": 0.1, "neighbours": 2}

    def device_get(tree):
        shapes.extend(leaf.shape for leaf in jax.tree.leaves(tree))
        return fetch(tree)

    placed = streams.mapped(tasks, jax.device_put, jax.device_put)
    views = jax.device_put((adapted, pretrained))
    monkeypatch.setattr(jax, "device_get", device_get)
    monkeypatch.setattr(inputs, "host_array", refuse_features)
    with jax.transfer_guard("disallow"):
        calibrator = streams.fitted(placed)
        class_scores = calibrator.class_scores(*views)
        actual = calibrator.components(*views)
        calibrator.terms(*views).standardised(1)
        for terms in streams.fit(sweep.Sweep(settings), placed).terms(*views):
            terms.fuse(nearest=True)
    np.testing.assert_allclose(class_scores, fitted.class_scores(adapted, pretrained), rtol=1e-5)
    for name, expected in fitted.components(adapted, pretrained).items():
        np.testing.assert_allclose(actual[name].task_scores, expected.task_scores, rtol=1e-5)
    rows = {len(task.rows) for task in tasks} | {50, *compiled.ROWS}  # whole, or in blocks
    assert shapes and not {*shapes} & {(count, *width) for count in rows for width in WIDTHS}


@pytest.fixture
def counted(monkeypatch):
    """Counts of waits for the device, and of blocks that are cut, by name."""
    counts = collections.Counter()

    def count(module, name):
        function = getattr(module, name)

        def counting(*arguments, **options):
            counts[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, counting)

    count(jax, "device_get")
    count(jax, "block_until_ready")
    count(compiled, "_cut")
    return counts


@pytest.mark.parametrize("put", [np.asarray, jax.device_put], ids=["host", "device"])
def test_waits_do_not_grow_with_tasks_and_rows(counted, put):
    tasks = streams.known(0, 5, samples=(30, 1300))
    calibrator = calibration.FDC()
    for task in tasks:
        counted.clear()
        with jax.transfer_guard("disallow"):
            adapted, pretrained = put(task.adapted), put(task.pretrained)
            calibrator.fit_task(adapted, task.labels, task.head, pretrained)
        waits = counted["device_get"] + counted["block_until_ready"]
        assert 3 <= waits <= 7
        blocks = compiled.blocks_of([adapted, pretrained])
        cuts = sum(len(block.starts) for block in blocks) if put is jax.device_put else 0
        assert counted["_cut"] - cuts == cuts
    calibrator.finalize()
    views = [put(view) for view in streams.probe_inputs(tasks, size=150)]
    with jax.transfer_guard("disallow"):
        calibrator.score(*views)
        counted.clear()
        calibrator.score(*views)
    assert counted == {"device_get": 1} | ({"_cut": 6} if put is jax.device_put else {})


def test_features_that_are_not_finite_are_named():
    tasks = streams.known(0, 3)
    calibrator = streams.fitted(tasks[:2])
    adapted, pretrained = jax.device_put(streams.probe_inputs(tasks))
    (task,) = streams.mapped(tasks[2:], jax.device_put, jax.device_put)
    for value in (np.nan, 1e30):
        for method in (calibrator.score, calibrator.components, calibrator.class_scores):
            with input_error("pretrained features: row 7 is not finite, or too large for float32"):
                method(adapted, pretrained.at[7, 0].set(value))
        with input_error(r"pretrained features of task 2 \(from 0\): row 5"):
            wrong = task.pretrained.at[5].set(value)
            calibrator.fit_task(task.adapted, task.labels, task.head, wrong)
    assert calibrator.num_tasks == 2


def refuse_features(value, name, read=inputs.host_array):
    assert not (isinstance(value, jax.Array) and value.shape[1:] in WIDTHS)
    return read(value, name)


SHARED = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from fdc_jax.calibration import compiled
from tests.calibration import streams
count = len(jax.devices())
assert count == 3
mesh = Mesh(np.array(jax.devices()), ("data",))
rows = NamedSharding(mesh, PartitionSpec("data"))
stream = streams.stream(3, 2, samples=(48, 120))
views = streams.probe_inputs(stream, size=48)
expected = np.load(sys.argv[1])
put = lambda view: jax.device_put(view, rows)
actual = streams.fitted(streams.mapped(stream, put, put))
for ours, theirs in zip(actual.references, expected["references"]):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
placed = [*map(put, views)]
for given in (placed, [views[0], placed[1]]):
    scores = actual.score(*given)
    assert streams.relative_error(scores.task_scores, expected["task_scores"]) < 1e-4
    np.testing.assert_array_equal(scores.label, expected["label"])
for block in compiled.blocks_of(placed)[0]:
    assert len({shard.device for shard in block.addressable_shards}) == count
    assert block.addressable_shards[0].data.shape[0] * count == block.shape[0]
for measured in actual.terms(*placed).measured[0]:
    assert len(measured.residual.sharding.device_set) == count
"""


PROGRAMS = """
import logging, jax
from fdc_jax import calibration
from tests.calibration import streams
names, logger = [], logging.getLogger("jax._src.interpreters.pxla")
class Names(logging.Handler):
    def emit(self, record):
        names.append(record.getMessage().split()[1])
logger.addHandler(Names())
logger.propagate = False
tasks = streams.known(0, 5, width=64, pretrained_width=64, classes=(2,), samples=(287, 291, 290))
views = streams.probe_inputs(tasks, size=600)
actual = calibration.FDC()
with jax.log_compiles():
    for count, task in enumerate(tasks, 1):
        streams.fit(actual, [task])
        actual.components(*(view[: 120 * count] for view in views))
print(names)
assert "measure_views" in " ".join(names) and "fuse" in " ".join(names)
assert len(names) <= 7, names
"""


@pytest.mark.ci
def test_five_tasks_compile_seven_programs():
    small_runs.python("-c", PROGRAMS)


@pytest.mark.ci
def test_sharded_rows_stay_sharded(tmp_path):
    tasks = streams.stream(3, 2, samples=(48, 120))
    fitted = streams.fitted(tasks)
    scores = fitted.score(*streams.probe_inputs(tasks, size=48))
    fields = {"task_scores": scores.task_scores, "label": scores.label}
    path = tmp_path / "expected.npz"
    np.savez(path, references=fitted.references, **fields)
    small_runs.python("-c", SHARED, path, env=small_runs.with_devices(3))
