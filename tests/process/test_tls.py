"""A worker whose way to Redis is TLS."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bulltask.worker.exit_codes import ExitCode
from tests.support.certificates import Certificates, TlsServer
from tests.support.stage import Stage

pytestmark = pytest.mark.process


def test_a_worker_with_a_certificate_runs_jobs_and_its_results_are_waited_for(
    stage_on: Callable[[str], Stage], tls_server: TlsServer
) -> None:
    stage = stage_on(tls_server.url)
    stage.worker()
    assert stage.app.send_task("quick").get(timeout=60) is None
    assert stage.redis.zcard(stage.keys.completed) == 1


def test_a_worker_whose_certificate_is_refused_says_so_once_and_ends(
    stage_on: Callable[[str], Stage], tls_server: TlsServer, certificates: Certificates
) -> None:
    url = f"rediss://localhost:{tls_server.port}/0?ssl_ca_certs={certificates.strange_authority}"
    worker = stage_on(tls_server.url).worker(settings={"broker_url": url})
    assert worker.wait() == int(ExitCode.BROKER_REFUSED)
    assert "add ssl_ca_certs=FILE" in worker.complaints()[0]["error"]
    assert "Traceback" not in worker.log
