"""The command `fdc run` in a clone; see `fdc_jax/command.py`.

python main.py --config=configs/digits.py [--workdir=FOLDER] [--config.FIELD=VALUE ...]
"""

import sys

from fdc_jax.__main__ import main

if __name__ == "__main__":
    sys.argv.insert(1, "run")
    main()
