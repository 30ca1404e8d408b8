"""A headless Chromium, driven over its DevTools protocol; what it complains about is kept."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from websockets.sync.client import ClientConnection, connect

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    """Path of an installed one."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page; ``requests`` are the addresses that it asked for, ``complaints`` its errors."""

    def __init__(self, chromium: str) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        quiet = ["--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"]
        self._process = subprocess.Popen(
            [chromium, *options, *quiet, f"--user-data-dir={self._home.name}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._ids = itertools.count(1)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._socket = self._connect()
        (page,) = [
            target
            for target in self._call("Target.getTargets")["targetInfos"]
            if target["type"] == "page"
        ]
        attach = {"targetId": page["targetId"], "flatten": True}
        self._session = self._call("Target.attachToTarget", **attach)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(20)
        self._home.cleanup()

    def _connect(self) -> ClientConnection:
        """To the port that it has written down, once it has."""
        file, deadline = Path(self._home.name) / "DevToolsActivePort", time.monotonic() + 60
        while not (file.is_file() and file.read_text().count("\n")):
            assert self._process.poll() is None, "chromium does not start"
            assert time.monotonic() < deadline, "chromium is not ready in time"
            time.sleep(0.05)
        port, path = file.read_text().splitlines()[:2]
        return connect(f"ws://127.0.0.1:{port}{path}", max_size=None)

    def call(self, method: str, **params: Any) -> Any:
        """A command to the page; its result."""
        return self._call(method, self._session, **params)

    def _call(self, method: str, session: str | None = None, **params: Any) -> Any:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        self._socket.send(json.dumps(message | ({"sessionId": session} if session else {})))
        while (answer := json.loads(self._socket.recv(timeout=60))).get("id") != number:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.complaints.append(str(params["args"]))

    def open(self, url: str) -> None:
        """Go to an address; return when the page and its scripts are there."""
        self.call("Page.navigate", url=url)
        self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    def value(self, script: str) -> Any:
        """What a JavaScript expression gives, as JSON can hold it."""
        asked = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str, timeout_s: float = 60.0) -> Any:
        """The first true value of an expression."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.value(script)):
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {script}"
            time.sleep(0.1)
        return found

    def look_at(self, width: int, height: int, *, dark: bool = False) -> None:
        """Size of the window, and the colour scheme that the user is said to like."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScrollbarsHidden", hidden=True)

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """Write what is seen as PNG; ``whole`` takes what lies below the window too."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(data["data"]))

    def hover(self, selector: str) -> None:
        """Put the pointer onto the first element that fits."""
        box = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'nearest'});"
            "const b = e.getBoundingClientRect();"
            "return [b.left + b.width / 2, b.top + b.height / 2] })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
