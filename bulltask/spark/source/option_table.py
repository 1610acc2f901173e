"""The table of options of ``format("bulltask")``: each name, where it counts, how it is read, its default."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from bulltask.config.parsers import Parse, choice, flag, integer, names_of, optional, plain_text, url
from bulltask.errors import ConfigError, DecodeError, InvalidNameError
from bulltask.jobs.names import check_queue_name
from bulltask.spark.source.positions import StreamId
from bulltask.transport.scripts.history import LISTS, SETS

__all__ = ["EVERY", "OPTIONS", "REQUIRED", "SPARKS_OWN", "Option", "Use"]

EVERY: Final = "*"
"""All queues of the prefix."""

REQUIRED: Final = object()
"""The default of an option that has none."""

SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})
"""Options that Spark's own methods leave among those of the source; in lower case."""

STATES: Final = (*LISTS, *SETS)
_UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")


class Use(StrEnum):
    """What a source or sink is used for."""

    JOBS = "batch read of jobs"
    EVENTS = "batch read of events"
    COUNTS = "batch read of counts"
    STREAM = "stream of events"
    WRITE = "batch write"
    WRITE_STREAM = "streaming write"


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table: the option's name, its field, where it counts, how it is read, its default, its text."""

    name: str
    field: str
    uses: frozenset[Use]
    parse: Parse
    default: object
    doc: str


def queues(value: Any, name: str) -> tuple[str, ...]:
    """Return names of queues, each once: ``a,b``, a JSON list where a name has a comma, or ``*`` for all.

    Raises:
        ConfigError: there is none, or one that BullMQ does not take; the message calls the option ``name``.
    """
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str) and text.startswith("["):
        text = _json(text, name, list)
    if EVERY in (found := names_of(text, name)) and len(found) > 1:
        raise ConfigError(f"{name} must be '*' alone or names of queues, not {value!r}")
    if not found:
        raise ConfigError(f"{name} must name a queue, or be '*' for all; it is {value!r}")
    return tuple(dict.fromkeys(one if one == EVERY else _queue(one, name) for one in found))


def one_queue(value: Any, name: str) -> str:
    """Return the name of one queue.

    Raises:
        ConfigError: BullMQ does not take it; the message calls the option ``name``.
    """
    return _queue(value, name)


def states(value: Any, name: str) -> tuple[str, ...]:
    """Return states of jobs, each once, by BullMQ's names; ``waiting`` is ``wait`` and ``paused``.

    Raises:
        ConfigError: one is unknown, or there is none; the message calls the option ``name``.
    """
    one = choice(*STATES, "waiting")
    found = [one(word, name) for word in names_of(value, name)]
    if not found:
        raise ConfigError(f"{name} must name a state, one or more of {', '.join(STATES)}; it is {value!r}")
    return tuple(dict.fromkeys(s for word in found for s in (("wait", "paused") if word == "waiting" else (word,))))


def begin(value: Any, name: str) -> str | Mapping[str, StreamId]:
    """Return where a stream begins: ``earliest``, ``latest``, or an id for each of some queues.

    Raises:
        ConfigError: it is something else; the message calls the option ``name``.
    """
    text = str(value).strip()
    if not text.startswith("{"):
        return str(choice("earliest", "latest")(text, name))
    return {_queue(queue, name): _id(given, name) for queue, given in _json(text, name, dict).items()}


def length(value: Any, name: str) -> int:
    """Return a length of time in ms: seconds, or a number with s, m, h or d behind it.

    Raises:
        ConfigError: it is something else, or nothing; the message calls the option ``name``.
    """
    found = _LENGTH.fullmatch(str(value).strip())
    ms = int(float(found[1]) * _UNITS_MS[found[2] or "s"]) if found else 0
    if ms < 1:
        raise ConfigError(f"{name} must be a length of time like 90, 15m, 12h or 7d, not {value!r}")
    return ms


def job_options(value: Any, name: str) -> Mapping[str, Any]:
    """Return options of a job in the words of ``Queue.add``, written as JSON.

    Raises:
        ConfigError: it is no JSON object; the message calls the option ``name``.
    """
    return dict(_json(str(value), name, dict))


