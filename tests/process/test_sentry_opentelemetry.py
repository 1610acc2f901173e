"""The lines of the page about Sentry and OpenTelemetry, with both libraries: in a worker, and in this process."""

from __future__ import annotations

import gzip
import itertools
import json
import queue
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bulltask import App, Context
from bulltask.testing import InlineWorker, use_server
from tests.support.programs import ROOT
from tests.support.worker_harness import WorkerHarness

PAGE = ROOT / "docs/how-to/sentry-opentelemetry.md"
SENTRY, TRACING, PROVIDER = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
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
def test_spans_of_opentelemetry_continue_the_trace(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app, exporter, provider = App("otel", broker_url), InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    exec(compile(TRACING, str(PAGE), "exec", dont_inherit=True), {"__name__": "page", "app": app})
    exec(compile(PROVIDER, str(PAGE), "exec", dont_inherit=True), {"__name__": "page", "trace": trace})

    @app.task(name="child")
    async def child() -> None:
        raise KeyError("broken")

    @app.task(name="parent")
    def parent() -> None:
        child.delay()

    with use_server(app, broker_url), InlineWorker(app) as worker:
        with provider.get_tracer("test").start_as_current_span("web"):
            sent = parent.delay()
        worker.run_jobs(propagate=False)
    spans: dict[str, Any] = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"web", "send parent", "process parent", "send child", "process child"}
    assert len({span.context.trace_id for span in spans.values()}) == 1
    order = ["web", "send parent", "process parent", "send child", "process child"]
    for before, after in itertools.pairwise(order):
        assert spans[after].parent.span_id == spans[before].context.span_id
    assert spans["process parent"].attributes["messaging.message.id"] == sent.id
    assert spans["process child"].status.is_ok is False
    assert [event.name for event in spans["process child"].events] == ["exception"]
    provider.shutdown()


EXPORTER = """
import os
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

def OTLPSpanExporter():
    file = open(os.environ["SPANS"], "a")
    return ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + os.linesep)
"""
TRACED = """
@app.task(name="parent", bind=True)
def parent(self):
    for name in ("fails", "afails"):
        app.send_task(name)

@app.task(name="fails")
def fails():
    raise KeyError("broken")

@app.task(name="afails")
async def afails():
    raise KeyError("broken")
"""


@pytest.mark.process
def test_forked_children_send_their_spans(harness: WorkerHarness, tmp_path: Path) -> None:
    lines = PROVIDER.replace("  # provider.add_span_processor", "\n    provider.add_span_processor")
    assert lines != PROVIDER
    worker = harness.worker(TRACING + EXPORTER + lines + TRACED, environ={"SPANS": str(tmp_path / "spans")})
    trace_id, web = "ab" * 16, "cd" * 8
    harness.app.send_task("parent", headers={"traceparent": f"00-{trace_id}-{web}-01"}).get(timeout=60)
    harness.events.wait_for(2, event="failed")
    assert worker.stop() == 0
    spans = [json.loads(line) for line in (tmp_path / "spans").read_text().splitlines()]
    by_name = {span["name"]: span for span in spans}
    sent = [f"{what} {task}" for task in ("fails", "afails") for what in ("send", "process")]
    assert sorted(span["name"] for span in spans) == sorted(["process parent", *sent])
    assert {span["context"]["trace_id"] for span in spans} == {f"0x{trace_id}"}
    parents = {name: span["parent_id"] for name, span in by_name.items()}
    assert parents["process parent"] == f"0x{web}"
    for task in ("fails", "afails"):
        assert parents[f"send {task}"] == by_name["process parent"]["context"]["span_id"]
        assert parents[f"process {task}"] == by_name[f"send {task}"]["context"]["span_id"]
        assert by_name[f"process {task}"]["status"]["status_code"] == "ERROR"
