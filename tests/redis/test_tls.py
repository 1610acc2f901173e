"""Tests of TLS: certificates in redis-py's URL parameters, and errors that suggest a solution."""

from __future__ import annotations

from pathlib import Path

import pytest

from bulltask import App
from bulltask.errors import BrokerAuthError, BrokerError, BrokerUnavailableError
from bulltask.queue import Queue
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.call import command
from bulltask.transport.client import Client
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.redis_errors import connection_error
from tests.support.certificates import Certificates, TlsServer

pytestmark = pytest.mark.redis

CA, CERT, KEY = "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"
TRUSTED = f"{CA}=(authority.pem)"

ERRORS = [
    ("", "not signed by an authority .*: add ssl_ca_certs=FILE"),
    (f"{CA}=(untrusted-authority.pem)", "not signed by an authority .*: add ssl_ca_certs=FILE"),
    (f"{TRUSTED}&{CERT}=(client.pem)&{KEY}=(stranger.key)", "must be a certificate and its key"),
    (f"{TRUSTED}&{CERT}=(client.pem)", "must be a certificate and its key"),
    (f"{CA}=(client.key)", "ssl_ca_certs must be a file of certificates"),
    (f"{CA}=(missing.pem)", r"cannot read .*missing\.pem \(ssl_ca_certs in the URL\). Every machine"),
    (f"{TRUSTED}&{CERT}=(missing.pem)", r"cannot read .*missing\.pem \(ssl_certfile in the URL\)"),
]


def endpoint(url: str, timeout_ms: int = 10_000) -> Endpoint:
    return Endpoint(url, timeout_ms, timeout_ms)


def ping(url: str, timeout_ms: int = 10_000) -> bytes:
    client = Client(endpoint(url, timeout_ms), None)
    try:
        reply: bytes = client.run(command("PING"))
        return reply
    finally:
        client.close()


async def async_ping(url: str) -> bytes:
    client = AsyncClient(endpoint(url))
    try:
        reply: bytes = await client.run(command("PING"))
        return reply
    finally:
        await client.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_both_clients_connect_with_a_client_certificate(
    tls_server: TlsServer, certificates: Certificates, host: str
) -> None:
    url = f"rediss://{host}:{tls_server.port}/0?{certificates.query()}"
    assert ping(url) == await async_ping(url) == b"PONG"


@pytest.mark.parametrize(("query", "message"), ERRORS)
async def test_an_invalid_certificate_raises_an_error_that_suggests_a_solution(
    tls_server: TlsServer, certificates: Certificates, query: str, message: str
) -> None:
    filled = query.replace("(", f"{certificates.file('')}/").replace(")", "")
    url = f"rediss://me:secret@localhost:{tls_server.port}/0?{filled}"
    with pytest.raises(
        BrokerAuthError, match=f"TLS handshake with Redis at rediss://me:.* failed: .*{message}"
    ) as caught:
        ping(url)
    assert "secret" not in str(caught.value)
    with pytest.raises(BrokerAuthError, match=message):
        await async_ping(url)


@pytest.mark.parametrize("more", ["", "&ssl_certfile=(stranger.pem)&ssl_keyfile=(stranger.key)"])
async def test_a_client_certificate_that_the_server_does_not_trust_is_reported(
    tls_server: TlsServer, certificates: Certificates, more: str
) -> None:
    filled = more.replace("(", f"{certificates.file('')}/").replace(")", "")
    url = f"rediss://localhost:{tls_server.port}/0?ssl_ca_certs={certificates.authority}{filled}"
    # The connection may end before the server's alert arrives.
    with pytest.raises(BrokerError, match=r"ssl_certfile=FILE|certificate in ssl_certfile|\(ssl_certfile\)"):
        ping(url)
    with pytest.raises(BrokerError, match=r"ssl_certfile=FILE|certificate in ssl_certfile|\(ssl_certfile\)"):
        await async_ping(url)


@pytest.mark.parametrize(
    ("alert", "message"),
    [
        ("[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert certificate required", "add ssl_certfile=FILE"),
        ("[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca", "does not trust the certificate in ssl_certfile"),
        ("[SSL: SSLV3_ALERT_CERTIFICATE_EXPIRED] sslv3 alert certificate expired", "does not trust the certificate"),
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired",
            "Renew the server's certificate",
        ),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", "The port does not speak TLS"),
    ],
)
def test_a_tls_alert_becomes_an_error_with_advice(alert: str, message: str) -> None:
    error = connection_error(ConnectionError(alert), "rediss://host", connecting=False)
    assert isinstance(error, BrokerAuthError)
    assert message in str(error)


