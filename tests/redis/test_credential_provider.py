"""Passwords that change while a process runs: ``broker_credential_provider``."""

from __future__ import annotations

import asyncio
import re
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import redis
from redis.credentials import CredentialProvider

from bulltask import App
from bulltask.errors import BrokerAuthError, BrokerError, BrokerUnavailableError, ConfigError
from bulltask.transport import endpoint
from bulltask.transport.call import Call, command

pytestmark = pytest.mark.redis

CLIENT_ID: Call[int] = command("CLIENT", "ID")
WHOAMI: Call[Any] = command("ACL", "WHOAMI")


class Server:
    """An ACL user of the test's server, whose password the test changes."""

    def __init__(self, url: str, client: redis.Redis, user: str = "") -> None:
        self.url, self._client = url, client
        self.user = user or f"user-{secrets.token_hex(4)}"
        self.set_password("first")

    def set_password(self, password: str) -> None:
        self._client.execute_command("ACL SETUSER", self.user, "reset", "on", f">{password}", "~*", "&*", "+@all")

    def close_connections(self) -> int:
        return self._client.client_kill_filter(user=self.user)

    @property
    def user_url(self) -> str:
        return self.url.replace("://", f"://{self.user}@")


@pytest.fixture
def server(broker_url: str, redis_client: redis.Redis) -> Iterator[Server]:
    server = Server(broker_url, redis_client)
    yield server
    redis_client.acl_deluser(server.user)


def send(app: App) -> str:
    """Send a job with the sync client and one with the async client; return the user of the connections."""
    app.send_task("add")

    async def asend() -> None:
        await app.asend_task("add")
        await app._broker.aclose()

    asyncio.run(asend())
    user: bytes = app._broker.pool.run(WHOAMI)
    return user.decode()


class Provider(CredentialProvider):
    """A provider for redis-py, such as those for IAM and Entra."""

    def __init__(self, user: str) -> None:
        self.user, self.password, self.calls = user, "first", 0

    def get_credentials(self) -> tuple[str, str]:
        self.calls += 1
        return self.user, self.password


def test_every_connection_asks_the_provider_for_credentials(server: Server) -> None:
    provider = Provider(server.user)
    app = App("shop", server.url, broker_credential_provider=provider)
    assert send(app) == server.user
    server.set_password("second")
    provider.password = "second"
    assert server.close_connections() == 1
    assert send(app) == server.user
    assert provider.calls == 4, "each connection asks once"
    app.close()


def test_a_function_may_return_only_a_password_for_the_user_in_the_url(server: Server) -> None:
    app = App("shop", server.user_url, broker_credential_provider=lambda: "first")
    assert send(app) == server.user
    app.close()


