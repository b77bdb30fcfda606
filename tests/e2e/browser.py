"""A browser as somebody uses it: keys that are pressed, and names as a screen reader gets them.

Speaks the DevTools protocol over the browser's own pipe (https://chromedevtools.github.io/devtools-protocol): messages
of JSON, each ended by a zero byte. Nothing here waits for a frame to be painted.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_PATIENCE_S = 180.0
_KEYS = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    " ": (32, " "),
    "End": (35, ""),
    "Home": (36, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
}
_CODES = {" ": "Space"}
_AS_3_AND_4 = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]]
for number, pipe in enumerate(pipes, 3):
    os.dup2(pipe, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from descriptor 3 and answers on 4; what is inherited has other numbers."""
_SHIFT = 8


class Page:
    """One tab. `errors` are exceptions and messages of the console that say one."""

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self._process, self._write, self._read = process, write, read
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []

    def open(self, url: str) -> None:
        """Returns when it has loaded."""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Accessibility"):
            self._ask(f"{domain}.enable")
        self._ask("Emulation.setFocusEmulationEnabled", enabled=True)  # as if its window were in front
        self._ask("Page.navigate", url=url)
        self.until(lambda: self.run("location.href !== 'about:blank' && document.readyState") == "complete")

    def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        told = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def press(self, key: str, *, shift: bool = False) -> None:
        """Down and up, where the focus is."""
        number, text = _KEYS[key]
        event = {
            "key": key,
            "code": _CODES.get(key, key),
            "windowsVirtualKeyCode": number,
            "modifiers": _SHIFT if shift else 0,
        }
        self._ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event)
        self._ask("Input.dispatchKeyEvent", type="keyUp", **event)

    def spoken(self) -> list[dict[str, Any]]:
        """The accessibility tree without what is ignored: role, name, value and properties of each node."""
        nodes = self._ask("Accessibility.getFullAXTree")["nodes"]
        return [
            {
                "role": node["role"]["value"],
                "name": node.get("name", {}).get("value", "").strip(),
                "value": node.get("value", {}).get("value"),
                **{p["name"]: p["value"].get("value") for p in node.get("properties", ())},
            }
            for node in nodes
            if not node["ignored"]
        ]

    def resize(self, *, width: int, height: int = 900) -> None:
        """Returns when the page has heard of it."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        self.until(lambda: self.run("innerWidth") == width)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it never came"
            time.sleep(0.02)

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, (method, told["error"])
                found: dict[str, Any] = told["result"]
                return found
            if told.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["params"]["exceptionDetails"]))
            if told.get("method") == "Runtime.consoleAPICalled" and told["params"]["type"] in ("error", "warning"):
                self.errors.append(json.dumps(told["params"]["args"]))

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            assert data, f"the browser says nothing more (it ended with {self._process.poll()})"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told


@contextlib.contextmanager
def browser(program: str, profile: Path, *flags: str) -> Iterator[Page]:
    """A headless one of its own, without any network."""
    here, theirs = os.pipe(), os.pipe()
    shell = [sys.executable, "-c", _AS_3_AND_4, str(here[0]), str(theirs[1]), program]
    words: Sequence[str] = (
        *shell,
        *(
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-sync",
            "--remote-debugging-pipe",
        ),
        *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--hide-scrollbars"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9", f"--user-data-dir={profile}"),
        *flags,
    )
    process = subprocess.Popen(
        words, pass_fds=(here[0], theirs[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(here[0])
    os.close(theirs[1])
    page = Page(process, here[1], theirs[0])
    try:
        yield page
    finally:
        with contextlib.suppress(Exception):
            page._session = None
            page._ask("Browser.close")
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(here[1])
        os.close(theirs[0])
