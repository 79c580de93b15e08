"""FDC and its comparators on anybody's features: `python -m fdc_jax posthoc features.npz`."""

import os

# Before NumPy loads: threads of OpenBLAS that wait for a busy core spin, and decompositions of a
# few hundred rows gain nothing from them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
