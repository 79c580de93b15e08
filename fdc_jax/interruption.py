"""Stopping on request: SIGTERM and Ctrl-C set a flag that every loop polls."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from fdc_jax.errors import Interrupted

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether the process has been asked to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def poll(self) -> None:
        """Raises `Interrupted` when a stop was requested."""
        if self.signal is not None:
            raise Interrupted(f"stopped by {signal.Signals(self.signal).name}")


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
