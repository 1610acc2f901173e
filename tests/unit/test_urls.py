from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask import App
from bulltask.config.settings import Settings
from bulltask.config.urls import SecretUrl, redact_command, redact_secrets, redact_text, redact_url
from bulltask.errors import ConfigError
from bulltask.queue import Queue
from bulltask.transport.endpoint import Endpoint


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://[::1]:6379/0?db=2", "redis://[::1]:6379/0?db=2"),
        ("embedded://", "embedded://"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
        ("redis://me:pw@host:6379/0", "redis://me:***@host:6379/0"),
        ("redis://:pw@host", "redis://***@host"),
        ("redis://pw@host", "redis://***@host"),  # the user name is treated as a password
        ("rediss://me:pw@host/0?ssl_keyfile=a.pem", "rediss://me:***@host/0?ssl_keyfile=a.pem"),
        ("unix:///run/redis.sock?password=pw&db=1", "unix:///run/redis.sock?password=***&db=1"),
        ("redis://host?%70assword=pw", "redis://host?%70assword=***"),
        ("redis+sentinel://:pw@a:1,b:2/m?sentinel_password=q", "redis+sentinel://***@a:1,b:2/m?sentinel_password=***"),
        ("redis://:p@s/s?w#d@host:1/2", "redis://***@host:1/2"),  # invalid, but common
        ("redis://:a://b@host", "redis://***@host"),
        ("redis://:a@one:1;redis://:b@two:2", "redis://***@two:2"),
        ("me:pw@host:6379", "me:***@host:6379"),
        (":p://w@host:6379", "***@host:6379"),
        ("https://me:pw@example.org/@name", "https://me:***@example.org/@name"),
        ("https://example.org/@name", "https://example.org/@name"),
        ("https://example.org/?token=abc", "https://example.org/?token=***"),
        ("postgres://me:p/w@host/db", "postgres://me:***@host/db"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.sampled_from(["redis", "rediss", "unix", ""]))
def test_any_password_is_removed_from_a_url(secret: str, scheme: str) -> None:
    marked = f"S3{secret}3S"
    prefix = f"{scheme}://" if scheme else ""
    for url in (f"{prefix}:{marked}@host:6379/0", f"{prefix}user:{quote(marked, safe='')}@host:6379/0"):
        shown = redact_url(url)
        assert "S3" not in shown
        assert "3S" not in shown
        assert shown.endswith("***@host:6379/0")


@pytest.mark.parametrize("show", [str, repr, "{}".format, "{!r:>40}".format, "%s".__mod__, lambda url: str([url])])
def test_the_text_of_a_secret_url_has_no_password(show: Callable[[object], str]) -> None:
    shown = show(SecretUrl("redis://me:pw@host:6379/0"))
    assert "redis://me:***@host:6379/0" in shown
    assert "pw" not in shown


def test_get_secret_value_returns_the_url_with_its_password() -> None:
    url = SecretUrl("redis://me:pw@host:6379/0")
    assert url.get_secret_value() == "redis://me:pw@host:6379/0"
    assert (url.scheme, url.has_secret, SecretUrl("redis://host").has_secret) == ("redis", True, False)
    assert url == SecretUrl(url) == copy.deepcopy(url) == url.get_secret_value()
    assert {url: 1}[SecretUrl(url)] == 1


@pytest.mark.parametrize(
    ("url", "ambiguous"),
    [
        ("redis://:pw/#@host", True),
        ("redis://:12/3@host", True),
        ("redis://me:12/3?x@host:6379/0", True),
        ("redis://:p@s/s?w#d@host:1/2", True),
        ("redis://:p[w@host", True),
        ("rediss://:p?w@host", True),
        ("redis://:p@w:%2F@host:6379/0", False),
        ("redis://host/0?client_name=a@b", False),
        ("rediss://me:pw@[::1]:6379/0?ssl_ca_certs=/a@b.pem", False),
        ("redis://[::1]:6379", False),
        ("unix:///run/a@b.sock", False),
    ],
)
def test_an_ambiguous_url_is_rejected_without_showing_its_password(url: str, ambiguous: bool) -> None:
    assert SecretUrl(url).is_ambiguous is ambiguous
    if ambiguous:
        with pytest.raises(ConfigError, match=r"write / as %2F") as caught:
            Settings({"broker_url": url})
        assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "kind", "hosts", "node"),
    [
        ("redis://:a,b@H:1/2?db=3", "single", (("h", 1),), "redis://:a,b@new:7/2?db=3"),
        ("redis://", "single", (("localhost", 6379),), "redis://new:7"),
        (
            "rediss+cluster://me:p,w@a:1,[::1]:2,c/0?ssl_ca_certs=a.pem",
            "cluster",
            (("a", 1), ("::1", 2), ("c", 6379)),
            "rediss://me:p,w@new:7?ssl_ca_certs=a.pem",
        ),
        (
            "redis+sentinel://:p%40w@a,[::2]/mymaster/4?sentinel_username=me&client_name=b&sentinel_password=q",
            "sentinel",
            (("a", 26379), ("::2", 26379)),
            "redis://:p%40w@new:7/4?client_name=b",
        ),
        ("rediss+sentinel://a/m?db=2", "sentinel", (("a", 26379),), "rediss://new:7?db=2"),
    ],
)
def test_a_url_names_hosts_and_becomes_the_url_of_one_server(url: str, kind: str, hosts: object, node: str) -> None:
    secret = SecretUrl(url)
    assert (secret.kind, secret.hosts) == (kind, hosts)
    assert secret.at("new:7") == node
    endpoint = Endpoint(url, 1, 2)
    assert (endpoint.kind, endpoint.seeds, endpoint.at("::1", 7).url) == (kind, hosts, secret.at("[::1]:7"))


