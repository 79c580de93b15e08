"""The interface of learners: options, and five groups of methods; the defaults are Cumulative-LoRA.

A learner is a class derived from `Learner` in a file of its own, a frozen dataclass whose fields
are its options: `x: Annotated[float, Meta(gt=0, description="...")] = 1.0`, of `typing` and
`msgspec`. Option x of a learner in file N is `config.learner.N.x`, in the learner `self.x`; other
defaults on benchmarks are `extra={"on": {"cifar100": 2.0}}` of its `Meta`.

`state`, `frozen` and `trained` are pytrees of arrays whose shapes never depend on the task, so that
one compilation serves all tasks. A checkpoint holds the state; `frozen` must follow from the state,
the task and the key, which follows from seed and task; `backbone` is the pretrained parameter tree
and never changes. NumPy arrays of the state stay on the host (large ones that no training step
reads); all other leaves are on the devices.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import msgspec
import optax
from jaxtyping import Array, Float

from fdc_jax.data.batches import Batch
from fdc_jax.heads import Head, LinearHead
from fdc_jax.learners import training
from fdc_jax.learners.training import LearnerSetup, TaskImages, Update
from fdc_jax.model import increments, operations, vit

# Parameters in place of those of E_0. Increments, second moments and the Fisher information need
# key and value kernels; training, extraction, prediction and export accept a whole tree, too.
Replaced: TypeAlias = vit.Replaced


class State(NamedTuple):
    """Every task's increment and head, stacked on a leading task axis."""

    increments: vit.Increment
    heads: LinearHead


# The largest number of portions of a batch to unroll; more take long to compile.
MOST_UNROLLED = 4


# The methods that a run calls.
_HOOKS = ("initial_state", "before_task", "start_task", "loss", "update", "after_task", "encoder")


@contextlib.contextmanager
def noted(learner: type, method: str) -> Iterator[None]:
    """Notes file, line and expected arguments of a learner's method at an exception."""
    try:
        yield
    except Exception as error:
        if not any(note.startswith("learner: ") for note in getattr(error, "__notes__", ())):
            code = inspect.unwrap(getattr(learner, method)).__code__
            parameters = inspect.signature(getattr(Learner, method)).parameters.values()
            passed = [p.name for p in parameters if p.default is inspect.Parameter.empty]
            error.add_note(
                f"learner: {learner.__name__}.{method} in {code.co_filename}, line "
                f"{code.co_firstlineno}; expected {method}({', '.join(passed)})"
            )
        raise


def _note_errors(learner: type) -> None:
    """Wraps the methods that a class defines, so that an error in one of them gets a note."""

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            with noted(type(self), method.__name__):
                return method(self, *arguments, **options)

        return call

    for name in _HOOKS:
        method = vars(learner).get(name)
        if inspect.isfunction(method):
            setattr(learner, name, wrapped(method))


