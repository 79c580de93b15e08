"""The number of programs that a run compiles, by task."""

import pytest

from tests import small_runs

# Learns the digits and logs the programs that are compiled before and after every evaluation.
DIGITS = """
import logging, sys
import jax
from configs import digits
from fdc_jax.run import configuration, experiment, seeds
names, by_task, logger = [], [], logging.getLogger("jax._src.interpreters.pxla")
class Names(logging.Handler):
    def emit(self, record):
        names.append(record.getMessage().split()[1])
logger.addHandler(Names())
logger.propagate = False
evaluate = experiment.evaluate
def evaluated(*arguments):
    record = evaluate(*arguments)
    by_task.append(list(names))
    names.clear()
    return record
experiment.evaluate = evaluated
config = digits.get_config()
fields = {"train.epochs": 1, "data.train_per_class": 16, "report": False}
fields["cache_dir"] = sys.argv[2]
config.update_from_flattened_dict(fields)
with jax.log_compiles():
    seeds.run(configuration.typed(config), sys.argv[1], quiet=True)
print(*by_task, names, sep="\\n")
assert len(by_task) == 5
# The test images of five tasks are the first to fill a block of 512 rows.
assert not any(by_task[2:4]), by_task[2:]
assert len(by_task[4]) <= 2, by_task[4]
assert sum(map(len, by_task)) + len(names) <= 70
measured = [name for compiled in by_task for name in compiled if "measure" in name]
assert len(measured) <= 4, measured
"""


@pytest.mark.ci
def test_digits_compile_nothing_after_the_second_task(tmp_path, cache):
    """Images are divided among devices, so that there are no fewer programs than on one."""
    command = ("-c", DIGITS, tmp_path, cache)
    small_runs.python(*command, env=small_runs.with_devices(2))
