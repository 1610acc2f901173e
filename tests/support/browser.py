"""Drive Chromium, and serve a dashboard to it."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import uvicorn
from selenium.common.exceptions import ElementNotInteractableException, StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from bulltask.cli.dashboard import _server
from bulltask.dashboard import Dashboard
from tests.support.processes import SESSION_VARIABLE

__all__ = ["Chromium", "Keys", "WebElement", "served"]

_WATCH: Final = """
window.seen = [];
addEventListener("securitypolicyviolation", (event) => seen.push(`policy: ${event.violatedDirective}`));
addEventListener("error", (event) => seen.push(`error: ${event.message}`), true);
addEventListener("unhandledrejection", (event) => seen.push(`error: ${event.reason}`));
for (const name of ["alert", "prompt", "print", "open"]) window[name] = () => seen.push(`called: ${name}`);
"""
"""Notes what a page must not do; ``confirm`` is left, because pages ask before they remove."""


class Chromium:
    """A browser without a window."""

    def __init__(self, profile: str) -> None:
        programs = [shutil.which(name) or pytest.skip(f"needs {name}") for name in ("chromium", "chromedriver")]
        options = ChromeOptions()
        options.binary_location = programs[0]
        for argument in ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-breakpad"):
            options.add_argument(f"--{argument}")
        options.add_argument(f"--user-data-dir={profile}")
        options.set_capability("goog:loggingPrefs", {"browser": "WARNING"})
        # Its processes come and go: without the variable, tests do not take them for processes that they have left.
        environment = {name: value for name, value in os.environ.items() if name != SESSION_VARIABLE}
        service = Service(programs[1], env=environment)
        self.driver = Chrome(options, service)
        self.pid = service.process.pid
        self._run("Page.enable")
        self._run("Emulation.setScrollbarsHidden", hidden=True)
        self._run("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)

    def _run(self, command: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        # Asking more often would slow the browser down.
        WebDriverWait(self.driver, 30, poll_frequency=0.05).until(lambda _: condition(), f"waiting for {what}")

    def look_like(self, width: int = 1280, height: int = 900, *, dark: bool = False, scale: float = 1) -> None:
        """Take the size of a screen, and a theme; a narrow one is a phone's, which is touched."""
        phone = width < 600
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self._run("Emulation.setDeviceMetricsOverride", **metrics)
        self._run("Emulation.setTouchEmulationEnabled", enabled=phone)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._run("Emulation.setEmulatedMedia", features=[theme, {"name": "prefers-reduced-motion", "value": "reduce"}])

    def forget(self) -> None:
        """Become a new visitor, on a desk."""
        self.driver.get("about:blank")
        self._run("Network.clearBrowserCookies")
        self.driver.get_log("browser")
        self.look_like()

    @contextmanager
    def having_run_in_each_page(self, script: str) -> Iterator[None]:
        """Run JavaScript in each page that is opened inside the ``with`` block, before anything else."""
        added = self._run("Page.addScriptToEvaluateOnNewDocument", source=script)
        try:
            yield
        finally:
            self._run("Page.removeScriptToEvaluateOnNewDocument", **added)

    def run(self, script: str, *arguments: object) -> Any:
        """Run JavaScript in the page, and return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        """Return the element with this CSS selector, when there is one."""
        found = list[WebElement]()

        def is_there() -> bool:
            found[:] = self.driver.find_elements(By.CSS_SELECTOR, selector)
            return bool(found)

        self._wait(is_there, selector)
        return found[0]

    def click(self, name: str, tag: str = "button, a, summary") -> None:
        """Click on what has this name, as users of screen readers know it, when there is such a thing."""
        self._with_name(name, tag, WebElement.click)

    def focus(self, name: str, tag: str = "button, a, summary") -> None:
        """Move the focus to what has this name."""
        self._with_name(name, tag, lambda one: self.run("arguments[0].focus()", one))

    def press(self, *keys: str) -> None:
        """Press keys."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def _with_name(self, name: str, tag: str, act: Callable[[WebElement], object]) -> None:
        candidates = """return [...document.querySelectorAll(arguments[0])].filter((one) =>
            (one.ariaLabel ?? one.innerText ?? "").trim() === arguments[1])"""

        def acted() -> bool:
            try:
                found = [one for one in self.run(candidates, tag, name) if one.accessible_name == name][:1]
                for one in found:
                    act(one)
            except (StaleElementReferenceException, ElementNotInteractableException):  # the page has just been updated
                return False
            return bool(found)

        self._wait(acted, name)

    def text(self, selector: str = "main") -> str:
        """Return what an element shows now, in one line; ``""`` if there is none."""
        shown = self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        return " ".join(str(shown).split())

    def wait_for(self, text: str, selector: str = "main") -> None:
        """Wait until an element shows a text."""
        self._wait(lambda: text in self.text(selector), text)

    def misdeeds(self) -> list[str]:
        """Return what the page has done that no page may do, and the errors and warnings of the browser since then."""
        logged = [f"{one['level']}: {one['message']}" for one in self.driver.get_log("browser")]
        return [*self.run("return window.seen"), *logged]

    def picture(self) -> bytes:
        """Return the visible part of the page as PNG."""
        return self.driver.get_screenshot_as_png()

    def close(self) -> None:
        """End it."""
        self.driver.quit()

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Chromium]:
        """Start a browser with a profile of its own, and end it."""
        with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
            chromium = cls(profile)
            try:
                yield chromium
            finally:
                chromium.close()


@contextmanager
def served(site: Any) -> Iterator[str]:
    """Serve an ASGI app on a free port, a dashboard as the command does, from a thread; yields its address."""
    config = uvicorn.Config(site, log_config=None, log_level="warning", access_log=False, lifespan="off", ws="none")
    server = _server(config, site) if isinstance(site, Dashboard) else uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="dashboard")
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
