"""Chromium without a window, by its driver's own protocol: pages are looked at as a reader sees them."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest


class Refused(Exception):
    """The driver could not do what it was asked."""


class Browser:
    """Chromium through its driver's own protocol."""

    def __init__(self, width: int, height: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.base = f"http://127.0.0.1:{port}"
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--window-size={width},{height}",
        ]
        wanted = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
        for _ in range(100):
            try:
                session = self.ask("/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
                break
            except (urllib.error.URLError, Refused):
                time.sleep(0.1)
        else:
            self.driver.terminate()
            pytest.skip("chromedriver does not answer")
        self.base += f"/session/{session}"
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.cdp("Emulation.setDeviceMetricsOverride", metrics)

    def ask(self, path: str, body: dict | None = None) -> object:
        """The driver's answer; its own words where it refuses."""
        sent = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, sent, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise Refused(f"{path}: {error.read().decode()[:500]}") from error

    def cdp(self, command: str, parameters: dict) -> None:
        self.ask("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, path) -> None:
        self.ask("/url", {"url": path.as_uri()})

    def js(self, code: str) -> object:
        return self.ask("/execute/sync", {"script": code, "args": []})

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.ask("/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"]

    def screenshot(self, path) -> None:
        """A picture of the window. On a busy machine the page may not be drawn yet: the driver is asked again."""
        for patience in (1, 2, 4, 8, None):
            try:
                path.write_bytes(base64.b64decode(self.ask("/screenshot")))
                return
            except Refused:
                if patience is None:
                    raise
                time.sleep(patience)

    def close(self) -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(self.base, method="DELETE"), timeout=20).close()
        finally:
            self.driver.terminate()
            self.driver.wait(20)


def opened(width: int, height: int):
    """A browser of this size, closed at the end; what a fixture yields from."""
    if shutil.which("chromedriver") is None:
        pytest.skip("no chromedriver: install Debian's chromium and chromium-driver to test the report in a browser")
    browser = Browser(width, height)
    try:
        yield browser
    finally:
        browser.close()
