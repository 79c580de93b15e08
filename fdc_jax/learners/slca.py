"""SLCA: slow training of the whole encoder, heads aligned on pseudo-features.

G. Zhang et al., "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a
Pre-trained Model", ICCV 2023. Every task trains all parameters of the encoder, at a hundredth of
the rate of the task's head, with the cross-entropy over the task's own classes; there is neither an
increment nor a penalty. When a task ends, a Gaussian is fitted to the features of each of its
classes. From the second task on copies of all heads are then trained on features drawn from all
Gaussians, which stay unchanged; the next alignment starts from the heads before any alignment.

Stated: rates of 1e-4 (encoder) and 1e-2 (head). Authors' code: SGD with momentum 0.9, a head of
normal weights with deviation 0.02 and zero bias; the native alignment of InfLoRA+CA. Inferred: the
protocol, as the FDC paper does not include this method: the authors' optimiser and rates, no decay,
and `train.schedule`; the head of the score scale, as for InfLoRA+CA. Left out: that code replaces
the final norm of its encoder by a new one.

E_0 is the pretrained encoder; E_t is all parameters after task t, and only the newest is kept.
"""

import dataclasses
import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from msgspec import Meta

from fdc_jax.data.batches import Batch
from fdc_jax.heads import Head, LinearHead
from fdc_jax.learners import gaussian_alignment, training
from fdc_jax.learners.gaussian_alignment import ClassGaussians
from fdc_jax.learners.learner import Learner, Replaced, TaskImages
from fdc_jax.model import increments, vit

DECAY = 5e-4
# Tenths of the epochs after which the native rates drop to a tenth.
MILESTONES = {"cifar100": 9}
MILESTONE = 8
# Learning rate of the alignment, and the term on the diagonal of a covariance.
ALIGNMENT_RATE, RIDGE = 1e-2, 1e-4


class State(NamedTuple):
    """The newest encoder, all heads before and after alignment, and a Gaussian of each class."""

    encoder: Any  # zero before the end of the first task
    heads: LinearHead
    aligned: LinearHead
    gaussians: ClassGaussians


@dataclasses.dataclass(frozen=True)
class SLCA(Learner):
    """SLCA, as described above."""

    title = "SLCA"
    extra_passes = 0.5  # class features
    mean_over_images = True

    encoder_rate: Annotated[
        float, Meta(gt=0, description="of the whole encoder, in place of train's")
    ] = 1e-4
    head_rate: Annotated[
        float, Meta(gt=0, description="of the task's head, in place of train's")
    ] = 1e-2
    alignment_epochs: Annotated[int, Meta(ge=0, description="of all heads; 0: no alignment")] = 5
    logit_temperature: Annotated[
        float, Meta(ge=0, description="of normalised logits; 0: no normalisation")
    ] = 0.1

    def initial_state(self) -> State:
        """Returns a zero encoder, and empty slots for all tasks."""
        model: Any = self.setup.model
        shapes = vit.parameter_shapes(model, self.setup.image_size)
        encoder = jax.tree.map(jnp.zeros_like, shapes)
        heads = super().initial_state().heads
        gaussians = gaussian_alignment.empty(*heads.weight.shape)
        return State(encoder, heads, jax.tree.map(jnp.copy, heads), gaussians)

    def start_task(self, backbone: Any, state: State, task: int, key: Array) -> tuple[Any, Any]:
        """Returns the frozen key of the alignment, and the encoder and a fresh head to train."""
        head_key, alignment_key = jax.random.split(key)
        rows, width = self.setup.head_rows, self.setup.variant.width
        frozen = {
            "class_mask": self.setup.class_mask(task),
            "alignment": jax.random.key_data(alignment_key),
        }
        # Copies, since a step donates the memory of its arguments.
        encoder = jax.tree.map(jnp.copy, state.encoder if task > 0 else backbone)
        head = LinearHead(training.new_cosine_rows(head_key, rows, width), jnp.zeros(rows))
        return frozen, {"encoder": encoder, "head": head}

    def loss(self, backbone: Any, frozen: Any, trained: Any, batch: Batch) -> Float[Array, ""]:
        """Returns the cross-entropy over the task's own classes."""
        replaced = vit.AllParameters(parameters=trained["encoder"])
        logits = trained["head"].logits(self.features(backbone, batch, replaced))
        return training.cross_entropy(logits, batch, frozen["class_mask"])

    def update(self) -> training.Update:
        """Returns SGD with momentum at the learner's own rates."""
        rates = {"encoder": self.encoder_rate, "head": self.head_rate}
        if not self.setup.native:
            return self.gradient_update(rates, training.sgd())
        tenths = MILESTONES.get(self.setup.benchmark, MILESTONE)

        def schedule(epoch: int, epochs: int) -> float:
            return 0.1 if 10 * epoch >= tenths * epochs else 1.0

        return self.gradient_update(rates, training.sgd(DECAY), schedule)

    def after_task(
        self, backbone: Any, state: State, task: int, frozen: Any, trained: Any, images: TaskImages
    ) -> State:
        """Returns the state with encoder and head stored, new Gaussians and aligned heads."""
        setup, heads = self.setup, increments.store(state.heads, task, trained["head"])
        encoder = vit.AllParameters(parameters=trained["encoder"])
        features, labels = images.features(encoder)
        gaussians = gaussian_alignment.fit_task(
            state.gaussians, task, features, labels, setup.classes_per_task[task], RIDGE
        )
        aligned = heads
        if task > 0:
            key = jax.random.wrap_key_data(frozen["alignment"])
            aligned = self._align(heads, gaussians, setup.classes_of_first(task + 1), key)
        return State(trained["encoder"], heads, aligned, gaussians)

    @functools.cached_property
    def _align(self):
        """The training of heads on features drawn from Gaussians, compiled once for all tasks."""
        return gaussian_alignment.linear_retraining(
            training.sgd(DECAY), self.alignment_epochs, ALIGNMENT_RATE, self.logit_temperature
        )

    def encoder(self, backbone: Any, state: State, num_tasks: int) -> Replaced:
        """Returns all parameters of the newest encoder; the pretrained kernels for E_0.

        Raises:
            InputError: the encoder is neither E_0 nor the newest.
        """
        if num_tasks == 0:
            return vit.pretrained_kernels(backbone)
        training.require_newest(self.title, state.heads.weight, num_tasks)
        return vit.AllParameters(parameters=state.encoder)

    def heads(self, state: State, num_tasks: int) -> list[Head]:
        """Returns the heads of the first `num_tasks` tasks after the last alignment."""
        return training.unpadded(self.setup, state.aligned, num_tasks)
