"""Starts the command `fdc run`; see `fdc_jax/command.py`."""

import os
import sys

# Before NumPy loads: threads of OpenBLAS that wait for a busy core spin, and decompositions of a
# few hundred rows gain nothing from them. And XLA's start-up notes are of no use to a reader.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from fdc_jax import errors

if __name__ == "__main__":
    sys.path.append(os.getcwd())  # where a learner of the user's own may lie
    # From here on a signal counts; what follows takes seconds to import.
    with errors.stop_on_signals() as stop:
        from fdc_jax import command

        sys.exit(command.main(stop))
