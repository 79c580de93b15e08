"""What a run shows while it works: a bar in a terminal, plain lines elsewhere, or nothing."""

import sys
import time
from typing import Any

import tqdm

# Seconds between plain lines when the output is no terminal.
_LINE_EVERY = 30.0


class Progress:
    """One bar over the training steps of all tasks, with the time left.

    Args:
        total: training steps of the run.
        done: those taken by an earlier process.
        quiet: show nothing.
        label: starts every line.
        steps: show training steps; otherwise nothing but lines.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        quiet: bool = False,
        label: str = "",
        steps: bool = True,
    ):
        self._total, self._done, self._start_done = total, done, done
        self._quiet, self._label = quiet, label
        self._shows_lines = steps and not quiet
        self._start = self._last_line = time.perf_counter()
        self._bar = None
        if steps and not quiet and sys.stderr.isatty():
            self._bar = tqdm.tqdm(
                total=total, initial=done, unit="step", dynamic_ncols=True, smoothing=0.05
            )

    def step(self, stage: str, **values: Any) -> None:
        """Counts one training step and shows what it measured."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_description_str(self._label + stage, refresh=False)
            self._bar.set_postfix(values, refresh=False)
            self._bar.update()
        elif self._shows_lines and time.perf_counter() - self._last_line >= _LINE_EVERY:
            self._last_line = time.perf_counter()
            done = self._done - self._start_done
            left = (self._last_line - self._start) / done * (self._total - self._done)
            numbers = ", ".join(f"{name} {value}" for name, value in values.items())
            self.line(
                f"{stage}: step {self._done} of {self._total}, {numbers}, "
                f"about {left / 60:.0f} min left"
            )

    def stage(self, text: str) -> None:
        """Shows what is going on between training steps; in a terminal only."""
        if self._bar is not None:
            self._bar.set_description_str(self._label + text)

    def line(self, text: str) -> None:
        """Prints one line above the bar, or above another seed's."""
        if not self._quiet:
            tqdm.tqdm.write(self._label + text, file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
