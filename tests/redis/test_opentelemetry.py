"""Spans and metrics of OpenTelemetry, in this process."""

from __future__ import annotations

import itertools
import json
import pkgutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from opentelemetry import baggage, context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy import orm

from bulltask import App, Context
from bulltask.contrib.opentelemetry import BulltaskInstrumentor
from bulltask.errors import RescheduleJob
from bulltask.outbox.sqlalchemy import Outbox
from bulltask.queue import FlowJob
from bulltask.testing import InlineWorker, use_server
from tests.support.payloads import ENCRYPTION_KEY
from tests.support.programs import ROOT


class Telemetry:
    """An app that is traced, what it has recorded, and a worker.

    Attributes:
        app: The app.
        worker: Runs its jobs.
        tracer: The tracer of the test.
    """

    def __init__(self, app: App, worker: InlineWorker, provider: TracerProvider, reader: InMemoryMetricReader) -> None:
        self.app, self.worker, self._reader = app, worker, reader
        self.tracer = provider.get_tracer("test")
        self._exporter = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def spans(self) -> dict[str, Any]:
        """Return the spans by name."""
        return {span.name: span for span in self._exporter.get_finished_spans()}

    def all_spans(self) -> list[ReadableSpan]:
        """Return the spans in the order in which they have ended."""
        return list(self._exporter.get_finished_spans())

    def metrics(self) -> dict[str, list[Any]]:
        """Return the data points of the metrics by name."""
        data = self._reader.get_metrics_data()
        assert data is not None
        (scope,) = data.resource_metrics[0].scope_metrics
        return {metric.name: list(metric.data.data_points) for metric in scope.metrics}


Open = Callable[..., Telemetry]


