"""Small random encoders of every family, and what timm and transformers made of them.

The libraries built the models by their own classes and saved weights, in half precision, and
configurations; features are in double precision, also with an increment added to the key and value
projections. CONTRIBUTING.md has the steps for a further family.
"""

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "golden" / "encoders"
FEATURES = FOLDER / "features.npz"
FAMILIES = tuple(sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir()))
WIDTH, DEPTH, HIDDEN, PATCH, SIDE, RANK = 24, 2, 20, 4, 12, 2


def images(side: int = SIDE) -> np.ndarray:
    """Returns images of noise."""
    return np.random.default_rng(side).integers(0, 256, (3, side, side, 3), np.uint8)


def increment() -> dict[str, dict[str, np.ndarray]]:
    """Returns factors for the key and value kernels of all blocks."""
    rng = np.random.default_rng(5)
    factors = {}
    for part in ("key", "value"):
        a = rng.normal(0, 0.3, (DEPTH, WIDTH, RANK)).astype(np.float32)
        b = rng.normal(0, 0.3, (DEPTH, RANK, WIDTH)).astype(np.float32)
        factors[part] = {"A": a, "B": b}
    return factors
