"""``bulltask dashboard``: its options, where it prints its address, and how it stops."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from click.testing import CliRunner, Result

from bulltask import App
from bulltask.cli import dashboard as cli
from bulltask.cli.main import main
from bulltask.dashboard import Role
from bulltask.jobs.clock import mono_s
from tests.dashboard.conftest import Browser
from tests.support.machine_load import scale_to_load

pytestmark = pytest.mark.redis


class Command:
    """Runs the command without its server: ``site`` is the app that it would have served."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.site: Any = None

    def __call__(self, *arguments: str, **environment: str) -> Result:
        command = ["dashboard", "-b", self.url, "--port", "0", *arguments]
        return CliRunner().invoke(main, command, env={f"BULLTASK_DASHBOARD_{k}": v for k, v in environment.items()})

    def browser(self, address: str = "127.0.0.1") -> Browser:
        return Browser(self.site, address, base_url="http://localhost:8787")


@pytest.fixture
def command(single_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    command, sites = Command(single_url), list[Any]()

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        command.site = server.config.app
        sites.append(command.site)
        for listener in sockets:
            listener.close()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr("bulltask.observe.log.configure", lambda **_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    yield command
    for site in sites:
        site._app.close()


def test_it_prints_an_address_that_logs_in(command: Command) -> None:
    (path,) = re.findall(r"^Dashboard: http://127\.0\.0\.1:\d+(/login\?token=\S{32})\n$", command().output)
    browser = command.browser()
    assert browser.get("/").url.path == "/login"
    assert browser.get(path).url.path == "/"
    assert browser.get("/", headers={"host": "evil.example"}).status_code == 421


def test_a_secret_of_its_own_comes_from_the_environment_or_a_file_and_is_not_printed(
    command: Command, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("open sesame\n")
    token = "a token that was set"
    printed = command(TOKEN=token, PASSWORD_FILE=str(file)).output
    assert re.fullmatch(r"Dashboard: http://127\.0\.0\.1:\d+/\n", printed)
    for secret in (token, "open sesame"):
        assert command.browser().post("/login", data={"secret": secret}).url.path == "/"


def test_users_and_roles_of_a_proxy(command: Command) -> None:
    options = ["--user-header", "X-User", "--proxy", "10.0.0.0/8", "--role", "*=operator", "--role", "ann=admin"]
    assert "token" not in command(*options, "--host", "0.0.0.0", "--path", "/ops").output
    proxy = command.browser("10.1.1.1")
    assert proxy.get("/ops/audit", headers={"X-User": "ann"}).status_code == 200
    assert proxy.get("/ops/audit", headers={"X-User": "bob"}).status_code == 403
    assert command.browser("11.1.1.1").get("/ops/audit", headers={"X-User": "ann"}).url.path == "/ops/login"


def test_the_tasks_of_an_app_can_be_run(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dashboard_shop.py").write_text(
        "from bulltask import App\n"
        "app = App('shop')\n"
        "@app.task(name='shop.add')\n"
        "def add(x: int, y: int) -> int: return x + y\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert command("-A", "dashboard_shop", "--anonymous", "operator").exit_code == 0
    assert "shop.add" in command.browser().get("/run").text
    assert command("-A", "no_such_module").exit_code == 1


@pytest.mark.parametrize(
    ("options", "environment", "error"),
    [
        (["--host", "0.0.0.0", "--anonymous", "viewer"], {}, "would let everybody in"),
        (["--host", "::", "--anonymous", "viewer"], {}, "would let everybody in"),
        (["--host", "example.com", "--anonymous", "viewer"], {}, "would let everybody in"),
        (["--user-header", "X-User"], {}, "needs the proxies"),
        (["--user-header", "X-User", "--proxy", "somewhere"], {}, "addresses or networks"),
        (["--role", "ann=boss"], {}, "roles are viewer, operator, admin"),
        ([], {"TOKEN": "short"}, "at least 16 characters"),
        ([], {"PASSWORD": "short"}, "at least 8 characters"),
        ([], {"PASSWORD_FILE": "/nowhere"}, "cannot read the file in BULLTASK_DASHBOARD_PASSWORD_FILE"),
        ([], {"TOKEN_FILE": os.devnull}, "is empty"),
    ],
)
def test_what_would_not_be_safe_is_refused(
    command: Command, options: list[str], environment: dict[str, str], error: str
) -> None:
    result = command(*options, **environment)
    assert result.exit_code in {1, 2}
    assert error in " ".join(result.output.split())
    assert command.site is None


def test_the_command_knows_all_roles_without_the_extra() -> None:
    assert list(cli._ROLES) == [role.name.lower() for role in Role]


def test_a_port_that_is_in_use_is_named(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = command("--port", str(port))
    assert result.exit_code == 1
    assert f"port {port}: Address already in use. Choose another --port" in result.output


@pytest.mark.process
def test_it_stops_at_once_although_a_page_is_open_and_logs_logins(app: App, single_url: str) -> None:
    app.send_task("send", queue="mail")
    environment = {**os.environ, "BULLTASK_DASHBOARD_PASSWORD": "open sesame"}
    arguments = [sys.executable, "-m", "bulltask", "dashboard", "-b", single_url, "--port", "0"]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            (address,) = re.findall(r"http://\S+", process.stdout.readline())
            with httpx.Client(base_url=address, follow_redirects=True, timeout=60) as client:
                assert "mail" in client.post("/login", data={"secret": "open sesame"}).text
                assert "<h1>Queue a/b%2f</h1>" in client.get("/queues/a%252Fb%25252f").text
                # Without TCP_NODELAY, each reply after the first one of a connection takes 40 ms more.
                assert min(client.get("/static/icon.svg").elapsed for _ in range(20)) < timedelta(milliseconds=35)
                with client.stream("GET", "/", headers={"accept": "text/event-stream"}) as stream:
                    assert next(stream.iter_lines()).startswith("data: ")
                    began = mono_s()
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(scale_to_load(30)) == 0
                    assert mono_s() - began < scale_to_load(2)  # less than it waits for requests that do not end
            (line,) = process.stderr.read().splitlines()
            logged = json.loads(line)
            assert logged["event"] == "dashboard: password (127.0.0.1) login: logged in"
            assert logged["logger"] == "bulltask.dashboard.audit"
        finally:
            process.kill()