def test_the_password_may_be_in_a_file_that_is_read_at_each_connect(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "a password"
    file.write_text("first\n")
    app = App("shop", server.user_url, broker_credential_provider=f"file://{tmp_path}/a%20password")
    assert send(app) == server.user
    server.set_password("second ")
    file.write_text("second ")
    server.close_connections()
    assert send(app) == server.user
    app.close()


def test_a_provider_may_be_named_in_the_environment(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named_provider.py").write_text(
        f"class Provider:\n    def get_credentials(self):\n        return {server.user!r}, 'first'\n\n"
        "provider = Provider()\ndef function():\n    return provider.get_credentials()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("Provider", "provider", "function"):
        monkeypatch.setenv("BULLTASK_BROKER_CREDENTIAL_PROVIDER", f"named_provider:{name}")
        app = App("shop", server.url)
        assert send(app) == server.user
        app.close()


@pytest.mark.one_server  # it counts connections
def test_an_open_connection_authenticates_again_before_its_credentials_expire(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = Provider(server.user)
    app = App("shop", server.url, broker_credential_provider=provider)
    client, shared = app._broker.client(), app._broker.async_client()

    async def id_of() -> int:
        return await shared.run(CLIENT_ID)

    with asyncio.Runner() as runner:
        monkeypatch.setattr(endpoint, "REAUTHENTICATE_MS", 60_000)
        connections = client.run(CLIENT_ID), runner.run(id_of())
        assert (client.run(CLIENT_ID), runner.run(id_of())) == connections
        assert provider.calls == 2
        client.close()
        runner.run(shared.close())

        monkeypatch.setattr(endpoint, "REAUTHENTICATE_MS", 0)
        connections = client.run(CLIENT_ID), runner.run(id_of())
        before = provider.calls
        assert (client.run(CLIENT_ID), runner.run(id_of())) == connections
        assert provider.calls == before + 2

        provider.password = "not valid yet"
        assert (client.run(CLIENT_ID), runner.run(id_of())) == connections
        runner.run(shared.close())
    client.close()
    app.close()


def raising() -> str:
    raise OSError("the token service is down")


async def async_function() -> str:
    return "token"


@pytest.mark.parametrize(
    ("provider", "error", "message"),
    [
        (lambda: "wrong", BrokerAuthError, "Check the user and password in broker_url .* broker_credential_provider"),
        (raising, BrokerUnavailableError, "broker_credential_provider raised OSError: the token service is down"),
        (async_function, BrokerAuthError, "returned coroutine; it must return a password, or a user and a password"),
        (lambda: None, BrokerAuthError, "returned NoneType; it must return a password"),
        (lambda: "", BrokerAuthError, "returned str; it must return a password"),
        ("file:///nowhere/password", BrokerAuthError, r"cannot read the password in /nowhere/password \(broker_cred"),
        ("no_such_module:provider", ConfigError, "cannot import broker_credential_provider 'no_such_module:provider'"),
        ("bulltask:provider", ConfigError, "cannot import broker_credential_provider 'bulltask:provider'"),
    ],
)
def test_an_error_says_what_to_do(server: Server, provider: Any, error: type[Exception], message: str) -> None:
    app = App("shop", server.user_url, broker_credential_provider=provider, broker_publish_retries=0)
    with pytest.raises(error, match=message):
        app.send_task("add")

    async def asend() -> None:
        try:
            await app.asend_task("add")
        finally:
            await app.aclose()

    with pytest.raises(error, match=message):
        asyncio.run(asend())
    app.close()


def test_a_missing_password_and_a_superfluous_one_are_explained(server: Server, redis_client: redis.Redis) -> None:
    redis_client.execute_command("ACL SETUSER", server.user, "on", ">first")
    wrong = App("shop", server.url.replace("://", f"://{server.user}:wrong@"), broker_publish_retries=0)
    with pytest.raises(BrokerAuthError, match=rf"Check the user .* ACL GETUSER {server.user} shows whether"):
        wrong.send_task("add")
    superfluous = App("shop", server.url.replace("://", "://:password@"), broker_publish_retries=0)
    with pytest.raises(BrokerError, match="The server needs no password: remove it from broker_url"):
        superfluous.send_task("add")


@pytest.mark.parametrize(
    ("title", "user"), [("elasticache", "worker"), ("entra", "00000000-0000-0000-0000-000000000000")]
)
def test_the_providers_in_the_documentation_work(
    broker_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, title: str, user: str
) -> None:
    token, toolkit, identity = SimpleNamespace(token="first"), ModuleType("toolkit"), ModuleType("identity")
    monkeypatch.setitem(sys.modules, "developer_toolkit_elasticache", toolkit)
    monkeypatch.setitem(sys.modules, "azure", ModuleType("azure"))
    monkeypatch.setitem(sys.modules, "azure.identity", identity)
    monkeypatch.setattr(toolkit, "generate_iam_auth_token", lambda **_: token.token, raising=False)
    credential = SimpleNamespace(get_token=lambda scope: token if scope.endswith("/.default") else None)
    monkeypatch.setattr(identity, "DefaultAzureCredential", lambda: credential, raising=False)
    page = (Path(__file__).parents[2] / "docs/how-to/managed-redis.md").read_text()
    [source] = re.findall(rf"```python\n(# {title}\.py\n.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(source, names)
    server = Server(broker_url, redis_client, user)
    app = App("shop", broker_url, broker_credential_provider=names["redis_credentials"])
    assert send(app) == user
    token.token = "second"
    server.set_password("second")
    server.close_connections()
    assert send(app) == user
    app.close()
    redis_client.acl_deluser(user)


@pytest.mark.parametrize("value", ["a password", "file://relative", "module", 5, object(), "module:a.b"])
def test_an_invalid_provider_is_rejected_without_showing_it(value: object) -> None:
    with pytest.raises(ConfigError, match="broker_credential_provider must be a credential provider, a func") as caught:
        App("shop", broker_credential_provider=value)
    assert "a password," not in str(caught.value)


def test_a_password_in_the_url_and_a_provider_exclude_each_other() -> None:
    app = App("shop", "redis://user:secret@host", broker_credential_provider=lambda: "token")
    with pytest.raises(ConfigError, match="remove one of them") as caught:
        app.conf.freeze()
    assert "secret" not in str(caught.value)
