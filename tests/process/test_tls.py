"""A worker whose way to Redis is TLS."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bulltask.worker.exit_codes import ExitCode
from tests.support.certificates import Certificates, TlsServer
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process


def test_a_worker_with_a_certificate_runs_jobs_and_its_results_are_waited_for(
    harness_on: Callable[[str], WorkerHarness], tls_server: TlsServer
) -> None:
    harness = harness_on(tls_server.url)
    harness.worker()
    assert harness.app.send_task("quick").get(timeout=60) is None
    assert harness.redis.zcard(harness.keys.completed) == 1


def test_a_worker_whose_certificate_is_refused_says_so_once_and_ends(
    harness_on: Callable[[str], WorkerHarness], tls_server: TlsServer, certificates: Certificates
) -> None:
    url = f"rediss://localhost:{tls_server.port}/0?ssl_ca_certs={certificates.untrusted_authority}"
    worker = harness_on(tls_server.url).worker(settings={"broker_url": url})
    assert worker.wait() == int(ExitCode.BROKER_UNUSABLE)
    assert "add ssl_ca_certs=FILE" in worker.warnings()[0]["error"]
    assert "Traceback" not in worker.log
