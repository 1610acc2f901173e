"""The broker's password and the keys are in no message, and in no variable that tools such as Sentry send with a
traceback."""

from __future__ import annotations

import asyncio
import json
import os
import traceback
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import bulltask
from bulltask import App
from bulltask.cli.main import main
from bulltask.config.settings import Settings
from bulltask.errors import BulltaskError, DecodeError
from bulltask.jobs.job import JobRef
from bulltask.jobs.payloads import PayloadCodec, PayloadFormat
from bulltask.queue import FlowProducer, Queue, QueueEvents
from bulltask.spark.source.options import EventsOptions, broker_options, read_options
from bulltask.worker.spawned import SpawnSpec
from tests.conftest import ServerFactory

pytestmark = pytest.mark.redis

SECRET = "s3cr3t"
KEY = f"k1:{SECRET}{'A' * 37}"
KEY_BYTES = repr(b64decode(f"{SECRET}AA"))[2:-2]
LIBRARY = Path(bulltask.__file__).parent


def chain(exc: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its causes and its contexts, also those that tracebacks do not show."""
    left: list[BaseException | None] = [exc]
    while left:
        if (following := left.pop()) is not None:
            yield following
            left += [following.__cause__, following.__context__]


def report_text(value: object) -> str:
    """Return what an error report prints: the repr, or only the class of a half-initialized object."""
    try:
        return repr(value)
    except AttributeError:
        return object.__repr__(value)


def is_shown_in(text: str) -> bool:
    return SECRET in text or KEY_BYTES in text


def leaks(exc: BaseException) -> list[str]:
    """Return where the password appears: in messages, and in variables of all frames outside this module."""
    places = [f"message of {type(error).__name__}: {error}" for error in chain(exc) if is_shown_in(str(error))]
    for error in chain(exc):
        for frame, line in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == __file__:
                continue
            for name, value in frame.f_locals.items():
                if is_shown_in(report_text(value)):
                    places.append(f"{name} in {frame.f_code.co_filename}:{line}")
    return places


def url_to(host: str) -> str:
    return f"redis://:{SECRET}@{host}"


def send(url: str) -> None:
    App("shop", url, broker_reconnect_delay=0.01).send_task("work")


def asend(url: str) -> None:
    asyncio.run(App("shop", url, broker_reconnect_delay=0.01).asend_task("work"))


def update_setting(url: str) -> None:
    App("shop").conf.update(broker_url=url, prefix="")


def read_object(url: str) -> None:
    settings = type("DjangoSettings", (), {"CELERY_BROKER_URL": url, "CELERY_RESULT_BACKEND": url, "CELERY_PREFIX": ""})
    App("shop").config_from_object(settings, namespace="CELERY")


def pass_celerys_arguments(url: str) -> None:
    App("shop", broker=url, backend=url, prefix="")


def read_environment(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BULLTASK_BROKER_URL", url)
        App("shop", prefix="")


@pytest.mark.parametrize("send_task", [send, asend])
@pytest.mark.parametrize(
    "url",
    [
        url_to("127.0.0.1:1"),
        url_to("127.0.0.1:port"),
        url_to("127.0.0.1?nonsense=1"),
        url_to("127.0.0.1?socket_timeout=soon"),
        url_to("127.0.0.1?max_connections=many"),
        url_to("127.0.0.1?health_check_interval=x"),
        f"redis://:{SECRET}/#@127.0.0.1",
        f"redis://:12/{SECRET}@127.0.0.1",
        f"redis://:p[{SECRET}@127.0.0.1",
        f"rediss://:{SECRET}@127.0.0.1?ssl_ca_certs=/no/such/file",
        f"http://:{SECRET}@127.0.0.1",
        f"embedded://u:{SECRET}@x",
        f"embedded://u:{SECRET}@x/1",
    ],
)
def test_no_send_error_shows_the_password(send_task: Callable[[str], None], url: str) -> None:
    with pytest.raises(BulltaskError) as caught:
        send_task(url)
    assert leaks(caught.value) == []


@pytest.mark.parametrize("send_task", [send, asend])
def test_a_failed_authentication_does_not_show_the_password(
    server_factory: ServerFactory, send_task: Callable[[str], None]
) -> None:
    server = server_factory(password="another")
    with pytest.raises(BulltaskError, match="authentication with Redis at") as caught:
        send_task(url_to(f"127.0.0.1:{server.port}"))
    assert leaks(caught.value) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda url: App("shop", url, prefix=""),
        lambda url: Queue("mail", url, prefix=""),
        lambda url: QueueEvents("mail", url, prefix=""),
        lambda url: FlowProducer(url, prefix=""),
        update_setting,
        read_environment,
        read_object,
        pass_celerys_arguments,
    ],
)
def test_an_invalid_setting_does_not_show_the_password(make: Callable[[str], object]) -> None:
    with pytest.raises(BulltaskError, match=r"(?i)prefix") as caught:
        make(url_to("127.0.0.1"))
    assert leaks(caught.value) == []


def test_no_object_that_has_the_url_shows_the_password() -> None:
    app = App("shop", url_to("127.0.0.1"), spark_conf={"spark.hadoop.fs.s3a.secret.key": SECRET})
    spec = SpawnSpec("shop", {"broker_url": url_to("127.0.0.1")}, [], [], "w", 0, 1, 2, 1, 1, None)
    holders: list[Any] = [app, app.conf, app._config, app._broker.endpoint, app.conf.broker_url, app._broker, spec]
    holders += [app.conf.overrides(), vars(app), vars(app._broker), spec.overrides]
    assert [holder for holder in holders if SECRET in repr(holder)] == []
    assert f"{app._config.broker_url}" == "redis://***@127.0.0.1"


def test_sparks_options_have_the_password_but_do_not_show_it() -> None:
    options = broker_options({"url": url_to("127.0.0.1")}, "mail")
    assert options["url"] == url_to("127.0.0.1")
    assert SECRET not in repr(options)
    with pytest.raises(BulltaskError) as caught:
        read_options(EventsOptions, {"table": "events", "queue": "mail", "url": url_to("127.0.0.1"), "fetchSize": "-1"})
    assert leaks(caught.value) == []


def test_a_spawned_child_gets_the_password() -> None:
    spec = SpawnSpec("shop", {"broker_url": url_to("127.0.0.1")}, [], [], "w", 0, 1, 2, 1, 1, None)
    with os.fdopen(spec.write()) as file:
        assert url_to("127.0.0.1") in file.read()


def test_the_command_line_keeps_the_password_out_of_crash_reports() -> None:
    with main.make_context("bulltask", ["-b", url_to("127.0.0.1"), "worker"]) as ctx:
        assert SECRET not in repr(ctx.params)
    assert "BULLTASK_BROKER_URL_FILE" in CliRunner().invoke(main, ["worker", "--help"]).output


def test_the_password_may_come_from_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "broker"
    secret.write_text(f"{url_to('127.0.0.1')}\n")
    conf = Settings({"broker_url": "redis://elsewhere"}, {"BULLTASK_BROKER_URL_FILE": str(secret)})
    assert conf.freeze().broker_url.get_secret_value() == url_to("127.0.0.1")
    both = Settings({}, {"BULLTASK_BROKER_URL_FILE": str(secret), "BULLTASK_BROKER_URL": "redis://other"})
    assert both.freeze().broker_url == "redis://other"
    with pytest.raises(BulltaskError, match="cannot read the file in BULLTASK_BROKER_URL_FILE"):
        Settings({}, {"BULLTASK_BROKER_URL_FILE": str(tmp_path / "none")})


def assign(settings: dict[str, Any]) -> None:
    conf = Settings({}, {})
    for name, value in settings.items():
        setattr(conf, name, value)
    conf.freeze()


def read_from_environment(settings: dict[str, Any]) -> None:
    texts = {name: " ".join(value) if isinstance(value, list) else value for name, value in settings.items()}
    texts = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in texts.items()}
    Settings({}, {f"BULLTASK_{name.upper()}": value for name, value in texts.items()}).freeze()


@pytest.mark.parametrize(
    "make",
    [
        lambda settings: App("shop", **settings)._config,
        lambda settings: Settings(settings, {}).freeze(),
        assign,
        read_from_environment,
    ],
    ids=["app", "settings", "assign", "environment"],
)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"payload_signing_keys": [KEY, "k2:short"]}, "key 'k2'"),
        ({"payload_signing_keys": [KEY, KEY]}, "two keys with the same id"),
        ({"payload_encryption_keys": {"*": [KEY, "k2:short"]}}, "key 'k2'"),
        ({"payload_encryption_keys": {"a:b": KEY}}, "name of a queue"),
        ({"payload_encryption_keys": {KEY: "mail"}}, "name of a queue"),
        ({"payload_signing_keys": KEY, "payload_encryption_keys": {"*": [KEY]}}, "a key in common"),
        ({"payload_signing_keys": KEY, "prefix": ""}, "prefix"),
    ],
)
def test_an_invalid_setting_does_not_show_the_keys(
    make: Callable[[dict[str, Any]], object], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BulltaskError, match=message) as caught:
        make(settings)
    assert leaks(caught.value) == []


def test_a_payload_that_cannot_be_verified_or_decrypted_does_not_show_the_keys() -> None:
    other = "k1:" + "B" * 43
    mine, foreign = (
        PayloadCodec(
            Settings(
                {
                    "accept_content": ["json", "cloudpickle"],
                    "payload_signing_keys": signing,
                    "payload_encryption_keys": {"secret": encryption},
                },
                {},
            ).freeze()
        )
        for signing, encryption in ((KEY, "e1:" + "C" * 43), (other, "e1:" + "D" * 43))
    )
    for queue, form in (("mail", PayloadFormat("cloudpickle")), ("secret", PayloadFormat())):
        data = foreign.dump_arguments({"x": 1}, queue, "send", form, "it")
        with pytest.raises(DecodeError) as caught:
            mine.load_data(data, JobRef(queue, "1"), "send")
        assert leaks(caught.value) == []