def test_a_tls_connection_that_breaks_later_gets_no_tls_advice() -> None:
    broken = connection_error(ConnectionError("[SSL: UNEXPECTED_EOF_WHILE_READING]"), "rediss://host", connecting=False)
    assert isinstance(broken, BrokerUnavailableError)


def test_the_server_certificate_must_match_the_host_of_the_url(
    tls_server: TlsServer, certificates: Certificates
) -> None:
    url = f"rediss://127.1:{tls_server.port}/0?{certificates.query()}"  # the same address, but not in the certificate
    with pytest.raises(BrokerAuthError, match=r"Use a host name for which .* ssl_check_hostname=false"):
        ping(url)
    assert ping(f"{url}&ssl_check_hostname=false") == b"PONG"


def test_a_certificate_may_have_its_key_in_the_same_file(
    tls_server: TlsServer, certificates: Certificates, tmp_path: Path
) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(certificates.file("client.key").read_bytes() + certificates.file("client.pem").read_bytes())
    query = f"ssl_ca_certs={certificates.authority}&ssl_certfile={both}"
    assert ping(f"rediss://localhost:{tls_server.port}/0?{query}") == b"PONG"


async def test_new_connections_use_certificates_that_were_renewed_on_disk(
    tls_server: TlsServer, certificates: Certificates, tmp_path: Path
) -> None:
    def renew(name: str) -> None:
        for suffix in ("pem", "key"):
            (tmp_path / f"current.{suffix}").write_bytes(certificates.file(f"{name}.{suffix}").read_bytes())

    renew("client")
    pair = f"{CERT}={tmp_path}/current.pem&{KEY}={tmp_path}/current.key"
    url = f"rediss://localhost:{tls_server.port}/0?{CA}={certificates.authority}&{pair}"
    client, shared = Client(endpoint(url), None), AsyncClient(endpoint(url))
    assert client.run(command("PING")) == await shared.run(command("PING")) == b"PONG"
    renew("stranger")
    assert client.run(command("PING")) == await shared.run(command("PING")) == b"PONG", "open connections stay open"
    client.close()
    await shared.close()
    with pytest.raises(BrokerError, match="ssl_certfile"):
        client.run(command("PING"))
    with pytest.raises(BrokerError, match="ssl_certfile"):
        await shared.run(command("PING"))
    renew("client")
    assert client.run(command("PING")) == await shared.run(command("PING")) == b"PONG"
    client.close()
    await shared.close()


def test_certificate_checks_can_be_disabled(tls_server: TlsServer, certificates: Certificates) -> None:
    pair = f"ssl_certfile={certificates.file('client.pem')}&ssl_keyfile={certificates.file('client.key')}"
    assert ping(f"rediss://127.1:{tls_server.port}/0?{pair}&ssl_cert_reqs=none") == b"PONG"


def test_the_error_for_a_wrong_scheme_names_the_right_scheme(tls_server: TlsServer, certificates: Certificates) -> None:
    with pytest.raises(BrokerUnavailableError, match="If the port speaks TLS, start the URL with rediss://"):
        ping(f"redis://localhost:{tls_server.port}/0")
    with pytest.raises(BrokerUnavailableError, match="Either the port does not speak TLS, or the server"):
        ping(f"rediss://localhost:{tls_server.plain.port}/0?{certificates.query()}", timeout_ms=1_000)


async def test_queues_and_awaited_sends_work_over_tls(tls_server: TlsServer) -> None:
    with Queue("mail", tls_server.url) as queue:
        first = queue.add("send", {"n": 1})
        assert queue.get_job_counts("wait") == {"wait": 1}
    app = App("shop", broker_url=tls_server.url)
    second = await app.asend_task("send", kwargs={"n": 2}, queue="mail")
    with Queue("mail", tls_server.url) as queue:
        assert [job.id for job in queue.get_jobs("wait", asc=True)] == [first.id, second.id]
    await app.aclose()
