"""SLCA: the whole encoder trained slowly, heads aligned on pseudo-features.

G. Zhang et al., "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a
Pre-trained Model", ICCV 2023. Every parameter of the encoder is trained through all tasks, a
hundred times more slowly than the head of the task, with the cross-entropy over the task's own
classes; there is no increment and no penalty. When a task ends, a Gaussian is fitted to the
features of each of its classes. From the second task on copies of all heads are then trained on
features drawn from all Gaussians, which stay as they were; the next alignment starts from the heads
as their tasks left them, not from aligned ones.

Stated: rates of 1e-4 (encoder) and 1e-2 (head).
Authors' code: SGD with momentum 0.9, a head of normal weights with deviation 0.02 and no bias;
ridge 1e-4, 256 features per class and epoch in batches of 256, drawn anew in each of five epochs,
SGD at 1e-2 with momentum 0.9 and decay 5e-4 along half a cosine wave, means of task j after t tasks
times 0.9 + 0.1 j / t, and logits divided by 0.1 times their mean norm per task. The native preset
adds a decay of 5e-4 to the training and takes a tenth of the rates after nine tenths of the epochs
on CIFAR-100 (epoch 18 of 20), after eight tenths elsewhere (40 of 50).
Inferred: the protocol, which the FDC paper does not have for this method. It keeps the authors'
optimiser and rates, since those of `config.train`, which are not read, are meant for increments and
Adam. It has no decay, and `train.schedule`. And which head the score scale comes from, as for
InfLoRA+CA. Left out: that code exchanges the final norm of its encoder for a new one.

E_0 is the pretrained encoder; E_t is all parameters after task t, and the E_t before it cannot be
had again. The score scale of a task comes from its head after the alignment at its own end;
prediction takes the heads after the last alignment. Beside E_0, training holds the state's encoder,
the one in training, its momentum and its gradients, 343 MB each of ViT-B/16; a checkpoint holds the
first, within a task the first three. The Gaussians stay on the host, 708 MB for 300 classes.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fdc_jax.heads import Head, LinearHead
from fdc_jax.learners import gaussian_alignment, training
from fdc_jax.learners.gaussian_alignment import ClassGaussians
from fdc_jax.learners.learner import Learner, Replaced, option
from fdc_jax.model import increments, vit

MOMENTUM, DECAY = 0.9, 5e-4
# The tenth of the epochs after which the native rates are a tenth.
MILESTONES = {"cifar100": 9}
MILESTONE = 8
# Of the alignment, and what is added to the variances of a class.
ALIGNMENT_RATE, RIDGE = 1e-2, 1e-4


class State(NamedTuple):
    """The encoder as the last task left it, heads as their tasks did and aligned, and Gaussians.

    The encoder is zero until a task is learned.
    """

    encoder: Any
    heads: LinearHead
    aligned: LinearHead
    gaussians: ClassGaussians


@dataclasses.dataclass(frozen=True)
class SLCA(Learner):
    """SLCA, as described above."""

    title = "SLCA"
    mean_over_images = True

    encoder_rate: float = option(1e-4, "(0, inf)", "of all of the encoder, not train's")
    head_rate: float = option(1e-2, "(0, inf)", "of the task's head, not train's")
    alignment_epochs: int = option(5, "[0, inf)", "of the heads of all tasks; 0: none")
    logit_temperature: float = option(0.1, "[0, inf)", "of normalised logits; 0: as they are")

    # 1. What it keeps between tasks.
    def initial_state(self) -> State:
        """Returns a zero encoder and empty slots."""
        setup, width = self.setup, self.setup.variant.width
        tasks, rows = setup.num_tasks, setup.head_rows
        model: Any = setup.model
        shapes = vit.parameter_shapes(model, setup.config.encoder.image_size)
        empty = LinearHead(jnp.zeros((tasks, rows, width)), jnp.zeros((tasks, rows)))
        return State(
            encoder=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
            heads=empty,
            aligned=jax.tree.map(jnp.copy, empty),
            gaussians=gaussian_alignment.empty(tasks, rows, width),
        )

    # 3. What it trains, and how.
    def start_task(self, backbone, state: State, task, key):
        """Returns the classes and the key of the alignment, and all of the encoder and a head."""
        of_head, of_alignment = jax.random.split(key)
        rows, width = self.setup.head_rows, self.setup.variant.width
        frozen = {
            "class_mask": self.setup.class_mask(task),
            "alignment": jax.random.key_data(of_alignment),
        }
        # Copies, since a step gives its arguments' memory away.
        encoder = jax.tree.map(jnp.copy, state.encoder if task > 0 else backbone)
        head = LinearHead(training.new_cosine_rows(of_head, rows, width), jnp.zeros(rows))
        return frozen, {"encoder": encoder, "head": head}

    def loss(self, backbone, frozen, trained, batch):
        """Returns the cross-entropy over the task's own classes."""
        replaced = vit.AllParameters(parameters=trained["encoder"])
        logits = trained["head"].logits(self.features(backbone, batch, replaced))
        return training.cross_entropy(logits, batch, frozen["class_mask"])

    def update(self) -> training.Update:
        """Returns SGD with momentum at the learner's own rates."""
        rates = {"encoder": self.encoder_rate, "head": self.head_rate}
        if not self.native:
            return self.gradient_update(rates, optax.trace(MOMENTUM))
        tenths = MILESTONES.get(self.setup.config.benchmark, MILESTONE)
        return self.gradient_update(
            rates, _decayed(), lambda epoch, epochs: 0.1 if 10 * epoch >= tenths * epochs else 1.0
        )

    # 4. What it does when a task ends.
    def after_task(self, backbone, state: State, task, frozen, trained, images) -> State:
        """Returns the state with encoder and head stored, Gaussians fitted and heads aligned."""
        heads = increments.store(state.heads, task, trained["head"])
        features, labels = gaussian_alignment.class_features(
            self.setup.model,
            backbone,
            vit.AllParameters(parameters=trained["encoder"]),
            images.plain(),
        )
        classes = self.setup.classes_per_task[task]
        gaussians = gaussian_alignment.fit_task(
            state.gaussians, task, features, labels, classes, RIDGE
        )
        aligned = heads
        if task > 0:
            rates = training.learning_rates("cosine", self.alignment_epochs, ALIGNMENT_RATE)
            seen = self.setup.classes_of_first(task + 1)
            key = jax.random.wrap_key_data(frozen["alignment"])
            aligned = self._alignment(heads, gaussians, seen, rates, key)
        return State(trained["encoder"], heads, aligned, gaussians)

    @functools.cached_property
    def _alignment(self):
        """One compiled alignment for all tasks."""
        return gaussian_alignment.linear_retraining(_decayed(), self.logit_temperature)

    # 5. What it offers for inference.
    def encoder(self, backbone, state: State, num_tasks) -> Replaced:
        """Returns all parameters of the newest encoder, for 0 the pretrained kernels.

        Raises:
            InputError: it is neither E_0 nor that after the tasks of `state`: no other is kept.
        """
        if num_tasks == 0:
            return vit.pretrained_kernels(backbone)
        training.require_newest(self.title, state.heads.weight, num_tasks)
        return vit.AllParameters(parameters=state.encoder)

    def heads(self, state: State, num_tasks) -> list[Head]:
        """Returns the heads of the first `num_tasks` tasks as the last alignment left them."""
        return training.unpadded(self.setup, state.aligned, num_tasks)


def _decayed() -> optax.GradientTransformation:
    """Returns SGD with momentum and decay, as PyTorch has it."""
    return optax.chain(optax.add_decayed_weights(DECAY), optax.trace(MOMENTUM))