@pytest.fixture
def traced(broker_url: str, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens apps of which the sends and runs are traced."""
    provider, reader = TracerProvider(), InMemoryMetricReader()
    meters = MeterProvider(metric_readers=[reader])

    def open_app(**settings: Any) -> Telemetry:
        app = App("otel", broker_url, **settings)
        opened = use_server(app, broker_url)
        opened.__enter__()
        request.addfinalizer(lambda: opened.__exit__(None, None, None))
        worker = InlineWorker(app)
        worker.__enter__()
        request.addfinalizer(lambda: worker.__exit__(None, None, None))
        return Telemetry(app, worker, provider, reader)

    BulltaskInstrumentor().instrument(tracer_provider=provider, meter_provider=meters)
    yield open_app
    BulltaskInstrumentor().uninstrument()
    provider.shutdown()
    meters.shutdown()


def test_a_trace_continues_from_the_request_over_the_task_to_the_job_that_it_sends(traced: Open) -> None:
    telemetry = traced()
    app = telemetry.app

    @app.task(name="child")
    async def child() -> None:
        raise KeyError("broken")

    @app.task(name="parent")
    def parent() -> None:
        child.delay()

    with telemetry.tracer.start_as_current_span("web"):
        sent = parent.delay()
    telemetry.worker.run_jobs(propagate=False)
    ended = telemetry.all_spans()
    by_task = {(span.name, (span.attributes or {}).get("bullmq.job.name")): span for span in ended}
    path: list[Any] = [
        by_task[name]
        for name in (
            ("web", None),
            ("add default.parent", "parent"),
            ("process default", "parent"),
            ("add default.child", "child"),
            ("process default", "child"),
        )
    ]
    assert len(ended) == 5
    assert len({span.context.trace_id for span in path}) == 1
    for before, after in itertools.pairwise(path):
        assert after.parent.span_id == before.context.span_id
    _, add, process, _, failed = path
    assert (add.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    common = {
        "messaging.system": "bullmq",
        "messaging.destination.name": "default",
        "messaging.message.id": sent.id,
        "bullmq.queue.name": "default",
        "bullmq.job.id": sent.id,
        "bullmq.job.name": "parent",
    }
    assert add.attributes.items() >= {**common, "messaging.operation.type": "send"}.items()
    assert process.attributes.items() >= {**common, "bullmq.job.attempts.made": 0}.items()
    assert process.status.status_code is StatusCode.UNSET
    assert (failed.status.status_code, failed.attributes["error.type"]) == (StatusCode.ERROR, "KeyError")
    assert [event.name for event in failed.events] == ["exception"]


def test_the_context_is_stored_where_bullmq_stores_it_unless_it_is_omitted_or_set(traced: Open) -> None:
    telemetry = traced()
    queue = telemetry.app.queue("node")
    own = json.dumps({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
    jobs: list[Any] = [
        {"name": "a"},
        {"name": "b", "options": {"omit_context": True}},
        {"name": "c", "options": {"telemetry_metadata": own}},
    ]
    added = [queue.get_job(job.id) for job in queue.add_bulk(jobs)]
    stored: list[Any] = [None if job is None else job.opts.get("tm") for job in added]
    span = telemetry.spans()["addBulk node"]
    assert stored[1:] == [None, own]
    assert stored[0].startswith(f'{{"traceparent":"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-')
    assert span.attributes["messaging.batch.message_count"] == 3
    assert span.attributes["bullmq.job.bulk.names"] == ("a", "b", "c")


async def test_async_sends_and_flows_and_canvases_are_traced(traced: Open) -> None:
    telemetry = traced()
    app = telemetry.app

    @app.task(name="double")
    def double(x: int) -> int:
        return 2 * x

    token = context.attach(baggage.set_baggage("tenant", "t1"))
    await double.adelay(1)
    context.detach(token)
    await app.aqueue("node").add("a")
    await app.aflows().add(FlowJob("top", "node", {}, children=[FlowJob("leaf", "other", {})]))
    await (double.s(1) | double.s()).adelay()
    names = [span.name for span in telemetry.all_spans()]
    assert names == ["add default.double", "add node.a", "addFlow", "addFlow default"]
    await telemetry.worker.arun_jobs()
    runs = [span for span in telemetry.all_spans() if span.name == "process default"]
    sends = [span.context for span in telemetry.all_spans() if span.name in {"add default.double", "addFlow default"}]
    assert len(runs) == 3
    assert {run.parent.span_id for run in runs if run.parent} == {sent.span_id for sent in sends if sent}


def test_an_attempt_that_only_ends_early_is_no_error(traced: Open) -> None:
    telemetry = traced()
    app = telemetry.app

    @app.task(name="later", bind=True, max_retries=3)
    def later(self: Context) -> None:
        if self.request.attempts_started == 1:
            raise RescheduleJob(1)
        if self.request.attempts_started == 2:
            self.retry(countdown=1)
        if self.request.attempts_started == 3:
            self.retry(countdown=1, exc=ValueError("full"))

    later.delay()
    telemetry.worker.run_for(10)
    runs = [span for span in telemetry.all_spans() if span.name == "process default"]
    statuses = [span.status.status_code.name for span in runs]
    assert statuses == ["UNSET", "UNSET", "ERROR", "UNSET"]
    assert len({span.context.trace_id for span in runs if span.context}) == 1


def test_a_retry_in_another_queue_continues_the_trace(traced: Open) -> None:
    telemetry = traced()

    @telemetry.app.task(name="move", bind=True, max_retries=1)
    def move(self: Context) -> str:
        if self.request.queue == "default":
            self.retry(queue="other", countdown=0)
        return self.request.queue

    assert move.delay().get(timeout=5) == "other"
    spans = telemetry.spans()
    assert spans["process other"].parent.span_id == spans["add default.move"].context.span_id


def test_a_call_in_an_outbox_has_the_context_of_the_transaction(traced: Open) -> None:
    telemetry = traced()

    @telemetry.app.task(name="run")
    def run() -> None: ...

    engine = sqlalchemy.create_engine("sqlite://", poolclass=sqlalchemy.StaticPool)
    outbox = Outbox(telemetry.app, engine)
    outbox.metadata.create_all(engine)
    with orm.Session(engine) as session, telemetry.tracer.start_as_current_span("request"):
        outbox.delay(session, run)
        session.commit()
    assert outbox.relay() == 1
    telemetry.worker.run_jobs()
    spans = telemetry.spans()
    assert spans["process default"].parent.span_id == spans["add default.run"].context.span_id
    assert spans["add default.run"].parent.span_id == spans["request"].context.span_id
    engine.dispose()


def test_neither_spans_nor_metrics_contain_data_of_an_encrypted_queue(traced: Open) -> None:
    telemetry = traced(payload_encryption_keys={"*": ENCRYPTION_KEY})

    @telemetry.app.task(name="pay", max_retries=0)
    def pay(card: str) -> str:
        if card.endswith("0"):
            raise ValueError(f"{card} is invalid")
        return card

    pay.delay("s3cret-0")
    pay.delay("s3cret-1")
    telemetry.worker.run_jobs(propagate=False)
    spans = telemetry.all_spans()
    assert len(spans) == 4
    (failed,) = (span for span in spans if span.status.status_code is StatusCode.ERROR)
    assert [dict(event.attributes or {}) for event in failed.events] == [{"exception.type": "ValueError"}]
    recorded = "".join(span.to_json() for span in spans) + str(telemetry.metrics())
    assert "s3cret" not in recorded


def test_sends_and_attempts_are_measured_with_the_conventions_for_messaging(traced: Open) -> None:
    telemetry = traced()

    @telemetry.app.task(name="divide", max_retries=0)
    def divide(x: int) -> float:
        return 1 / x

    divide.delay(1)
    divide.delay(0)
    telemetry.worker.run_jobs(propagate=False)
    metrics = telemetry.metrics()
    assert set(metrics) == {
        "messaging.client.sent.messages",
        "messaging.client.operation.duration",
        "messaging.client.consumed.messages",
        "messaging.process.duration",
    }
    (sent,) = metrics["messaging.client.sent.messages"]
    assert (sent.value, sent.attributes["messaging.destination.name"]) == (2, "default")
    runs = {point.attributes.get("error.type"): point for point in metrics["messaging.process.duration"]}
    assert {error: point.count for error, point in runs.items()} == {None: 1, "ZeroDivisionError": 1}
    assert runs[None].attributes["bullmq.job.name"] == "divide"


@pytest.mark.parametrize("stored", ["{", "[1]", '{"traceparent": 1}', '{"traceparent":"00-x"}', ""])
def test_a_malformed_context_of_another_client_begins_a_trace(traced: Open, stored: str) -> None:
    telemetry = traced()

    @telemetry.app.task(name="run")
    def run() -> int:
        return 1

    telemetry.app.send_task("run", telemetry_metadata=stored)
    telemetry.worker.run_jobs()
    assert telemetry.spans()["process default"].parent is None


def test_without_the_instrumentor_nothing_is_traced_any_more(traced: Open, tmp_path: Path) -> None:
    telemetry = traced()
    instrumentor = BulltaskInstrumentor()
    assert instrumentor.is_instrumented_by_opentelemetry
    instrumentor.uninstrument()
    assert not instrumentor.is_instrumented_by_opentelemetry

    @telemetry.app.task(name="run")
    def run() -> int:
        return 1

    sent = run.delay()
    telemetry.worker.run_jobs()
    assert telemetry.all_spans() == []
    job = telemetry.app.queue("default").get_job(sent.id)
    assert job is not None
    assert "tm" not in job.opts


def test_opentelemetry_instrument_finds_the_instrumentor(broker_url: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    instrumentor = pkgutil.resolve_name(project["entry-points"]["opentelemetry_instrumentor"]["bulltask"])
    assert instrumentor is BulltaskInstrumentor
    instrumentor().instrument(skip_dep_check=True)  # as opentelemetry-instrument calls it, before there is an app
    try:
        app = App("later", broker_url)
        assert app._middleware.running
    finally:
        instrumentor().uninstrument()
    assert not app._middleware.running