def _json(text: str, name: str, kind: type) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, kind):
        raise ConfigError(f"{name} must be JSON, {'an object' if kind is dict else 'a list'}; it is {text!r}")
    return found


def _queue(value: Any, name: str) -> str:
    try:
        return check_queue_name(value)
    except InvalidNameError as exc:
        raise ConfigError(f"{name}: {exc}") from exc


def _id(value: Any, name: str) -> StreamId:
    """An id, behind which to begin; a bare number of milliseconds begins with its first entry."""
    text = str(value)
    try:
        return StreamId(int(text), 0).before if text.isdecimal() else StreamId.parse(text)
    except DecodeError as exc:
        raise ConfigError(f"{name}: {exc}") from exc


_ALL = frozenset(Use)
_READS = frozenset({Use.JOBS, Use.EVENTS, Use.COUNTS, Use.STREAM})
_BATCH = frozenset({Use.JOBS, Use.EVENTS, Use.COUNTS})
_JOBS = frozenset({Use.JOBS})
_EVENTS = frozenset({Use.EVENTS, Use.STREAM})
_STREAM = frozenset({Use.STREAM})
_WRITES = frozenset({Use.WRITE, Use.WRITE_STREAM})

_O = Option
OPTIONS: Final = (
    _O("url", "url", _ALL, optional(url), None, "where Redis is; else BULLTASK_BROKER_URL"),
    _O("prefix", "prefix", _ALL, optional(plain_text), None, "first part of every BullMQ key; else BULLTASK_PREFIX"),
    _O("queueHashTag", "hash_tag", _ALL, optional(flag), None, "queue 'emails' is BullMQ's '{emails}'"),
    _O("queue", "queues", _READS, queues, REQUIRED, "names with commas between them, or * for all"),
    _O("queue", "queue", _WRITES, optional(one_queue), None, "the queue; else a column of that name says it"),
    _O("skipForeignQueues", "skip_foreign", _READS, flag, False, "set queues aside that a lake cannot hold"),
    _O("table", "table", _BATCH, choice("jobs", "events", "counts"), "jobs", "what to read"),
    _O("table", "table", _STREAM, choice("events"), "events", "what to read"),
    _O("state", "states", _JOBS, states, "completed,failed", "states of the jobs to read"),
    _O("numPartitions", "partitions", _JOBS, optional(integer(1, 10_000)), None, "tasks at the most; 2 for each core"),
    _O("minRowsPerPartition", "min_rows", _JOBS, integer(1), 1_000, "jobs for which a further task is worth it"),
    _O("pushdown", "pushdown", _BATCH, flag, False, "Redis applies filters; one query only of each load()"),
    _O("batch", "batch", _JOBS, integer(1, 100_000), 1_000, "jobs of one round trip"),
    _O("batch", "batch", _EVENTS, integer(1, 100_000), 5_000, "events of one round trip"),
    _O("batch", "batch", _WRITES, integer(1, 10_000), 500, "jobs of one round trip"),
    _O("eventsPerPartition", "per_partition", _EVENTS, integer(1), 100_000, "events of one task"),
    _O("startingOffsets", "starting", _STREAM, begin, "earliest", "earliest, latest, or JSON: an id for each queue"),
    _O("maxEventsPerTrigger", "max_events", _STREAM, optional(integer(1)), 200_000, "events of a batch; none: all"),
    _O("alignQueues", "align", _STREAM, flag, True, "no queue passes the time of the slowest that has more"),
    _O("failOnDataLoss", "fail_on_loss", _STREAM, flag, True, "stop when events were trimmed unread"),
    _O("gapRows", "gap_rows", _STREAM, flag, False, "if not, a row 'bulltask.gap' says what is lost"),
    _O("writeId", "write_id", _WRITES, optional(plain_text), None, "part of derived job ids: the same write, the same"),
    _O("idColumn", "id_column", _WRITES, optional(plain_text), None, "the column with job ids; 'id' if there is one"),
    _O("fence", "fence", _WRITES, flag, True, "a job that was added and is gone is not added again"),
    _O("fenceTtl", "fence_ttl_ms", _WRITES, length, "7d", "how long the fence stands"),
    _O("jobOpts", "job_opts", _WRITES, job_options, "{}", "options of every job, in the words of Queue.add, as JSON"),
)
