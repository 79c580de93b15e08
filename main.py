"""Learns a stream of tasks, calibrates and evaluates after every task; `fdc run` is the same.

    python main.py --config=configs/digits.py [--workdir=FOLDER] [--config.FIELD=VALUE ...]

`--help` lists all flags and fields.
"""

import signal

from fdc_jax.__main__ import end_at_once

if __name__ == "__main__":
    signal.signal(signal.SIGINT, end_at_once)
    import functools

    from fdc_jax.errors import stop_on_signals

    with stop_on_signals() as stop:
        from absl import app

        from fdc_jax import command

        app.run(functools.partial(command.main, stop), flags_parser=command.parse)