@dataclasses.dataclass(frozen=True)
class Learner:
    """A learner in one run; its defaults are Cumulative-LoRA."""

    setup: LearnerSetup

    title: ClassVar[str] = ""  # name in tables
    paper_row: ClassVar[int] = 100  # row in the paper's tables
    # The components of FDC that the paper enables, a key of `components` in `results.json`.
    selected: ClassVar[str] = "full"
    # The dependence of the training on the number of tasks, as a clause; "" if independent.
    task_count: ClassVar[str] = ""
    # True if the loss is a mean over images, weighted by `batch.weights`, plus terms of no image; a
    # batch may then be split into portions.
    mean_over_images: ClassVar[bool] = False
    joint: ClassVar[bool] = False  # True: all classes of a stream are one task
    trains: ClassVar[bool] = True  # False: a run takes no steps, and every encoder is E_0
    # Cost in forward and backward passes: of an image in a step, and of a task's images in other
    # methods (0.5 for each time that they are encoded).
    step_passes: ClassVar[float] = 1.0
    extra_passes: ClassVar[float] = 0.0

    def __init_subclass__(cls) -> None:
        _note_errors(cls)

    @classmethod
    def section(cls) -> str:
        """Returns the name of the learner's options in `config.learner`, the name of its file."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def options(cls, benchmark: str = "") -> type[msgspec.Struct]:
        """Returns the type of the learner's options, with their defaults on a benchmark.

        Raises:
            TypeError: an option has no default or no description, or the class with options is no
                dataclass.
        """
        hints = typing.get_type_hints(cls, include_extras=True)
        fields = dataclasses.fields(cls)[1:]  # without `setup`
        annotated = {name for name in hints if typing.get_origin(hints[name]) is Annotated}
        if annotated - {field.name for field in fields}:
            raise TypeError(
                "a class with options must be decorated with @dataclasses.dataclass(frozen=True)"
            )
        options = []
        for field in fields:
            default = field.default
            if default is dataclasses.MISSING:
                raise TypeError(f"expected a default of {field.name}, found none")
            metas = getattr(hints[field.name], "__metadata__", ())
            if not any(meta.description for meta in metas):
                raise TypeError(
                    f"expected {field.name}: Annotated[..., Meta(description=...)], found no "
                    "description"
                )
            for meta in metas:
                default = (meta.extra or {}).get("on", {}).get(benchmark, default)
            options.append((field.name, hints[field.name], default))
        return msgspec.defstruct(cls.section(), options, frozen=True, forbid_unknown_fields=True)

    # 1. The state between tasks.
    def initial_state(self) -> Any:
        """Returns empty slots for all tasks.

        If a shape depends on the number of tasks or on the largest of them, the first slots of that
        axis must be those of the first tasks, since a run may grow by tasks.
        """
        setup, width = self.setup, self.setup.variant.width
        tasks, rows = setup.num_tasks, setup.head_rows
        heads = LinearHead(weight=jnp.zeros((tasks, rows, width)), bias=jnp.zeros((tasks, rows)))
        return State(increments.empty_stack(setup.variant, setup.rank, tasks), heads)

    # 2. Computations before a task, in closed form.
    def before_task(self, backbone: Any, state: Any, task: int, images: TaskImages) -> Any:
        """Returns the state unchanged."""
        return state

    # 3. Training: leaves, loss and update.
    def start_task(
        self, backbone: Any, state: Any, task: int, key: Array, A: Any = None
    ) -> tuple[Any, Any]:
        """Returns the frozen kernels of E_{t-1}, and a fresh increment and head to train.

        If `A` is given, directions [blocks, width, rank] of key and value kernels, it stays frozen
        and the increment to train is B alone.
        """
        setup, variant = self.setup, self.setup.variant
        kernels = self.encoder(backbone, state, task)
        frozen: dict[str, Any] = {"kernels": kernels, "class_mask": setup.class_mask(task)}
        if A is None:
            key_of_increment, key = jax.random.split(key)
            increment: Any = increments.initialise(key_of_increment, variant, setup.rank)
        else:
            frozen["A"] = A
            increment = {name: jnp.zeros_like(a.swapaxes(1, 2)) for name, a in A.items()}  # B
        head = training.new_linear_head(key, setup.head_rows, variant.width)
        return frozen, {"increment": increment, "head": head}

    def loss(
        self, backbone: Any, frozen: Any, trained: Any, batch: Batch, temperature: float = 1.0
    ) -> Float[Array, ""]:
        """Returns the cross-entropy over the task's own classes of logits / temperature."""
        increment = increment_in_training(frozen, trained)
        features = self.features(backbone, batch, frozen["kernels"], increment)
        logits = trained["head"].logits(features) / temperature
        return training.cross_entropy(logits, batch, frozen["class_mask"])

    def value_and_gradients(self, backbone: Any, frozen: Any, trained: Any, batch: Batch) -> Any:
        """Returns the loss and its gradients, from portions of the batch if the loss is a mean."""

        def compute(part):
            with noted(type(self), "loss"):  # JAX refuses a loss that is no number
                return jax.value_and_grad(self.loss, argnums=2)(backbone, frozen, trained, part)

        size = self._portion_size(batch.images)
        if self.mean_over_images and size < len(batch.images):
            return training.mean_over_portions(compute, batch, size)
        return compute(batch)

    def _portion_size(self, images: Any) -> int:
        count, side = images.shape[:2]
        return operations.images_together(self.setup.mesh, count, side, self.setup.variant.patch)

    def features(
        self,
        backbone: Any,
        batch: Batch,
        kernels: Replaced | None = None,
        increment: Any = None,
        dropout_key: Array | None = None,
        dropout: float = 0.0,
    ) -> Float[Array, "n d"]:
        """Returns the features of a batch, with the arguments of `vit.encode`.

        If the loss is not a mean over images, the batch is encoded in a few portions without a
        loop, in which the gradient's residuals would pass through a TPU's slow memory once more.
        """
        size = self._portion_size(batch.images)

        def encode(images, key):
            return vit.encode(self.setup.model, backbone, images, kernels, increment, key, dropout)

        count = len(batch.images) // size
        if self.mean_over_images or not 1 < count <= MOST_UNROLLED:
            return encode(batch.images, dropout_key)
        keys: Any = itertools.repeat(None, count)
        if dropout_key is not None:
            keys = jax.random.split(dropout_key, count)
        portions = jnp.split(jnp.asarray(batch.images), count)
        return jnp.concatenate([encode(*pair) for pair in zip(portions, keys, strict=True)])

    def update(self) -> Update:
        """Returns Adam with the paper's two learning rates."""
        return self.gradient_update(training.paper_rates(self.setup), optax.scale_by_adam())

    def gradient_update(
        self,
        rates: dict[str, float],
        transformation: optax.GradientTransformation,
        schedule: Callable[[int, int], float] | None = None,
    ) -> Update:
        """Returns an update by descent along gradients of the loss that Optax transforms.

        Every top-level part of `trained` has its learning rate in `rates`; schedule: see `Update`.
        """

        def step(backbone, frozen, trained, optimizer_state, batch, rate):
            value, gradients = self.value_and_gradients(backbone, frozen, trained, batch)
            directions: Any
            directions, optimizer_state = training.transformed(
                transformation, gradients, optimizer_state, trained
            )
            return training.descend(trained, directions, rates, rate), optimizer_state, value

        return Update(transformation.init, jax.jit(step, donate_argnums=(2, 3)), schedule)

    # 4. The end of a task.
    def after_task(
        self, backbone: Any, state: Any, task: int, frozen: Any, trained: Any, images: TaskImages
    ) -> Any:
        """Returns the state with head and increment, if there is one, in the task's slots."""
        state = state._replace(heads=increments.store(state.heads, task, trained["head"]))
        if "increment" not in trained:
            return state
        increment = increment_in_training(frozen, trained)
        return state._replace(increments=increments.store(state.increments, task, increment))

    # 5. Encoder and heads for inference.
    def encoder(self, backbone: Any, state: Any, num_tasks: int) -> Replaced:
        """Returns the parameters of E_t that replace those of E_0, t = `num_tasks`.

        Only E_0 and E_t of a state after t tasks are requested.

        Raises:
            InputError: the learner does not keep that encoder.
        """
        pretrained = vit.pretrained_kernels(backbone)
        return increments.kernels_after(pretrained, state.increments, num_tasks)

    def heads(self, state: Any, num_tasks: int) -> list[Head]:
        """Returns the heads of the first `num_tasks` tasks, without padding."""
        return training.unpadded(self.setup, state.heads, num_tasks)


_note_errors(Learner)


def increment_in_training(frozen: Any, trained: Any) -> vit.Increment:
    """Returns the task's increment, from a frozen A and a trained B, or the trained factors."""
    if "A" not in frozen:
        return trained["increment"]
    increment: Any = {
        name: {"A": A, "B": trained["increment"][name]} for name, A in frozen["A"].items()
    }
    return increment
