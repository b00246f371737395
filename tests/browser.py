"""A headless Chromium for tests of pages, driven through its pipe (the Chrome DevTools Protocol)."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
_OPTIONS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--mute-audio", "--no-first-run", "--disable-background-networking", "--disable-sync"),
)
_SECONDS = 60.0
_KEYS = {"Enter": 13, "Escape": 27}


class Browser:
    """A browser with one page. The end of the context ends it.

    Attributes:
        problems: errors and warnings of the console, and exceptions of the page.
        requests: addresses that the page has loaded.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._events: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        theirs, self._write = os.pipe()
        self._read, answers = os.pipe()
        # Chromium reads from file 3 and writes to 4; a copy above them cannot be overwritten by the other.
        theirs, answers = (_moved(number) for number in (theirs, answers))
        null = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, null, number) for number in (0, 1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, theirs, 3), (os.POSIX_SPAWN_DUP2, answers, 4)]
        assert CHROMIUM is not None
        command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = os.posix_spawn(CHROMIUM, command, os.environ, file_actions=actions, setpgroup=0)
        for number in (theirs, answers, null):
            os.close(number)
        self._buffer, self._number, self._session = b"", 0, ""

    def __enter__(self) -> Browser:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def open(self, page: Path | str, width: int, height: int = 900, touch: bool = False) -> None:
        """Load a page from the disk, or of an address, in a window of a width, in CSS pixels, as on a phone if touched."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self._call("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.problems.clear()
        self.requests.clear()
        self._events.clear()
        moved = self._call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while "loaderId" in moved and "Page.loadEventFired" not in self._events:  # none for a place on the same page
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """Return the plain value of an expression on the page, after a promise is fulfilled."""
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Return the value of an expression on the page as soon as it is true."""
        end = time.monotonic() + _SECONDS
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)
        return value

    def point(self, x: float, y: float) -> None:
        """Move the mouse to a place of the window, in CSS pixels."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type(self, text: str, key: str) -> None:
        """Type a text into the element that has the focus, and press a key, such as Enter."""
        self._call("Input.insertText", text=text)
        for method in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=method, key=key, code=key, windowsVirtualKeyCode=_KEYS[key])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        """Return the next message, after noting what it reports."""
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._read, 2**20) if ready else b""
            if not part:
                raise TimeoutError("Chromium does not answer")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


def _moved(number: int) -> int:
    """Return a copy of an open file with a number above 9, and close the original."""
    copy = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(number)
    return copy
