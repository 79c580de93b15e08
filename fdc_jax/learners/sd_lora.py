"""SD-LoRA: earlier increments as directions with trained magnitudes.

Y. Wu et al., "SD-LoRA: Scalable Decoupled Low-Rank Adaptation for Class Incremental Learning",
ICLR 2025. While task t trains (tasks counted from 1), every key and value kernel is

    W_0 + sum over i < t of m_i A_i B_i / (|A_i| |B_i|) + m_t A_t B_t

with Frobenius norms. A_t, B_t, the new head and all magnitudes m_1 ... m_t are trained; a magnitude
is one number, shared by all blocks and both projections. Inference has the same formula, so the
last direction is never normalised; earlier factors stay unchanged.

Authors' code: the product of the factors' norms (the norm of the product is smaller, by about the
root of the rank), the current direction not normalised (it starts at zero; their abstract
normalises every direction), magnitudes reset to 0.8 at the start of every task, where the encoder
jumps (`keep_magnitudes`: a port with the FDC paper's protocol keeps them), heads with zero biases
and weights larger by the root of three, query and value kernels. On ImageNet-A the native rate is
that of their log; their settings halve it after the first task and drop it at epochs 10 and 15. On
CUB-200 and OmniBenchmark, for which they publish nothing, the rate is our choice. Inferred for the
FDC paper: the reset; magnitudes at the increments' rate. Unknown: its schedule.

E_t has the first t directions with the magnitudes at the end of task t. The head's input and
FDC's score scales are as in Cumulative-LoRA. The direction of a task with one class, whose loss is
constant, stays zero.
"""

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from msgspec import Meta

from fdc_jax.data.batches import Batch
from fdc_jax.heads import NORM_FLOOR, LinearHead
from fdc_jax.learners import training
from fdc_jax.learners.learner import Learner, Replaced, TaskImages
from fdc_jax.model import increments, vit

MAGNITUDE = 0.8  # at the start of a task, the authors'
NATIVE_RATE = 1e-2
NATIVE_RATE_OF = {"cifar100": 8e-3}  # by benchmark


class State(NamedTuple):
    """Every task's increment, head and magnitudes on a leading task axis."""

    increments: vit.Increment
    heads: LinearHead
    magnitudes: Float[Array, "tasks tasks"]  # row t: those of tasks 0 ... t at the end of task t


@dataclasses.dataclass(frozen=True)
class SDLoRA(Learner):
    """SD-LoRA, as described above."""

    title = "SD-LoRA"
    paper_row = 2
    mean_over_images = True

    keep_magnitudes: Annotated[
        bool, Meta(description="of earlier directions, instead of a reset in every task")
    ] = False

    def initial_state(self) -> State:
        """Returns empty slots for all tasks."""
        tasks = self.setup.num_tasks
        return State(*super().initial_state(), magnitudes=jnp.zeros((tasks, tasks)))

    def start_task(self, backbone: Any, state: State, task: int, key: Array) -> tuple[Any, Any]:
        """Returns the frozen directions so far, and a fresh increment, head and magnitudes."""
        _, trained = super().start_task(backbone, state, task, key)
        frozen = {
            "kernels": vit.pretrained_kernels(backbone),
            "directions": _directions(state.increments, task),
            "task": jnp.asarray(task, jnp.int32),
            "class_mask": self.setup.class_mask(task),
        }
        magnitudes = jnp.full(self.setup.num_tasks, MAGNITUDE, jnp.float32)
        if self.keep_magnitudes and task > 0:
            kept = state.magnitudes[task - 1]
            magnitudes = jnp.where(jnp.arange(len(kept)) < task, kept, magnitudes)
        return frozen, trained | {"magnitudes": magnitudes}

    def loss(self, backbone: Any, frozen: Any, trained: Any, batch: Batch) -> Float[Array, ""]:
        """Returns the cross-entropy over the task's own classes."""
        magnitudes = trained["magnitudes"]
        earlier = _weighted(frozen["directions"], magnitudes)
        current = _weighted(trained["increment"], magnitudes[frozen["task"]][None])
        # The encoder accepts several increments.
        return super().loss(backbone, frozen, trained | {"increment": (earlier, current)}, batch)

    def update(self) -> training.Update:
        """Returns Adam, in the native preset SGD with momentum at a constant rate."""
        rates = training.paper_rates(self.setup)
        rates["magnitudes"] = rates["increment"]
        if not self.setup.native:
            return self.gradient_update(rates, optax.scale_by_adam())
        rates = dict.fromkeys(rates, NATIVE_RATE_OF.get(self.setup.benchmark, NATIVE_RATE))
        return self.gradient_update(rates, training.sgd(), training.constant)

    def after_task(
        self, backbone: Any, state: State, task: int, frozen: Any, trained: Any, images: TaskImages
    ) -> State:
        """Returns the state with increment, head and magnitudes stored."""
        state = super().after_task(backbone, state, task, frozen, trained, images)
        learned = jnp.where(jnp.arange(self.setup.num_tasks) <= task, trained["magnitudes"], 0.0)
        return state._replace(magnitudes=state.magnitudes.at[task].set(learned))

    def encoder(self, backbone: Any, state: State, num_tasks: int) -> Replaced:
        """Returns the kernels of E_t, t = `num_tasks`."""
        kernels = vit.pretrained_kernels(backbone)
        if num_tasks == 0:
            return kernels
        last = num_tasks - 1
        magnitudes = state.magnitudes[last]
        earlier = _weighted(_directions(state.increments, last), magnitudes)
        newest = increments.select(state.increments, last)
        current = _weighted(newest, magnitudes[last:num_tasks])
        return increments.merge(increments.merge(kernels, earlier), current)


@jax.jit
def _directions(stack: vit.Increment, num_tasks) -> vit.Increment:
    """Returns the first `num_tasks` slots with factors of norm one; later slots are zero.

    The slots are concatenated along the rank, as one increment.
    """

    def normalised(factors):
        norm = jnp.sqrt(jnp.sum(factors**2, axis=(-2, -1), keepdims=True))
        earlier = jnp.arange(len(factors))[:, None, None, None] < num_tasks
        return jnp.where(earlier, factors / jnp.maximum(norm, NORM_FLOOR), 0.0)

    def side_by_side(factors):
        A, B = (jnp.moveaxis(normalised(factors[name]), 0, -3) for name in ("A", "B"))
        blocks, tasks, rank, width = B.shape
        A = jnp.swapaxes(A, 1, 2).reshape(blocks, width, tasks * rank)
        return vit.Factors(A=A, B=B.reshape(blocks, tasks * rank, width))

    return vit.Increment(key=side_by_side(stack["key"]), value=side_by_side(stack["value"]))


def _weighted(increment: vit.Increment, magnitudes: Float[Array, " t"]) -> vit.Increment:
    """Returns the increment with one magnitude for each of t equal parts of its rank.

    As the magnitudes scale columns of A, their gradients need no gradient of a whole kernel.
    """

    def scaled(factors):
        blocks, _, rank = factors["A"].shape
        scale = jnp.repeat(magnitudes, rank // len(magnitudes))
        return vit.Factors(**factors, scale=jnp.broadcast_to(scale, (blocks, rank)))

    return vit.Increment(key=scaled(increment["key"]), value=scaled(increment["value"]))
