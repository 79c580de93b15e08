"""Training steps of several seeds as one: they share the encoder and differ in everything else.

Each seed's work is a generator that yields its training steps and is sent their outcomes; whatever
lies between two steps it does itself. The seed that is furthest behind goes on alone until all wait
for the same step of the same task; from there on they make it together, by one program that is
`jax.vmap` of the ordinary step over frozen and trained leaves, optimiser and batch.

Times and memory that a seed records meanwhile are those of all of them. Where a learner chooses
between ways of computing within a step, as LoDA does by the size of a group, all seeds go all ways.
"""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fdc_jax.errors import InputError, Interrupted
from fdc_jax.learners import training

# Results of a step: trained leaves, optimiser state, loss.
Outcome = tuple[Any, Any, jax.Array]


class Step(NamedTuple):
    """One training step that waits to be made.

    Attributes:
        place: task and step, from 0.
        frozen: of the learner.
        trained: leaves, or a `Row` of those of all seeds.
        optimizer: state of the optimiser, likewise.
        batch: images on the devices.
        rate: of the schedule; the same for all seeds.
    """

    place: tuple[int, int]
    frozen: Any
    trained: Any
    optimizer: Any
    batch: Any
    rate: Any


class Row(NamedTuple):
    """One seed's part of a tree whose leaves lead with the seeds."""

    stack: Any
    index: int


def whole(tree: Any) -> Any:
    """Returns a tree, cut out of those of all seeds where it is a `Row`."""
    if not isinstance(tree, Row):
        return tree
    return jax.tree.map(lambda leaf: leaf[tree.index], tree.stack)


def run(
    works: Sequence[Generator[Step, Outcome, Any]], update: training.Update, backbone: Any
) -> list[Any]:
    """Does the work of all seeds and returns what each returns.

    Args:
        works: a generator per seed.
        update: of the learner.
        backbone: pretrained parameters.

    Raises:
        Interrupted: a stop was requested; every seed has saved what it does then.
        InputError: a step of all seeds does not fit into a device.
        Exception: whatever a seed's work raises; the others stay at their last checkpoint.
    """
    waiting: dict[int, Step] = {}
    returned: dict[int, Any] = {}
    stopped: list[Interrupted] = []

    def go_on(number: int, outcome: Outcome | None) -> None:
        try:
            waiting[number] = works[number].send(outcome)  # pyright: ignore[reportArgumentType]
        except StopIteration as end:
            returned[number] = end.value
        except Interrupted as error:
            stopped.append(error)

    def alone(step: Step) -> Outcome:
        trained, optimizer = whole(step.trained), whole(step.optimizer)
        return update.step(backbone, step.frozen, trained, optimizer, step.batch, step.rate)

    together = _Together(update, backbone)
    try:
        for number in range(len(works)):
            go_on(number, None)
        while waiting:
            behind = min(step.place for step in waiting.values())
            numbers = [number for number, step in waiting.items() if step.place == behind]
            steps = [waiting[number] for number in numbers]
            if len(numbers) > 1 and len(numbers) == len(waiting):
                outcomes = together(steps)
            else:
                outcomes = map(alone, steps)
            for number, outcome in zip(numbers, outcomes, strict=True):
                del waiting[number]
                go_on(number, outcome)
    finally:
        for work in works:
            work.close()
    if stopped:
        raise stopped[0]
    return [returned[number] for number in range(len(works))]


class _Together:
    """The steps of all seeds by one program, compiled for each number of seeds."""

    def __init__(self, update: training.Update, backbone: Any):
        self._backbone = backbone
        step = jax.vmap(update.step, in_axes=(None, 0, 0, 0, 0, None))

        def of_all(backbone, frozen, trained, optimizer, batches, rate):
            return step(backbone, frozen, trained, optimizer, _stack(*batches), rate)

        self._step = jax.jit(of_all, donate_argnums=(2, 3))
        self._stack = jax.jit(_stack)
        self._frozen: tuple[list[Any], Any] = ([], None)
        self._fits: set[int] = set()

    def __call__(self, steps: list[Step]) -> list[Outcome]:
        frozen = [step.frozen for step in steps]
        if [id(each) for each in frozen] != [id(each) for each in self._frozen[0]]:
            self._frozen = (frozen, self._stack(*frozen))
        arguments = (
            self._backbone,
            self._frozen[1],
            self._rows([step.trained for step in steps]),
            self._rows([step.optimizer for step in steps]),
            [step.batch for step in steps],
            steps[0].rate,
        )
        if len(steps) not in self._fits:
            _require_memory(self._step.lower(*arguments).compile(), len(steps))
            self._fits.add(len(steps))
        trained, optimizer, losses = self._step(*arguments)
        return [
            (Row(trained, index), Row(optimizer, index), losses[index])
            for index in range(len(steps))
        ]

    def _rows(self, trees: list[Any]) -> Any:
        first = trees[0]
        if all(
            isinstance(tree, Row) and tree.stack is first.stack and tree.index == index
            for index, tree in enumerate(trees)
        ):
            return first.stack
        return self._stack(*map(whole, trees))


def _stack(*trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _require_memory(compiled: Any, seeds: int) -> None:
    """Compares what a compiled step takes, beyond what is there already, with what is free.

    Raises:
        InputError: it takes more.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        return
    needed = (
        analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    )
    for device in jax.local_devices():
        memory = device.memory_stats()
        if memory and "bytes_limit" in memory:
            free = memory["bytes_limit"] - memory["bytes_in_use"]
            if needed > free:
                raise InputError(
                    f"config.train.seeds_together: a step of {seeds} seeds takes "
                    f"{needed / 2**30:.1f} GiB of device memory, {free / 2**30:.1f} GiB are free; "
                    f"run with it off, or with fewer seeds"
                )
