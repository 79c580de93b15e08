"""A headless Chromium, driven over its DevTools pipe, so that tests need no further package."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """Path of a browser that can be driven: $CHROMIUM, or the first of the usual names."""
    asked = os.environ.get("CHROMIUM")
    found = (shutil.which(name) for name in ([asked] if asked else NAMES))
    return next((path for path in found if path), None)


class Page:
    """One page: what it did is in `errors` and `requests`."""

    def __init__(self, to_browser: int, from_browser: int, seconds: float):
        self._to, self._from = to_browser, from_browser
        self._deadline = time.monotonic() + seconds
        self._number, self._rest, self._session = 0, b"", ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer.get('error')}"
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = self._deadline - time.monotonic()
            assert left > 0 and select.select([self._from], [], [], left)[0], "no answer in time"
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, about: dict[str, Any]) -> None:
        if event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        elif event in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.errors.append(json.dumps(about))
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event == "Page.loadEventFired":
            self._loaded = True

    def open(self, path: Path, width: int, height: int, dark: bool = False) -> None:
        """Shows a file in a window of that many pixels and waits until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="screen", features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._read()

    def value(self, expression: str) -> Any:
        """Evaluates JavaScript in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, height: int | None = None) -> bytes:
        """A PNG of the window, or of that many pixels of the page from its top."""
        options: dict[str, Any] = {}
        if height is not None:
            size = {"width": self.value("innerWidth"), "height": height}
            options = {"captureBeyondViewport": True, "clip": {"x": 0, "y": 0, "scale": 1} | size}
        return base64.b64decode(
            self.call("Page.captureScreenshot", format="png", **options)["data"]
        )

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])


@contextlib.contextmanager
def launched(browser: str, profile: Path, seconds: float = 120.0) -> Iterator[Page]:
    """Starts the browser with a fresh profile, and ends it with all that it started."""
    # The browser reads commands from descriptor 3 and answers on 4.
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 20) for each in (commands, answers)]
    os.close(commands)
    os.close(answers)
    arguments = [
        browser,
        "--headless=new",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
        "--no-sandbox",
        "--no-first-run",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--hide-scrollbars",
    ]
    quiet = os.open(os.devnull, os.O_RDWR)
    process = os.posix_spawn(
        browser,
        arguments,
        {**os.environ, "HOME": str(profile)},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, quiet, 1),
            (os.POSIX_SPAWN_DUP2, quiet, 2),
            (os.POSIX_SPAWN_DUP2, high[0], 3),
            (os.POSIX_SPAWN_DUP2, high[1], 4),
        ],
        setpgroup=0,
    )
    for each in (*high, quiet):
        os.close(each)
    try:
        yield Page(to_browser, from_browser, seconds)
    finally:
        for each in (to_browser, from_browser):
            os.close(each)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
