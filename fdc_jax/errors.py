"""How work ends early: failures, requests to stop, and what `python -m fdc_jax.NAME` prints then.

Imported before JAX, which takes seconds, so that a signal counts from the start.
"""

import argparse
import contextlib
import difflib
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, NoReturn

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class InputError(ValueError):
    """A configuration, file or array is not what was expected."""


class TrainingError(RuntimeError):
    """Training cannot go on, for instance because a loss is not a finite number."""


class Interrupted(RuntimeError):
    """The process was asked to stop; what was done is saved."""


class StopRequest:
    """Whether the process, or one that runs with it, has been asked to stop; every loop polls it.

    Attributes:
        signal: what this process was sent, 0 for nothing.
        agree: turns that number into the one that all processes act upon.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.agree: Callable[[int], int] = int

    def requested(self) -> bool:
        """Tells whether to stop; where several processes run, all ask equally often."""
        return bool(self.agree(self.signal))

    def poll(self) -> None:
        """Raises `Interrupted` when a stop was requested; asks as `requested` does."""
        if number := self.agree(self.signal):
            raise Interrupted(f"stopped by {signal.Signals(number).name}")


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns the first SIGTERM or Ctrl-C into a request; a second one ends the process at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.getsignal(number) for number in _SIGNALS}

    def handle(number, frame):
        request.signal = number
        for each, handler in previous.items():
            signal.signal(each, handler)

    for number in _SIGNALS:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def did_you_mean(what: str, found: str, known: Iterable[str]) -> str:
    """Returns a line that says what a word may be, and which of these it resembles."""
    names = list(known)
    near = difflib.get_close_matches(str(found), names, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{what}: expected one of {', '.join(names)}, found {found!r}{hint}"


def counted(number: float, noun: str) -> str:
    """Returns words such as `1 epoch`, `2 epochs` or `1,000 classes`; a mean is rounded."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,.0f} {noun if round(number) == 1 else plural}"


@contextlib.contextmanager
def plain_warnings(title: str, level: int = logging.WARNING) -> Iterator[None]:
    """Prints what the package warns of as lines on standard error, while a program runs."""
    handler, logger = logging.StreamHandler(), logging.getLogger("fdc_jax")
    handler.setFormatter(logging.Formatter(f"{title}: %(levelname)s: %(message)s"))
    handler.setLevel(level)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


class Program(argparse.ArgumentParser):
    """The command line of a program, with the flags --quiet and --traceback.

    Args:
        name: after `fdc_jax.`; starts every line of error or warning.
        description: for --help.

    Attributes:
        front: the command that started the program by its name, such as `fdc`; None for a module
            of its own.
    """

    front: ClassVar[str | None] = None

    def __init__(self, name: str, description: str):
        super().__init__(prog=self.typed(name), allow_abbrev=False, description=description)
        self.title = f"fdc_jax.{name}"
        self.add_argument("--quiet", action="store_true", help="print nothing but errors")
        self.add_argument("--traceback", action="store_true", help="show where an error arose")

    @classmethod
    def typed(cls, name: str) -> str:
        """Returns what a user types to start a program, in the way that this one was started."""
        if cls.front is None:
            return f"python -m fdc_jax.{name}"
        return f"{cls.front} {name.rpartition('.')[2]}"

    def error(self, message: str) -> NoReturn:
        """Raises InputError, with the flag that a mistyped one resembles."""
        _, unknown, rest = message.partition("unrecognized arguments: ")
        flags = [flag for action in self._actions for flag in action.option_strings]
        near = difflib.get_close_matches(rest.partition("=")[0], flags, 1) if unknown else []
        raise InputError(message + (f"; did you mean {near[0]}?" if near else ""))

    def run(
        self, body: Callable[[argparse.Namespace], None], arguments: Sequence[str] | None
    ) -> int:
        """Parses the command line (`sys.argv` when None) and runs a program.

        Returns:
            0; 2 after an error that has been printed as one line; 130 after Ctrl-C.
        """
        arguments = sys.argv[1:] if arguments is None else list(arguments)
        try:
            options = self.parse_args(arguments)
            with plain_warnings(self.title, logging.ERROR if options.quiet else logging.WARNING):
                body(options)
        except (InputError, MemoryError) as error:
            if "--traceback" in arguments:
                traceback.print_exc()
            print(f"{self.title}: {str(error) or 'out of memory'}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"{self.title}: stopped by SIGINT", file=sys.stderr)
            return 130
        return 0
