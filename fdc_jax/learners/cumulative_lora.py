"""Cumulative-LoRA: the paper's reference, an increment and a linear head for each task.

A task trains a new increment of the key and value kernels and a new head with the cross-entropy
over its own classes (paper, Eq. intro-erm). Increments and heads of earlier tasks stay unchanged;
all increments act together at inference. All methods are the defaults of `Learner`.

Stated: Adam, no weight decay, learning rates 5e-4 (increment) and 5e-3 (head), rank 10, 20 epochs,
batch 64, for all learners of the paper. Unknown: the schedule, and the start of increments and
heads. docs/choices.md lists the open choices of all learners, docs/learners.md their costs and
their presets `native`; for Cumulative-LoRA both presets are the same.

E_0 is the pretrained encoder, E_t has the first t increments merged; the head's input is the class
token after the final norm; FDC's score scales come from the trained head, which never changes.
"""

import dataclasses

from fdc_jax.learners.learner import Learner


@dataclasses.dataclass(frozen=True)
class CumulativeLoRA(Learner):
    """Cumulative-LoRA, as described above."""

    title = "Cumulative-LoRA"
    paper_row = 0
    mean_over_images = True
