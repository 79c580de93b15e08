"""Stopping on request: SIGTERM and Ctrl-C set a flag that every loop polls."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from fdc_jax.errors import Interrupted

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether the process, or one that runs with it, has been asked to stop.

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