@pytest.mark.parametrize(
    ("options", "sentinel"),
    [
        ("redis+sentinel://:pw@a/m?db=2", "redis://b:9"),
        ("redis+sentinel://:pw@a/m?sentinel_username=m%40&sentinel_password=p%2Fw", "redis://m%40:p%2Fw@b:9"),
        ("rediss+sentinel://:pw@a/m?sentinel_password=q&ssl_ca_certs=a.pem", "rediss://:q@b:9?ssl_ca_certs=a.pem"),
        ("rediss+sentinel://a/m?sentinel_ssl=false&ssl_ca_certs=a.pem", "redis://b:9"),
    ],
)
def test_sentinels_have_their_own_user_and_password_and_the_tls_of_the_primary(options: str, sentinel: str) -> None:
    assert SecretUrl(options).service_name == "m"
    assert SecretUrl(options).sentinel_at("b:9") == sentinel


@pytest.mark.parametrize("make", [lambda url: App("shop", url), lambda url: Queue("mail", url)])
def test_a_url_must_be_a_string(make: Callable[[Any], object]) -> None:
    with pytest.raises(ConfigError, match=r"broker_url must start with .*, not 5"):
        make(5)


@pytest.mark.parametrize("flag", [["-b", ""], ["--broker="]])
@pytest.mark.parametrize("password", ["s3cr3t", "a s3cr3t", "it's s3cr3t", 'a "s3cr3t"', "/#s3cr3t"])
def test_a_command_line_is_shown_without_passwords(flag: list[str], password: str) -> None:
    *before, last = flag
    shown = redact_command(["bulltask", "worker", *before, f"{last}redis://me:{password}@host", "-A", "a b"])
    assert "s3cr3t" not in shown
    assert shown.endswith(("@host -A 'a b'", "@host' -A 'a b'"))


def test_the_password_is_hidden_in_the_drivers_messages() -> None:
    url = SecretUrl("redis://:s3cr3t@host:port/0")
    assert url.hide_in("cannot cast 's3cr3t' to a port; nor 'port'") == "cannot cast '***' to a port; nor 'port'"


@given(st.text())
def test_redacting_any_text_does_not_raise(text: str) -> None:
    redact_url(text)
    redact_text(text)


def test_redacting_text_removes_only_the_passwords_of_its_urls() -> None:
    text = "Error 111 connecting to redis://:pw@host:6379/0.\nTried 'redis://me:pw@b' too; ask ops@example.org"
    shown = "Error 111 connecting to redis://***@host:6379/0.\nTried 'redis://me:***@b' too; ask ops@example.org"
    assert redact_text(text) == shown


