"""InfLoRA: increments along directions in which the inputs of earlier tasks have little energy.

Liang and Li, "InfLoRA: Interference-Free Low-Rank Adaptation for Continual Learning", CVPR 2024.
The memory is a subspace with most of the energy of earlier attention inputs. Before a task, the
columns of A (the paper's rows: its kernels are transposed) become the leading directions of the
task's attention inputs outside the memory. A, the same for key and value, stays frozen; B and the
task's linear head are trained. After the task the memory grows. The published rule (DualGPM) swaps
the memory for its complement if that is smaller; both give the same projection.

Authors' code: A A^T = I / 3; moments over all tokens of augmented images, newly drawn for each pass
(here: the images of the first epoch), not centred; energies are squared eigenvalues of the second
moment; the first task keeps the directions that stay below the threshold, later tasks those that
reach it; the threshold goes from lamb towards lame in proportion to the tasks done; uniform head
initialisation with bias; the quarter cosine. FDC paper: the method's own schedule. Inferred: this
schedule scales both learning rates; the thresholds (ports have a lamb of 0.95 on CUB-200 and
OmniBenchmark); the memory is projected out of A once more, so that columns beyond the rank of the
inputs vanish instead of pointing into the memory.

E_t, the head's input and FDC's score scales are as in Cumulative-LoRA. Decompositions run in
float64 on the host, so that close directions do not depend on rounding.
"""

import dataclasses
import math
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float64, Int
from msgspec import Meta

from fdc_jax.errors import InputError
from fdc_jax.heads import LinearHead
from fdc_jax.learners import training
from fdc_jax.learners.learner import Learner, TaskImages
from fdc_jax.learners.second_moments import attention_input_moments
from fdc_jax.model import increments, vit

NATIVE_LEARNING_RATE = 5e-4


class State(NamedTuple):
    """Increments and heads of all tasks, and the memory of earlier inputs of every block."""

    increments: vit.Increment
    heads: LinearHead
    memory: Float[Array, "l d d"]  # orthonormal columns, zero from `memory_size` on
    memory_size: Int[Array, " l"]


