"""Spans of workers: each child writes its own to a file, in batches that are lost unless they are flushed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["EXPORTED", "python_spans"]

EXPORTED = """
import os
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from bulltask.contrib.opentelemetry import BulltaskInstrumentor
from bulltask.signals import worker_process_init

BulltaskInstrumentor().instrument()

@worker_process_init.connect(weak=False)
def start_tracing(**_):
    provider = TracerProvider(resource=Resource({"pid": os.getpid()}))
    file = open(os.environ["SPANS"], "a")
    exporter = ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + os.linesep)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    trace.set_tracer_provider(provider)
"""
"""The lines of a worker's module; the environment variable ``SPANS`` is the file."""


def python_spans(file: Path) -> list[dict[str, Any]]:
    """Return the spans in the file, with the ids in Node's form."""
    spans = [json.loads(line) for line in file.read_text().splitlines()]
    for span in spans:
        span["traceId"], span["spanId"] = (span["context"][name][2:] for name in ("trace_id", "span_id"))
        span["parentId"] = span["parent_id"] and span["parent_id"][2:]
    return spans
