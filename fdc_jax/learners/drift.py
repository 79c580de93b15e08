"""Where the feature means of earlier classes lie now, without an image of them.

The features of the new task's images are known before and after the encoder changed. A mean moves
as the images near it moved (SDC, Yu et al., CVPR 2020).
"""

import numpy as np
from jaxtyping import Float, Float64

# Added to every weight: far from all images a mean moves as they move on average.
WEIGHT_FLOOR = 1e-5


def moved_means(
    means: Float[np.ndarray, "c d"],
    before: Float[np.ndarray, "n d"],
    after: Float[np.ndarray, "n d"],
    width: float,
) -> Float64[np.ndarray, "c d"]:
    """Returns the means, each moved by a weighted mean of `after - before`, in float64.

    The weights of a mean are exp(-|before - mean|^2 / (2 width^2)) + 1e-5.

    Args:
        means: of classes whose images are gone.
        before: features of images by the encoder that the means belong to.
        after: features of the same images, in the same order, by the new encoder.
        width: sigma, in the units of the features.
    """
    means, before, after = (np.asarray(array, np.float64) for array in (means, before, after))
    squares = np.sum(means**2, axis=1)[:, None] - 2.0 * means @ before.T
    squares = np.maximum(squares + np.sum(before**2, axis=1), 0.0)
    weights = np.exp(-squares / (2.0 * width**2)) + WEIGHT_FLOOR
    return means + weights @ (after - before) / weights.sum(axis=1, keepdims=True)
