"""Failures that a user can act on, and how the programs `python -m fdc_jax.NAME` print them."""

import argparse
import contextlib
import difflib
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn


class InputError(ValueError):
    """A configuration, file or array is not what was expected."""


class TrainingError(RuntimeError):
    """Training cannot go on, for instance because a loss is not a finite number."""


class Interrupted(RuntimeError):
    """The process was asked to stop; what was done is saved."""


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
    """

    def __init__(self, name: str, description: str):
        super().__init__(
            prog=f"python -m fdc_jax.{name}", allow_abbrev=False, description=description
        )
        self.title = f"fdc_jax.{name}"
        self.add_argument("--quiet", action="store_true", help="print nothing but errors")
        self.add_argument("--traceback", action="store_true", help="show where an error arose")

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
            0, or 2 after an error that has been printed as one line.
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
        return 0
