"""A headless Chromium driven over the DevTools pipe, with the standard library only. It loads files and nothing else."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

EXECUTABLES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-default-apps", "--disable-extensions",
         "--disable-dev-shm-usage", "--no-first-run", "--no-default-browser-check", "--mute-audio", "--disable-breakpad",
         "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe")


def find_chromium() -> str | None:
    """Return the path of a Chromium, or None."""
    given = os.environ.get("WEFT_CHROMIUM")
    return given or next((path for path in map(shutil.which, EXECUTABLES) if path), None)


class Browser:
    """One page in one browser process; use it as a context manager. Every wait ends at ``deadline_s``."""

    def __init__(self, *, deadline_s: float = 60.0) -> None:
        self.deadline = time.monotonic() + deadline_s
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None
        self._number = 0
        self._buffer = b""

    def __enter__(self) -> Browser:
        executable = find_chromium()
        assert executable is not None, "no Chromium on this machine"
        self._profile = tempfile.mkdtemp(prefix="weft-browser-")
        child_in, self._write = os.pipe()
        self._read, child_out = os.pipe()

        def connect() -> None:
            # Copies above 9 first, so that neither is overwritten when the other moves to its place.
            low, high = os.dup(child_in), os.dup(child_out)
            while low < 10:
                low = os.dup(low)
            while high < 10:
                high = os.dup(high)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self._process = subprocess.Popen(
            [executable, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=connect, pass_fds=(3, 4),
            start_new_session=True, env={**os.environ, "HOME": self._profile})
        os.close(child_in)
        os.close(child_out)
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10)
        os.close(self._write)
        os.close(self._read)
        for _attempt in range(20):
            shutil.rmtree(self._profile, ignore_errors=True)
            if not os.path.exists(self._profile):
                return
            time.sleep(0.1)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a DevTools command."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = self.deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError("the browser did not answer in time")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(text)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until its timeline is drawn (or, without one, until it is loaded)."""
        self.resize(width, height)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete' && document.getElementById('chart')?.dataset.drawn !== undefined")

    def resize(self, width: int, height: int) -> None:
        """Set the size of the viewport."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until the JavaScript expression holds."""
        while not self.evaluate(expression):
            if time.monotonic() > self.deadline:
                raise TimeoutError(f"never true: {expression}")
            time.sleep(0.05)

    def settle(self) -> None:
        """Wait until everything asked for is drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 20))))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send a mouse event: ``mouseMoved``, ``mousePressed``, ``mouseReleased`` or ``mouseWheel``."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.settle()

    def key(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the viewport, or of the whole page."""
        self.settle()
        result = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(result["data"]))

    def requests(self) -> list[str]:
        """Return the addresses that were asked for so far."""
        self.evaluate("0")
        return [event["params"]["request"]["url"] for event in self.events
                if event.get("method") == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Return errors that the page or the browser's policy reported so far."""
        self.evaluate("0")
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"]))
            if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"])
        return found
