"""Joint training: all classes as one task, an upper bound.

An increment and a linear head learn all images at once, with the epochs and rates of the others.
"""

import dataclasses

from fdc_jax.learners.learner import Learner


@dataclasses.dataclass(frozen=True)
class Joint(Learner):
    """Joint training, as described above."""

    title = "Joint training"
    paper_row = 103
    mean_over_images = True
    joint = True
