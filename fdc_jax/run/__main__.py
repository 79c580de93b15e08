"""`python -m fdc_jax.run` is the command `fdc run`; see `fdc_jax/command/run.py`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("fdc_jax.command", run_name="__main__", alter_sys=True)
