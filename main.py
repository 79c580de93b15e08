"""The command `fdc run` in a clone; see `fdc_jax/command.py`.

python main.py --config=configs/digits.py [--workdir=FOLDER] [--config.FIELD=VALUE ...]
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("fdc_jax.run", run_name="__main__", alter_sys=True)
