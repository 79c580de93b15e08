"""What the programs `python -m fdc_jax.NAME` share: one line per error, plain warnings."""

import argparse
import contextlib
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from fdc_jax.errors import InputError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are input errors."""

    def error(self, message: str) -> NoReturn:
        """Raises InputError."""
        raise InputError(message)


def run(
    program: str,
    parser: argparse.ArgumentParser,
    body: Callable[[argparse.Namespace], None],
    arguments: Sequence[str] | None,
) -> int:
    """Parses the command line and runs a program.

    Args:
        program: starts every line of error or warning.
        parser: must know the flags --quiet and --traceback.
        body: the program.
        arguments: command line without the program; `sys.argv` when None.

    Returns:
        0, or 2 after an error that has been printed as one line.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = parser.parse_args(arguments)
        with _plain_warnings(program, options.quiet):
            body(options)
    except (InputError, MemoryError) as error:
        if "--traceback" in arguments:
            traceback.print_exc()
        print(f"{program}: {str(error) or 'out of memory'}", file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def _plain_warnings(program: str, quiet: bool) -> Iterator[None]:
    """Prints what the library warns of as lines on standard error, while the program runs."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{program}: %(levelname)s: %(message)s"))
    handler.setLevel(logging.ERROR if quiet else logging.WARNING)
    logger = logging.getLogger("fdc_jax")
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
