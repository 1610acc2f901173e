"""Sentry, with the lines of its page, and OpenTelemetry: in workers, and in this process."""

from __future__ import annotations

import gzip
import json
import queue
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk

from bulltask import App, Context
from bulltask.testing import InlineWorker, use_server
from tests.support.payloads import ENCRYPTION_KEY
from tests.support.programs import ROOT
from tests.support.spans import EXPORTED, python_spans
from tests.support.worker_harness import WorkerHarness

PAGE = ROOT / "docs/how-to/sentry-opentelemetry.md"
SENTRY, *_ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
FAST = "traces_sample_rate=1.0, auto_enabling_integrations=False"  # does not import Django, Flask and all others
TASKS = """
import logging

@app.task(name="fails", bind=True, max_retries=1, default_retry_delay=0)
def fails(self, x):
    logging.getLogger("shop").warning("breadcrumb %s", x)
    self.retry(exc=ValueError(f"broken {x}"))

@app.task(name="afails")
async def afails(x):
    raise KeyError(f"broken {x}")

@app.task(name="typed")
def typed(x: int) -> int:
    return x
"""


class SentryServer:
    """A server that receives Sentry's envelopes.

    Attributes:
        url: The DSN.
        items: The events and transactions.
    """

    def __init__(self) -> None:
        items: queue.Queue[dict[str, Any]] = queue.Queue()
        self.items = items

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                lines = (gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body).splitlines()
                self.send_response(200)
                self.end_headers()
                for line in lines:
                    with suppress(ValueError):
                        if "event_id" in (item := json.loads(line)) and "platform" in item:
                            items.put(item)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://key@127.0.0.1:{self._server.server_port}/1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def wait(self, count: int) -> list[dict[str, Any]]:
        """Return the next ``count`` errors and transactions."""
        return [self.items.get(timeout=60) for _ in range(count)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def sentry() -> Iterator[SentryServer]:
    server = SentryServer()
    yield server
    server.close()


@pytest.mark.process
def test_a_worker_reports_failed_jobs_to_sentry_and_continues_the_trace(
    harness: WorkerHarness, sentry: SentryServer
) -> None:
    lines = SENTRY.replace("traces_sample_rate=0.1", FAST)
    worker = harness.worker(
        lines + TASKS, children=1, environ={"SENTRY_DSN": sentry.url}, settings={"incompatible_timeout": 0}
    )
    trace_id = "ab" * 16
    headers = {"sentry-trace": f"{trace_id}-{'cd' * 8}-1", "baggage": ""}
    sync = harness.app.send_task("fails", kwargs={"x": 1}, headers=headers)
    asynchronous = harness.app.send_task("afails", kwargs={"x": 2})
    invalid = harness.app.send_task("typed", kwargs={"y": 3})
    for result in (sync, asynchronous, invalid):
        with pytest.raises(Exception, match=r"broken|does not match"):
            result.get(timeout=60)
    worker.stop()
    found = sentry.wait(6)  # three errors, two attempts of one job and one of another
    errors = {item["tags"]["job_id"]: item for item in found if "exception" in item}
    assert set(errors) == {sync.id, asynchronous.id, invalid.id}
    assert [errors[one.id]["transaction"] for one in (sync, asynchronous, invalid)] == ["fails", "afails", "typed"]
    assert errors[sync.id]["exception"]["values"][-1]["value"] == "broken 1"
    assert errors[sync.id]["contexts"]["trace"]["trace_id"] == trace_id
    texts = [crumb["message"] for crumb in errors[sync.id]["breadcrumbs"]["values"]]
    assert texts == ["breadcrumb 1"]  # the second attempt's only
    transactions = [item for item in found if item.get("type") == "transaction"]
    assert sorted(item["transaction"] for item in transactions) == ["afails", "fails", "fails"]
    assert {item["contexts"]["trace"]["trace_id"] for item in transactions if item["transaction"] == "fails"} == {
        trace_id
    }


@pytest.mark.redis
def test_a_send_passes_the_trace_of_sentry_on(broker_url: str, sentry: SentryServer) -> None:
    app, names = App("sentry", broker_url), {"__name__": "page"}
    exec(compile(SENTRY, str(PAGE), "exec", dont_inherit=True), names)
    with use_server(app, broker_url), InlineWorker(app):

        @app.task(name="look", bind=True)
        def look(self: Context) -> dict[str, Any]:
            return dict(self.request.headers)

        sentry_sdk.init(dsn=sentry.url, traces_sample_rate=1.0, auto_enabling_integrations=False)
        try:
            with sentry_sdk.start_transaction(name="web") as transaction:
                sent = look.delay()
            assert sent.get(timeout=5)["sentry-trace"].startswith(transaction.trace_id)
        finally:
            sentry_sdk.get_client().close(timeout=0)
            sentry_sdk.init(default_integrations=False, auto_enabling_integrations=False)


@pytest.mark.redis
def test_sentry_receives_no_argument_of_an_encrypted_queue(
    broker_url: str, sentry: SentryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, names = App("sentry", broker_url, payload_encryption_keys={"*": ENCRYPTION_KEY}), {"__name__": "page"}
    code = SENTRY.replace("traces_sample_rate=0.1", FAST)
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    monkeypatch.setenv("SENTRY_DSN", sentry.url)
    start: Any = names["start_sentry"]
    secret = "-".join(["s3", "cret"])  # Sentry receives the lines of code around a call
    with use_server(app, broker_url), InlineWorker(app) as worker:

        @app.task(name="pay", max_retries=0)
        def pay(card: str) -> None:
            raise ValueError("invalid card")

        start()
        try:
            pay.delay(secret)
            worker.run_jobs(propagate=False)
            sentry_sdk.flush(timeout=10)
        finally:
            sentry_sdk.get_client().close(timeout=0)
            sentry_sdk.init(default_integrations=False, auto_enabling_integrations=False)
    found = sentry.wait(2)
    assert sorted(item.get("type", "error") for item in found) == ["error", "transaction"]
    assert secret not in json.dumps(found)


TRACED = """
@app.task(name="parent")
def parent():
    app.send_task("child")

@app.task(name="child")
async def child():
    raise KeyError("broken")
"""


@pytest.mark.process
def test_children_that_are_replaced_after_each_job_send_all_spans(harness: WorkerHarness, tmp_path: Path) -> None:
    file = tmp_path / "spans"
    settings = {"worker_max_tasks_per_child": 1}
    worker = harness.worker(EXPORTED + TRACED, children=2, environ={"SPANS": str(file)}, settings=settings)
    for _ in range(4):
        harness.app.send_task("parent")
    harness.events.wait_for(4, event="failed")
    assert worker.stop() == 0
    spans = python_spans(file)
    count = Counter(span["name"] for span in spans)
    assert count == {"process default": 8, "add default.child": 4}
    assert len({span["resource"]["attributes"]["pid"] for span in spans}) == 8, "a child for each job"
    by_id = {span["spanId"]: span for span in spans}
    for span in spans:
        sent = by_id.get(span["parentId"] or "")
        if span["attributes"]["bullmq.job.name"] == "child":
            assert sent is not None
            assert sent["traceId"] == span["traceId"]
            failed = span["name"] == "process default"
            assert span["status"]["status_code"] == ("ERROR" if failed else "UNSET")