@dataclasses.dataclass(frozen=True)
class InfLoRA(Learner):
    """InfLoRA, as described above."""

    title = "InfLoRA"
    extra_passes = 1.0  # moments before and after
    paper_row = 4
    task_count = "the energy that is protected goes from lamb to lame in proportion to their number"
    mean_over_images = True

    lamb: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of energy to protect at the first task",
            extra={"on": {"cifar100": 0.95}},
        ),
    ] = 0.98
    lame: Annotated[
        float, Meta(gt=0, le=1, description="share of energy to approach by the last task")
    ] = 1.0

    def __post_init__(self):
        """Raises InputError if lame is less than lamb."""
        if self.lame < self.lamb:
            raise InputError(
                f"config.learner.{self.section()}.lame: expected at least lamb, {self.lamb:g}, "
                f"found {self.lame:g}"
            )

    def initial_state(self) -> State:
        """Returns empty slots for all tasks and an empty memory."""
        depth, width = self.setup.variant.depth, self.setup.variant.width
        memory, sizes = jnp.zeros((depth, width, width)), jnp.zeros(depth, jnp.int32)
        return State(*super().initial_state(), memory=memory, memory_size=sizes)

    def before_task(self, backbone: Any, state: State, task: int, images: TaskImages) -> State:
        """Returns the state with the task's A, designed from its attention inputs in E_{t-1}."""
        moments = self._moments(backbone, state, task, images)
        designed = [
            design(moment, memory, self.setup.rank)
            for moment, memory in zip(moments, _unpadded(state), strict=True)
        ]
        stack = training.with_directions(state.increments, task, np.stack(designed))
        return state._replace(increments=stack)

    def start_task(self, backbone: Any, state: State, task: int, key: Array) -> tuple[Any, Any]:
        """Returns the frozen kernels of E_{t-1} and A, and a zero B and a fresh head."""
        slot = increments.select(state.increments, task)
        A = {name: slot[name]["A"] for name in ("key", "value")}
        return super().start_task(backbone, state, task, key, A)

    def update(self) -> training.Update:
        """Returns Adam along the quarter cosine, with the paper's rates or the native one."""
        rates = training.paper_rates(self.setup)
        if self.setup.native:
            rates = dict.fromkeys(rates, NATIVE_LEARNING_RATE)
        return self.gradient_update(rates, optax.scale_by_adam(), training.quarter_cosine)

    def after_task(
        self, backbone: Any, state: State, task: int, frozen: Any, trained: Any, images: TaskImages
    ) -> State:
        """Returns the state with B and head stored and the memory grown by the task's inputs."""
        state = super().after_task(backbone, state, task, frozen, trained, images)
        moments = self._moments(backbone, state, task + 1, images)
        share = self.lamb + (self.lame - self.lamb) * task / self.setup.num_tasks
        padded = np.zeros(state.memory.shape, np.float32)
        sizes = np.zeros(state.memory_size.shape, np.int32)
        for block, (moment, memory) in enumerate(zip(moments, _unpadded(state), strict=True)):
            new = first_memory(moment, share) if task == 0 else grown_memory(moment, memory, share)
            sizes[block] = new.shape[1]
            padded[block, :, : new.shape[1]] = new
        return state._replace(memory=jnp.asarray(padded), memory_size=jnp.asarray(sizes))

    def _moments(self, backbone, state, num_tasks, images) -> Float64[np.ndarray, "l d d"]:
        """Returns the second moments of a task's attention inputs in E_t, t = `num_tasks`."""
        kernels, augmented = self.encoder(backbone, state, num_tasks), images.augmented()
        moments, _ = attention_input_moments(self.setup, backbone, kernels, augmented)
        return np.asarray(moments, np.float64)


def design(
    moment: Float64[np.ndarray, "d d"], memory: Float64[np.ndarray, "d k"], rank: int
) -> Float64[np.ndarray, "d r"]:
    """Returns the leading directions of the inputs outside the memory, of length 1/sqrt(3)."""
    outside = moment - memory @ (memory.T @ moment)
    directions = np.linalg.svd(outside)[0][:, :rank]
    return (directions - memory @ (memory.T @ directions)) / math.sqrt(3.0)


def _unpadded(state: State) -> list[Float64[np.ndarray, "d k"]]:
    """Returns the memory of every block without padding."""
    memory = np.asarray(state.memory, np.float64)
    sizes = np.asarray(state.memory_size)
    return [columns[:, :size] for columns, size in zip(memory, sizes, strict=True)]


def first_memory(moment: Float64[np.ndarray, "d d"], share: float) -> Float64[np.ndarray, "d k"]:
    """Returns the leading directions whose summed energy stays below a share, at least one."""
    left, values, _ = np.linalg.svd(moment)
    below = np.cumsum(values**2) / np.sum(values**2) < share
    return left[:, : max(int(below.sum()), 1)]


def grown_memory(
    moment: Float64[np.ndarray, "d d"], memory: Float64[np.ndarray, "d k"], share: float
) -> Float64[np.ndarray, "d m"]:
    """Returns the memory with the fewest new directions that let it hold a share of the energy."""
    total = np.sum(moment**2)
    left, values, _ = np.linalg.svd(moment - memory @ (memory.T @ moment))
    held = 1.0 - np.sum(values**2) / total
    if held >= share:
        return memory
    too_few = held + np.cumsum(values**2) / total < share
    size = memory.shape[1]
    new = left[:, : min(int(too_few.sum()) + 1, len(moment) - size)]
    # The memory was rounded to float32: faint directions are not quite orthogonal to it.
    orthonormal = np.linalg.qr(np.concatenate([memory, new], axis=1))[0]
    return np.concatenate([memory, orthonormal[:, size:]], axis=1)
