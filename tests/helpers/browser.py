"""A headless Chromium, driven over its debugging pipe: no driver and no library in between."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)
_PATIENCE_S = 60.0


class Tab:
    """One page. errors: what its console told; urls: what it fetched."""

    def __init__(self, send: int, receive: int) -> None:
        self.errors: list[str] = []
        self.urls: list[str] = []
        self._send = send
        self._receive = receive
        self._held = b""
        self._messages: deque[dict[str, Any]] = deque()
        self._n_sent = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(1280, 800)

    def call(self, method: str, **params: Any) -> Any:
        """A command of the protocol, and its result."""
        self._n_sent += 1
        message = {"id": self._n_sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._n_sent:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never came true: {condition}; {self.errors}"
            time.sleep(0.03)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({selector!r}).click()")

    def type(self, selector: str, text: str) -> None:
        """Type as a user does, at the end of a field."""
        self.run(f"document.querySelector({selector!r}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, text: str = "") -> None:
        keys = {"key": key, "code": key, "windowsVirtualKeyCode": {"Enter": 13, "Escape": 27, "Tab": 9}[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **keys)
        self.call("Input.dispatchKeyEvent", type="keyUp", **keys)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._held:
            assert time.monotonic() < deadline, "the browser does not answer"
            data = os.read(self._receive, 1 << 16)
            assert data, "the browser has ended"
            self._held += data
        message, _, self._held = self._held.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])


@contextmanager
def browsing(profile: Path) -> Iterator[Tab]:
    """A tab of a fresh browser, whose profile is kept in an empty folder."""
    assert CHROMIUM is not None
    to_browser, send = os.pipe()
    receive, from_browser = os.pipe()
    command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    process = subprocess.Popen(
        ["bash", "-c", command, CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Tab(send, receive)
    finally:
        os.close(send)
        os.close(receive)
        process.terminate()
        process.wait(20)
