"""Errors and signals, which end a program with one line and an exit code; loads no JAX."""

import argparse
import contextlib
import difflib
import io
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NoReturn, Self

# Characters that no name may have: they move the cursor of a terminal, end a line, reverse the
# direction of writing, or cannot be encoded.
CONTROL = "\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_LONG_WORD = re.compile(r"\S{400,}")


class InputError(ValueError):
    """A configuration, file or array is not what was expected."""


class TrainingError(RuntimeError):
    """Training cannot go on, for instance because a loss is not a finite number."""


class Interrupted(RuntimeError):
    """The process was asked to stop; what was done is saved."""


# Signals ------------------------------------------------------------------------------------------

signals: list[int] = []  # numbers of the signals that were turned into a request to stop
_TOGETHER = 0.5  # seconds in which signals count as one, since `timeout` sends its own twice


class StopRequest:
    """A request to stop this process or all processes of its run; every loop polls it.

    All processes of a run must poll equally often.
    """

    def __init__(self) -> None:
        self.signal = 0  # number of the signal that this process got
        # Returns the signal that all processes act upon, from the signal of this process.
        self.agree: Callable[[int], int] = int

    def requested(self) -> bool:
        """Returns True if the run must stop."""
        return bool(self.agree(self.signal))

    def poll(self) -> None:
        """Raises `Interrupted` if the run must stop."""
        if number := self.agree(self.signal):
            name = signal.Signals(number).name
            raise Interrupted(f"stopped by {name}; the same command resumes")


@contextlib.contextmanager
def stop_on_signals(
    title: str = "fdc_jax.run", text: str = "stopping after this step, with a checkpoint"
) -> Iterator[StopRequest]:
    """Turns SIGTERM or Ctrl-C into a request to stop, with a line; a second one ends at once.

    In another thread than the main one, which alone may handle signals, it does nothing.
    """
    request = StopRequest()
    second = 0.0

    def handle(number: int, frame: Any) -> None:
        nonlocal second
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        if not request.signal:
            request.signal = number
            second = time.monotonic() + _TOGETHER
            signals.append(number)
            with contextlib.suppress(OSError):
                os.write(2, f"{title}: {text}; a second {name} ends at once\n".encode())
        elif time.monotonic() > second:
            os._exit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if main else ()
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# Texts --------------------------------------------------------------------------------------------


def line(error: BaseException) -> str:
    """Returns the start of the first line of an exception, or the name of its type."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{str(error.filename)[:200]}: {error.strerror}"
    return str(error).strip().partition("\n")[0].strip()[:200] or type(error).__name__


def escaped(text: str) -> str:
    """Returns a text with its control characters escaped, for a terminal or a table."""
    return re.sub(f"[{CONTROL}]", lambda match: match[0].encode("unicode_escape").decode(), text)


def place(error: BaseException, module: str) -> str:
    """Returns file and line of a module at which an exception arose, and its message."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    text = f"{type(error).__name__}: {line(error)}"
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == module:
            return f"{frame.f_code.co_filename}, line {number}: {text}"
    return text


def displayed(text: str) -> str:
    """Returns a text for a terminal: control characters are escaped, and long words are cut."""
    return _LONG_WORD.sub(lambda match: f"{match[0][:200]}...{match[0][-20:]}", escaped(text))


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean X?", or "" if no known word is close."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def did_you_mean(name: str, value: Any, known: Iterable[str]) -> str:
    """Returns a line about an unknown value, with the known words and the nearest of them."""
    names = list(known)
    text = value if isinstance(value, str) else type(value).__name__
    return f"{name}: expected one of {', '.join(names)}, found {text!r}{nearest(text, names)}"


