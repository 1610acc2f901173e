"""workers.md and queue-events.md in docs/reference list all of Node's declarations and only existing names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bulltask.config.config import SETTINGS
from bulltask.contrib.opentelemetry import BulltaskInstrumentor
from bulltask.observe import events
from bulltask.queue import AsyncQueueEvents, Queue, QueueEvents
from bulltask.queue import events as queue_events
from bulltask.queue.events import EventReaderBase
from bulltask.testing.worker import WorkerProcess
from bulltask.worker.supervisor import SIGNAL_METHODS
from tests.interop.test_queue_coverage import declared, options, without_comments
from tests.support.programs import ROOT

pytestmark = pytest.mark.interop

WORKERS, EVENTS = ROOT / "docs/reference/workers.md", ROOT / "docs/reference/queue-events.md"


def rows(page: Path, name: str) -> list[tuple[str, str]]:
    """Return Node's and bulltask's cells of a table."""
    section = re.split(rf"^`{name}`[^|\n]*:[^|\n]*$", page.read_text(), flags=re.MULTILINE)[1]
    section = re.split(r"^`\w+`|^#", section, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [(left, right) for left, _, right in (line.strip("|").partition(" | ") for line in lines)]


def names_in_table(page: Path, name: str) -> set[str]:
    """Return Node's names in a table."""
    return {word for left, _ in rows(page, name) for word in re.findall(r"`([\w:-]+)`", left)}


def listener_events(file: str, name: str) -> set[str]:
    """Return the events of a listener's interface."""
    body = re.split(rf"^export interface {name}\b", without_comments(file), flags=re.MULTILINE)[1].partition("\n}")[0]
    return set(re.findall(r"^    '?([\w:-]+)'?: \(", body, re.MULTILINE))


def ioredis() -> set[str]:
    return listener_events("interfaces/ioredis-events.d.ts", "IoredisListener")


# ---- Worker ---------------------------------------------------------------------------------------------------------


def test_the_table_lists_exactly_the_members_of_bullmqs_worker(node_client: None) -> None:
    declared_names = declared("worker", "Worker") | declared("queue-base", "QueueBase")
    assert {"pause", "resume", "isPaused", "close", "run"} <= declared_names
    assert names_in_table(WORKERS, "Worker") == declared_names


def test_the_table_lists_exactly_the_events_of_bullmqs_worker(node_client: None) -> None:
    declared_names = listener_events("classes/worker.d.ts", "WorkerListener") | ioredis()
    assert {"completed", "stalled", "ready"} <= declared_names
    assert names_in_table(WORKERS, "WorkerListener") == declared_names


def test_the_table_lists_exactly_the_options_of_bullmqs_worker(node_client: None) -> None:
    declared_names = options("interfaces/worker-options.d.ts", "WorkerOptions")
    declared_names |= options("interfaces/sandboxed-options.d.ts", "SandboxedOptions")
    declared_names |= options("interfaces/queue-options.d.ts", "QueueBaseOptions")
    assert {"autorun", "maxStartedAttempts", "workerForkOptions", "connection"} <= declared_names
    assert names_in_table(WORKERS, "WorkerOptions") == declared_names


def test_settings_events_methods_and_signals_named_in_the_tables_exist() -> None:
    cells = [right for name in ("Worker", "WorkerListener", "WorkerOptions") for _, right in rows(WORKERS, name)]
    words = {word for cell in cells for word in re.findall(r"`([^`]+)`", cell)}
    classes = {word for word in words if re.fullmatch(r"([A-Z][a-z]+)+", word)}
    assert {"JobFailed", "Drained"} <= classes
    assert {name for name in classes if not hasattr(events, name) and not hasattr(queue_events, name)} == {
        BulltaskInstrumentor.__name__,
        WorkerProcess.__name__,
    }
    settings = {word for word in words if re.fullmatch(r"[a-z]+(_[a-z]+)+", word)}
    assert {"run_retry_delay", "skip_stalled_check"} <= settings
    others = {name for name in settings if hasattr(WorkerProcess, name)}
    assert others == {"is_paused", "is_running"}
    assert settings - SETTINGS.keys() - others == {"retry_backoff", "worker_id"}
    methods = {match[1] for word in words if (match := re.fullmatch(r"queue\.(\w+).*", word))}
    assert {name for name in methods if not hasattr(Queue, name)} == set()
    signals = {word for word in words if re.fullmatch(r"[A-Z]{3,4}[0-9]?", word)} - {"GIL"}
    assert signals <= {number.name.removeprefix("SIG") for number in SIGNAL_METHODS}


@pytest.mark.parametrize("name", ["WorkerOptions", "Worker"])
def test_every_row_marked_as_not_available_gives_a_reason(name: str) -> None:
    lines = [right for _, right in rows(WORKERS, name) if right.startswith("not available")]
    assert lines
    assert all(re.match(r"not available: .{10}", line) for line in lines)


# ---- QueueEvents ----------------------------------------------------------------------------------------------------


def test_the_table_lists_exactly_the_members_of_bullmqs_queue_events(node_client: None) -> None:
    declared_names = declared("queue-events", "QueueEvents")
    assert {"on", "run", "close"} <= declared_names
    assert names_in_table(EVENTS, "QueueEvents") == declared_names
    assert names_in_table(EVENTS, "QueueEventsProducer") == declared("queue-events-producer", "QueueEventsProducer")
    declared_names = options("interfaces/queue-options.d.ts", "QueueEventsOptions")
    assert names_in_table(EVENTS, "QueueEventsOptions") == declared_names


def test_every_event_of_bullmqs_queue_events_has_a_class_or_a_row(node_client: None) -> None:
    declared_names = listener_events("classes/queue-events.d.ts", "QueueEventsListener") | ioredis()
    text = EVENTS.read_text().partition("## Event types")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    classes = {name for line in lines for name in re.findall(r"`([a-z-]+)`", line[2:].partition(" | ")[0])}
    assert names_in_table(EVENTS, "QueueEventsListener") == declared_names - classes
    assert classes - declared_names == {"released"}, "the only event that is bulltask's own"


@pytest.mark.parametrize("kind", [QueueEvents, AsyncQueueEvents])
def test_the_table_lists_the_methods_of_bulltasks_queue_events(kind: type[EventReaderBase]) -> None:
    tables = ("QueueEvents", "QueueEventsOptions", "QueueEventsProducer")
    cells = [right for name in tables for _, right in rows(EVENTS, name)]
    named = {word for cell in cells for word in re.findall(r"`([a-z_]+)[`(=]", cell)}
    public = {name for name in dir(kind) if not name.startswith("_")}
    assert named - public <= {"with", "for", "start", "job_id"}
    assert public - named <= {"queue", "of"}
