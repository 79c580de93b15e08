"""Trains two tasks of every learner and runs every post-hoc method, to see what they do.

JAX_DUMP_IR_TO=FOLDER python -m tests.learners.two_tasks FOLDER_FOR_FILES

Prints a JSON object: the images that each learner looked at before and after its tasks.
"""

import contextlib
import io
import json
import sys

import jax
import numpy as np

from fdc_jax import learners, posthoc
from tests.learners import several_devices


def main(folder: str) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    asked: dict[str, list[str]] = {}
    for name in learners.names():
        kinds: set[str] = set()
        several_devices.run(learners.find(name), mesh, kinds)
        asked[name] = sorted(kinds)
    example = f"{folder}/example.npz"
    with contextlib.redirect_stdout(io.StringIO()):
        for arguments in ([f"--template={example}"], [example, "--method=all", "--quiet"]):
            assert posthoc.main(arguments) == 0
    print(json.dumps(asked))


if __name__ == "__main__":
    main(sys.argv[1])