def counted(number: float, noun: str) -> str:
    """Returns words such as `1 epoch`, `2 epochs` or `1,000 classes`; a mean is rounded."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,.0f} {noun if round(number) == 1 else plural}"


@contextlib.contextmanager
def plain_warnings(title: str, quiet: bool = False) -> Iterator[None]:
    """Prints warnings of the package, or only errors, as lines on standard error, each once."""
    messages: set[str] = set()  # all calibrators of one head would warn of it
    handler = logging.StreamHandler()
    logger = logging.getLogger("fdc_jax")

    def write(record: logging.LogRecord) -> None:
        if (message := displayed(record.getMessage())) not in messages:
            messages.add(message)
            print(f"{title}: {record.levelname}: {message}", file=sys.stderr, flush=True)

    handler.emit = write
    handler.setLevel(logging.ERROR if quiet else logging.WARNING)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


# Exit codes. 75 is EX_TEMPFAIL: the same command resumes.
CODES: dict[type[BaseException], int] = {
    InputError: 2,
    MemoryError: 2,
    TrainingError: 3,
    Interrupted: 75,
    KeyboardInterrupt: 130,
    BrokenPipeError: 141,
    OSError: 2,
}
# Lines of errors without a message; none if standard output is closed, as by `... | head`.
_LINES = {MemoryError: "out of memory", KeyboardInterrupt: "stopped by SIGINT", BrokenPipeError: ""}


def outcome(error: BaseException) -> tuple[int, str] | None:
    """Returns the exit code and the line of an error, or None for a mistake in the program."""
    for kind, code in CODES.items():
        if isinstance(error, kind):
            text = line(error) if isinstance(error, OSError) else str(error)
            return code, _LINES.get(type(error), text or type(error).__name__)
    if type(error).__name__ == "JaxRuntimeError":
        if "RESOURCE_EXHAUSTED" in str(error):
            return 2, f"out of memory ({line(error)})"
        if "Disallowed" in str(error):
            return 2, f"JAX_TRANSFER_GUARD: expected one that allows transfers ({line(error)})"
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].filename.endswith("jax/_src/config.py"):  # a variable JAX_...
        return 2, line(error)
    if frames and frames[-1].filename.endswith("xla_bridge.py"):
        platforms = os.environ.get("JAX_PLATFORMS", "")
        return 2, f"JAX_PLATFORMS={platforms}: JAX finds no such device here ({line(error)})"
    return None


class Ending:
    """The end of a program: a context that turns an error of the user's into a line and a code."""

    def __init__(self, title: str, show_traceback: bool = False):
        self.title, self.code = title, 0
        self.silent = False  # print no line, as another process does
        self.at_once = False  # end without the clean-up of modules, which would wait for others
        self._show_traceback = show_traceback

    def __enter__(self) -> Self:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # of any encoding: a name must not end a run
                stream.reconfigure(errors="backslashreplace")
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        try:
            if sys.stdout:  # None if the shell closed it
                sys.stdout.flush()
        except OSError as closed:
            error = error or closed
        known = error and outcome(error)
        if error is None or (known is None and not self.at_once):
            return False
        self.code, text = known or (1, "")
        with contextlib.suppress(OSError, ValueError):
            if self._show_traceback or not known:
                traceback.print_exception(error)
            if text and not self.silent:
                print(f"{self.title}: {displayed(text)}", file=sys.stderr, flush=True)
            # Python would try again to write the buffer of a closed or full stream.
            if isinstance(error, OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if self.at_once:
            os._exit(self.code)
        return True


def refuse_repeated(arguments: Sequence[str], but: Set[str] = frozenset()) -> None:
    """Raises InputError if a flag, other than those of `but`, is given twice."""
    names = [text.partition("=")[0] for text in arguments if text.startswith("--")]
    if repeated := [name for name in names if names.count(name) > 1 and name not in but]:
        raise InputError(f"{repeated[0]} is given twice")


class Program(argparse.ArgumentParser):
    """The command line of a program, `python -m fdc_jax NAME`."""

    def __init__(self, name: str, description: str, example: str = ""):
        program = f"python -m fdc_jax {name}"
        super().__init__(
            prog=program,
            description=description,
            epilog=f"example: {program} {example}",
            allow_abbrev=False,
        )
        self.title = f"fdc_jax.{name}"
        self.add_argument("--quiet", action="store_true", help="print nothing but errors")
        self.add_argument("--traceback", action="store_true", help="show where an error arose")

    def error(self, message: str) -> NoReturn:
        """Raises InputError, with the flag that a mistyped one resembles."""
        _, unknown, rest = message.partition("unrecognized arguments: ")
        hint = nearest(rest.partition("=")[0], self._option_string_actions) if unknown else ""
        raise InputError(message + hint)

    def run(
        self, body: Callable[[argparse.Namespace], int | None], arguments: Sequence[str] | None
    ) -> int:
        """Runs `body` with the options of a command line, `sys.argv` if None; returns a code."""
        argv = sys.argv[1:] if arguments is None else list(arguments)
        code = None
        with Ending(self.title, "--traceback" in argv) as ending:
            lists = {a.option_strings[0] for a in self._actions if isinstance(a.default, list)}
            refuse_repeated(argv, but=lists)
            options = self.parse_args(argv)
            with plain_warnings(self.title, options.quiet):
                code = body(options)
        return ending.code or code or 0
