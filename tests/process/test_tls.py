"""A worker that connects to Redis with TLS."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bulltask.worker.slots import ExitCode
from tests.support.certificates import Certificates, TlsServer
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process


def test_a_worker_with_a_client_certificate_runs_jobs(
    harness_on: Callable[[str], WorkerHarness], tls_server: TlsServer
) -> None:
    harness = harness_on(tls_server.url)
    harness.worker()
    assert harness.app.send_task("quick").get(timeout=60) is None
    assert harness.redis.zcard(harness.keys.completed) == 1


def test_a_worker_that_does_not_trust_the_server_certificate_exits(
    harness_on: Callable[[str], WorkerHarness], tls_server: TlsServer, certificates: Certificates
) -> None:
    url = f"rediss://localhost:{tls_server.port}/0?ssl_ca_certs={certificates.untrusted_authority}"
    worker = harness_on(tls_server.url).worker(settings={"broker_url": url})
    assert worker.wait() == int(ExitCode.BROKER_UNUSABLE)
    assert "add ssl_ca_certs=FILE" in worker.warnings()[0]["error"]
    assert "Traceback" not in worker.log