def test_a_redacted_line_of_json_is_still_json() -> None:
    line = {"a": "redis://:pw@host", "b": "redis://host?password=pw", "c": ["x@y", "redis://h"], "d": "a@b"}
    shown = json.loads(redact_text(json.dumps(line), json=True))
    assert shown == {"a": "redis://***@host", "b": "redis://host?password=***", "c": ["x@y", "redis://h"], "d": "a@b"}


def test_text_without_a_url_is_returned_unchanged() -> None:
    text = "password=hunter2 is not in a URL"
    assert redact_text(text) is text


AWS_KEY_ID, AWS_KEY = "AKIA" + "IOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY"
PEM_KEY = f"-----BEGIN RSA PRIVATE {'KEY'}-----\nMIIEow\nxyz\n-----END RSA PRIVATE {'KEY'}-----"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("login failed: password=hunter2 for bob", "login failed: password=*** for bob"),
        ('{"api_key": "a b\\"c", "n": 3}', '{"api_key": "***", "n": 3}'),
        ("{'db_pass': 'a, b', 'user': 'u'}", "{'db_pass': '***', 'user': 'u'}"),
        (r"{\"token\": \"abc\"}", r'{\"token\": ***"}'),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ('secret="cut', 'secret="***"'),
        (
            "GET https://bob:s3cr3t@host/a?x=1&client_secret=9&y=2",
            "GET https://bob:***@host/a?x=1&client_secret=***&y=2",
        ),
        ("KeyError: 'password'", "KeyError: 'password'"),
        ("KeyError: 'password=hunter2'", "KeyError: 'password=***'"),
        ("ValueError('bad password=hunter2')", "ValueError('bad password=***')"),
        (f"denied: {AWS_KEY_ID} {AWS_KEY}, retry", "denied: ***, retry"),
        (f"clone failed with ghp_{'a1' * 18}: 403", "clone failed with ***: 403"),
        (f"jwt eyJ{'a1' * 8}.eyJ{'b2' * 8}.sig-na expired", "jwt *** expired"),
        (f"sk_live_{'a1' * 8} and xoxb-{'1' * 20}", "*** and ***"),
        ("Cookie: session=abc; theme=1\nHost: h", "Cookie: ***\nHost: h"),
        ("{'Set-Cookie': 'session=abc', 'Host': 'h'}", "{'Set-Cookie': '***', 'Host': 'h'}"),
        ("no cookie: consent is missing", "no cookie: consent is missing"),
        ("mysql --password pw-flag-2 -h db failed", "mysql --password *** -h db failed"),
        ("mysqldump -u root -ppw-short-3 shop failed", "mysqldump -u root -p*** shop failed"),
        ("redis-cli -a pw4 PING", "redis-cli -a *** PING"),
        ("option --password is required", "option --password is required"),
        ("scp -port 22", "scp -port 22"),
        (f"bad key {PEM_KEY} in a.pem", "bad key *** in a.pem"),
        (f"bad key {PEM_KEY[:60]}", "bad key ***"),
        ("4 passed: 2 skipped", "4 passed: 2 skipped"),
    ],
)
def test_secrets_in_texts_of_others_are_hidden(text: str, shown: str) -> None:
    assert redact_secrets(text) == shown


@pytest.mark.parametrize(
    ("url", "database"),
    [
        ("redis://localhost", 0),
        ("redis://user:p%2F7@localhost:6379/3", 3),
        ("redis://localhost/3?db=4", 4),
        ("unix:///run/redis/7?db=2", 2),
        ("unix:///run/redis/7", 0),
        ("redis+sentinel://one,two/5", 0),
        ("redis+sentinel://one,two/mymaster/5", 5),
        ("redis+cluster://one,two", 0),
    ],
)
def test_the_number_of_the_database_is_that_of_redis_py(url: str, database: int) -> None:
    assert SecretUrl(url).database == database


def test_options_for_a_pool_and_for_retries_do_not_reach_a_connection() -> None:
    url = "redis://localhost/0?max_connections=3&retry_on_timeout=true&protocol=3"
    connection: Any = Endpoint(url, 1_000, 1_000).connection(None)._connection
    assert connection.protocol == 2
    assert connection.retry._retries == 0
