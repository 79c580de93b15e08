"""Learns a stream of tasks, calibrates and evaluates after every task; `fdc run` is the same.

    python main.py --config=configs/digits.py [--workdir=FOLDER] [--config.FIELD=VALUE ...]

`--help` lists all flags and fields.
"""

import sys

from fdc_jax.__main__ import load

if __name__ == "__main__":
    sys.exit(load("run")())
