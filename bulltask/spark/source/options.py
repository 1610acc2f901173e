"""The options of ``format("bulltask")``, checked before any task starts, including those from SQL.

Spark passes options as strings, and the case of their names does not matter. An unknown name, an invalid value or a
missing option raises a ``ConfigError`` whose message begins with a code, because ignoring it would read wrong rows.

Options override bulltask's settings in the environment (``BULLTASK_BROKER_URL`` …), because a read may use a replica
but a write must not. Both are resolved where the query is planned, and the executors get them with the plan.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, ClassVar, Final, Literal, TypedDict, TypeVar, cast

from bulltask import embedded
from bulltask.config.config import Config
from bulltask.config.parsers import Parse, choice, flag, integer, optional, parse_names, plain_text
from bulltask.config.settings import ENV_PREFIX, Settings
from bulltask.config.urls import SecretUrl, url
from bulltask.jobs.errors import ConfigError, DecodeError, InvalidNameError, did_you_mean
from bulltask.jobs.names import bullmq_name, check_queue_name, name_in_app
from bulltask.lake.tables import FINISHED, check_broker, queue_prefix
from bulltask.spark.source.offsets import StartAt, StreamId
from bulltask.transport.call import QueueKeys
from bulltask.transport.scripts.queue import LISTS, SETS

__all__ = [
    "OPTIONS",
    "REQUIRED",
    "BrokerOptions",
    "CountsOptions",
    "EventsOptions",
    "JobsOptions",
    "Operation",
    "Option",
    "OptionsT",
    "ReadOptions",
    "SourceOptions",
    "StreamOptions",
    "WriteOptions",
    "broker_options",
    "columns_of",
    "config_of",
    "read_options",
    "row_name",
    "table_of",
]


_LOCATION: Final = {"url": "broker_url", "prefix": "prefix", "queue_hash_tag": "queue_hash_tag"}
"""The setting of each of the `BrokerOptions`, which are also fields of the table of options."""


class BrokerOptions(TypedDict, total=False):
    """The location of Redis, and how queues are named; default: bulltask's settings.

    Attributes:
        url: The URL of Redis, preferably of a replica.
        prefix: The first part of every BullMQ key.
        queue_hash_tag: Whether BullMQ's name for queue ``emails`` is ``{emails}``.
    """

    url: str | SecretUrl | None
    prefix: str | None
    queue_hash_tag: bool | None


def broker_options(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the source's location of Redis: from a function's arguments (`BrokerOptions`), else from the settings.

    It is resolved here because Spark plans reads in other processes, which have the environment that the JVM was
    started with. They would not see a ``BULLTASK_BROKER_URL`` that a program sets later.
    """
    config = config_of(arguments)
    named = {"broker": arguments["broker"]} if arguments.get("broker") else {}
    return named | {
        "url": config.broker_url.get_secret_value(),
        "prefix": config.prefix,
        "queueHashTag": str(config.queue_hash_tag).lower(),
    }


def config_of(arguments: Mapping[str, Any]) -> Config:
    """Return the settings with a function's arguments (`BrokerOptions`), and the URL resolved.

    If ``broker`` names one, its settings are ``BULLTASK_EU_BROKER_URL``, ``BULLTASK_EU_PREFIX`` …
    """
    broker, given = arguments.get("broker"), {it: arguments.get(name) for name, it in _LOCATION.items()}
    config = resolve_config(given, _environment_of(broker) if broker and given["broker_url"] is None else None)
    return replace(config, broker_url=embedded.resolve_url(config.broker_url))


def _environment_of(broker: str) -> dict[str, str]:
    """Return the environment in which a named broker's settings are the settings; another broker's URL is not."""
    own = f"{ENV_PREFIX}{check_broker(broker).upper().replace('-', '_')}_"
    named = {ENV_PREFIX + name.removeprefix(own): text for name, text in os.environ.items() if name.startswith(own)}
    urls = {f"{ENV_PREFIX}BROKER_URL", f"{ENV_PREFIX}BROKER_URL_FILE"}
    if not urls & named.keys():
        raise ConfigError(f"set {own}BROKER_URL, or {own}BROKER_URL_FILE, to the URL of the broker {broker!r}")
    return {name: text for name, text in os.environ.items() if name not in urls} | named


def resolve_config(overrides: Mapping[str, object], environ: Mapping[str, str] | None = None) -> Config:
    """Return bulltask's settings; ``overrides`` that are not ``None`` override the environment."""
    explicit = {name: value for name, value in overrides.items() if value is not None}
    overridden = {ENV_PREFIX + name.upper() for name in explicit}
    environment = os.environ if environ is None else environ
    try:
        return Settings(explicit, {name: text for name, text in environment.items() if name not in overridden}).freeze()
    except ConfigError as exc:
        raise option_error("INVALID", str(exc)) from None


def option_error(code: str, text: str) -> ConfigError:
    """Return the error for an invalid option; its message begins with a code."""
    return ConfigError(f"[BULLTASK_OPTION_{code}] {text}")


EVERY: Final = "*"
"""All queues under the prefix."""

REQUIRED: Final = object()
"""The default of a required option."""

SPARK_OPTIONS: Final = frozenset({"checkpointlocation", "queryname"})
"""Options that Spark's methods add to the options of the source, in lower case."""

STATES: Final = (*LISTS, *SETS)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")

Table = Literal["jobs", "events", "counts"]
OptionsT = TypeVar("OptionsT", bound="SourceOptions")


class Operation(StrEnum):
    """An operation of the source or the sink; each has its own options."""

    JOBS = "batch read of jobs"
    EVENTS = "batch read of events"
    COUNTS = "batch read of counts"
    STREAM = "streaming read of events"
    WRITE = "batch write"
    WRITE_STREAM = "streaming write"


@dataclass(frozen=True, slots=True)
class Option:
    """An option with its name, field, operations, parser, default and help."""

    name: str
    field: str
    operations: frozenset[Operation]
    parse: Parse
    default: object
    doc: str


# Parsers: for an invalid value, each raises a ConfigError whose message names the option.


def _queue_names(value: Any, name: str) -> tuple[str, ...]:
    """Return unique queue names from ``a,b``, a JSON list if a name contains a comma, or ``*`` for all."""
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str) and text.startswith("["):
        text = _json(text, name, list)
    if EVERY in (names := parse_names(text, name)) and len(names) > 1:
        raise ConfigError(f"{name} must be either '*' or queue names, not {value!r}")
    if not names:
        raise ConfigError(f"{name} must name a queue, or be '*' for all queues, not {value!r}")
    return tuple(dict.fromkeys(queue if queue == EVERY else _queue_name(queue, name) for queue in names))


def _job_states(value: Any, name: str) -> tuple[str, ...]:
    """Return unique job states, by BullMQ's names; ``waiting`` stands for ``wait`` and ``paused``."""
    parse_state = choice(*STATES, "waiting")
    states = [parse_state(word, name) for word in parse_names(value, name)]
    if not states:
        raise ConfigError(f"{name} must name one or more of the states {', '.join(STATES)}, not {value!r}")
    return tuple(dict.fromkeys(s for word in states for s in (("wait", "paused") if word == "waiting" else (word,))))


def _texts(value: Any, name: str) -> tuple[str, ...]:
    """Return unique texts from ``a,b``, or from a JSON list if one contains a comma."""
    text = value.strip() if isinstance(value, str) else value
    texts = parse_names(_json(text, name, list) if isinstance(text, str) and text.startswith("[") else text, name)
    if not texts:
        raise ConfigError(f"{name} must not be empty")
    return tuple(dict.fromkeys(texts))


def _starts(value: Any, name: str) -> str | Mapping[str, StreamId]:
    """Return where a streaming read begins: ``earliest``, ``latest``, or ids by queue."""
    text = str(value).strip()
    if not text.startswith("{"):
        return str(choice("earliest", "latest")(text, name))
    return {_queue_name(queue, name): _id(start, name) for queue, start in _json(text, name, dict).items()}


def _duration_ms(value: Any, name: str) -> int:
    """Return a duration in ms: seconds, or a number followed by s, m, h or d."""
    match = _DURATION.fullmatch(str(value).strip())
    ms = int(float(match[1]) * _UNITS_MS[match[2] or "s"]) if match else 0
    if ms < 1:
        raise ConfigError(f"{name} must be a duration like 90, 15m, 12h or 7d, not {value!r}")
    return ms


def _moment_ms(value: Any, name: str) -> int:
    """Return a time like ``2026-11-22T14:00`` in ms, rounded up; without an offset, it is in UTC."""
    try:
        moment = datetime.fromisoformat(str(value).strip())
    except ValueError:
        raise ConfigError(f"{name} must be a time like 2026-11-22T14:00, not {value!r}") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return -((_EPOCH - moment) // timedelta(milliseconds=1))


def _job_options(value: Any, name: str) -> Mapping[str, Any]:
    """Return job options as for ``Queue.add``, written as JSON."""
    return dict(_json(str(value), name, dict))


def _json(text: str, name: str, kind: type) -> Any:
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, kind):
        raise ConfigError(f"{name} must be JSON, {'an object' if kind is dict else 'a list'}, not {text!r}")
    return parsed


def _queue_name(value: Any, name: str) -> str:
    try:
        return check_queue_name(value)
    except InvalidNameError as exc:
        raise ConfigError(f"{name}: {exc}") from exc


def _id(value: Any, name: str) -> StreamId:
    """Return the id after which to begin. A number stands for the beginning of that millisecond."""
    text = str(value)
    try:
        return StreamId(int(text), 0).before if text.isdecimal() else StreamId.parse(text)
    except DecodeError as exc:
        raise ConfigError(f"{name}: {exc}") from exc


_ALL = frozenset(Operation)
_READS = frozenset({Operation.JOBS, Operation.EVENTS, Operation.COUNTS, Operation.STREAM})
_BATCH = frozenset({Operation.JOBS, Operation.EVENTS, Operation.COUNTS})
_JOBS = frozenset({Operation.JOBS})
_EVENTS = frozenset({Operation.EVENTS, Operation.STREAM})
_STREAM = frozenset({Operation.STREAM})
_WRITES = frozenset({Operation.WRITE, Operation.WRITE_STREAM})

_COUNT = optional(integer(1))
_O = Option
OPTIONS: Final = (
    _O("url", "url", _ALL, optional(url), None, "URL of Redis; default: BULLTASK_BROKER_URL"),
    _O("prefix", "prefix", _ALL, optional(plain_text), None, "prefix of BullMQ's keys; default: BULLTASK_PREFIX"),
    _O("queueHashTag", "queue_hash_tag", _ALL, optional(flag), None, "store 'emails' as '{emails}'; default: true"),
    _O("broker", "broker", _READS, check_broker, "", "name of the broker, such as eu: queue 'mail' becomes 'eu:mail'"),
    _O("queue", "queues", _READS, _queue_names, REQUIRED, "comma-separated names, or * for all queues"),
    _O("queue", "queue", _WRITES, optional(_queue_name), None, "the queue; default: the column 'queue'"),
    _O("skipUnsupportedQueues", "skip_unsupported", _READS, flag, False, "skip queues that a lake cannot record"),
    _O("table", "table", _BATCH, choice("jobs", "events", "counts"), "jobs", "what to read"),
    _O("table", "table", _STREAM, choice("events"), "events", "what to read"),
    _O("state", "states", _JOBS, _job_states, "completed,failed", "states of the jobs to read"),
    _O("id", "ids", _JOBS, optional(_texts), None, "only the jobs with these comma-separated ids"),
    _O("columns", "columns", _READS, optional(_texts), None, "comma-separated names; default: all, or the schema's"),
    _O("numPartitions", "partitions", _JOBS, optional(integer(1, 10_000)), None, "maximum number; default: 2 per core"),
    _O(
        "numPartitions",
        "partitions",
        _EVENTS,
        optional(integer(1, 10_000)),
        None,
        "tasks of a large read; default: 2 per core",
    ),
    _O("minRowsPerPartition", "min_rows", _JOBS, integer(1), 1_000, "minimum number of jobs per partition"),
    _O("since", "since_ms", _JOBS, optional(_moment_ms), None, "only jobs that finished at this time or later"),
    _O("until", "until_ms", _JOBS, optional(_moment_ms), None, "only jobs that finished before this time"),
    _O("fetchSize", "fetch_size", _JOBS, integer(1, 100_000), 1_000, "jobs per round trip to Redis"),
    _O("fetchSize", "fetch_size", _EVENTS, integer(1, 100_000), 5_000, "events per round trip to Redis"),
    _O("chunkSize", "chunk_size", _WRITES, integer(1, 10_000), 500, "jobs per round trip to Redis"),
    _O("eventsPerPartition", "per_partition", _EVENTS, integer(1), 100_000, "events per partition"),
    _O("startingOffsets", "starting", _STREAM, _starts, "earliest", "earliest, latest, or JSON: an id for each queue"),
    _O("maxEventsPerTrigger", "max_events_per_trigger", _STREAM, _COUNT, 200_000, "events per batch; none: no limit"),
    _O("alignQueues", "align", _STREAM, flag, True, "end a batch at the same event time for all queues"),
    _O("failOnDataLoss", "fail_on_loss", _STREAM, flag, True, "fail if events were trimmed before they were read"),
    _O("gapRows", "gap_rows", _STREAM, flag, False, "if failOnDataLoss is false: add a row for lost events"),
    _O("writeId", "write_id", _WRITES, optional(plain_text), None, "id of the write, to retry it without duplicates"),
    _O("idColumn", "id_column", _WRITES, optional(plain_text), None, "column with job ids; default: id, if it exists"),
    _O("idempotent", "idempotent", _WRITES, flag, True, "do not add a job again after it has been removed"),
    _O("idempotencyTtl", "idempotency_ttl_ms", _WRITES, _duration_ms, "7d", "how long Redis keeps ids of added jobs"),
    _O("jobOpts", "job_opts", _WRITES, _job_options, "{}", "options of every job in JSON, as for Queue.add"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of every read and write. ``config`` has the location of Redis, and settings for names."""

    operation: ClassVar[Operation]
    config: Config = field(repr=False)  # its URL may have a password

    @property
    def queue_prefix(self) -> str:
        """How the names of queues begin in rows."""
        return ""

    def keys(self, queue: str) -> QueueKeys:
        """Return the keys of a queue, given its name without the hash tag."""
        return QueueKeys(self.config.prefix, self.bullmq_name(queue), self.queue_prefix + queue)

    def bullmq_name(self, queue: str) -> str:
        """Return BullMQ's name for a queue. Offsets contain it, so they stay valid when ``queueHashTag`` changes."""
        return bullmq_name(queue.removeprefix(self.queue_prefix), hash_tag=self.config.queue_hash_tag)

    def row_name(self, stored_name: str) -> str:
        """Return the name in rows of a queue in Redis; see :func:`row_name`."""
        return self.queue_prefix + row_name(stored_name, hash_tag=self.config.queue_hash_tag)

    def stored_keys(self, stored_name: str) -> QueueKeys:
        """Return the keys of a queue, given BullMQ's name."""
        return QueueKeys(self.config.prefix, stored_name, self.row_name(stored_name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(SourceOptions):
    """The options of every read.

    Attributes:
        broker: The name of the broker; rows have it before the names of queues.
        queues: Unique queue names; empty for all queues.
        every: Whether all queues under the prefix are read.
        skip_unsupported: Whether queues that a lake cannot record are skipped.
        table: What is read.
        columns: The columns of the table if the reader has no schema; ``None`` for all.
    """

    broker: str
    queues: tuple[str, ...]
    every: bool
    skip_unsupported: bool
    table: Table
    columns: tuple[str, ...] | None

    @property
    def queue_prefix(self) -> str:
        """How the names of queues begin in rows."""
        return queue_prefix(self.broker)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsOptions(ReadOptions):
    """A batch read of jobs; the table of options describes each field."""

    operation: ClassVar[Operation] = Operation.JOBS
    states: tuple[str, ...]
    ids: tuple[str, ...] | None
    partitions: int | None
    min_rows: int
    fetch_size: int
    since_ms: int | None
    until_ms: int | None

    @property
    def id_pages(self) -> Sequence[Sequence[str] | None]:
        """The wanted ids, as many at a time as one round trip reads; ``None`` stands for all ids."""
        ids, size = self.ids, self.fetch_size
        return [None] if ids is None else [ids[start : start + size] for start in range(0, len(ids), size)]

    @property
    def matching_states(self) -> Sequence[str]:
        """The states in which a job can be: with ``since`` or ``until``, it has finished."""
        is_limited = self.since_ms is not None or self.until_ms is not None
        return [state for state in self.states if state in FINISHED] if is_limited else self.states

    @property
    def finished_between(self) -> tuple[str, str]:
        """The bounds of the time at which jobs finished, in Redis' syntax."""
        low = "-inf" if self.since_ms is None else str(self.since_ms)
        return low, "+inf" if self.until_ms is None else f"({self.until_ms}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CountsOptions(ReadOptions):
    """A batch read of the number of jobs in each state of each queue."""

    operation: ClassVar[Operation] = Operation.COUNTS


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsOptions(ReadOptions):
    """A batch read of events."""

    operation: ClassVar[Operation] = Operation.EVENTS
    partitions: int | None
    fetch_size: int
    per_partition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions(ReadOptions):
    """A streaming read of events."""

    operation: ClassVar[Operation] = Operation.STREAM
    partitions: int | None
    fetch_size: int
    per_partition: int
    starting: Literal["earliest", "latest"] | Mapping[str, StreamId]
    max_events_per_trigger: int | None
    align: bool
    fail_on_loss: bool
    gap_rows: bool

    def starts_at(self, queue: str) -> StartAt:
        """Return where to begin with a queue (BullMQ's name); ``earliest`` if ``startingOffsets`` does not name it."""
        if isinstance(self.starting, str):
            return self.starting
        row_queue = row_name(queue, hash_tag=self.config.queue_hash_tag)
        named = (start for name, start in self.starting.items() if row_queue == name or self.bullmq_name(name) == queue)
        return next(named, "earliest")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions(SourceOptions):
    """A write of jobs, batch or streaming; the table of options describes each field."""

    operation: ClassVar[Operation] = Operation.WRITE
    queue: str | None
    chunk_size: int
    write_id: str | None
    id_column: str | None
    idempotent: bool
    idempotency_ttl_ms: int
    job_opts: Mapping[str, Any]


def row_name(stored_name: str, *, hash_tag: bool) -> str:
    """Return a queue's name in rows, given BullMQ's name: with ``hash_tag``, ``{emails}`` is ``emails``.

    A queue for which bulltask has no name, such as one without braces, keeps BullMQ's.
    """
    inner = name_in_app(stored_name, hash_tag=hash_tag)
    return inner if bullmq_name(inner, hash_tag=hash_tag) == stored_name else stored_name


def table_of(options: Mapping[str, str]) -> Table:
    """Return the table of a batch read; default: ``jobs``."""
    return cast("Table", _named(options, "table"))


def columns_of(options: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the columns of a read; ``None`` for all."""
    return cast("tuple[str, ...] | None", _named(options, "columns"))


def _named(options: Mapping[str, str], name: str) -> Any:
    return _value(next(row for row in OPTIONS if row.name == name), _lower_names(options))


def read_options(
    kind: type[OptionsT], options: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> OptionsT:
    """Parse and check the options of one operation, as Spark passes them.

    ``kind`` is the class of the operation's options; the default of ``environ`` is this process's environment.

    Raises:
        ConfigError: An option is unknown, invalid, missing, or not supported by this operation. The message begins with
            ``[BULLTASK_OPTION_UNKNOWN]``, ``[BULLTASK_OPTION_INVALID]`` or ``[BULLTASK_OPTION_MISSING]``, names the
            option and shows no password.
    """
    options = given = _lower_names(options)
    rows = [row for row in OPTIONS if kind.operation in row.operations]
    _reject_unknown(given, rows, kind.operation)
    fields = {row.field: _value(row, given) for row in rows}
    fields["config"] = resolve_config({setting: fields.pop(name) for name, setting in _LOCATION.items()}, environ)
    if "queues" in fields:
        fields["every"] = fields["queues"] == (EVERY,)
        fields["queues"] = () if fields["every"] else _unique_queues(fields["queues"], fields["config"])
    return kind(**fields)


def _lower_names(options: Mapping[str, str]) -> dict[str, str]:
    given = {str(name).lower(): value for name, value in options.items()}
    if "url" in given:  # from now on, no variable shows the password
        given["url"] = SecretUrl(given["url"]).get_secret_value()
    return {name: value for name, value in given.items() if name not in SPARK_OPTIONS}


def _reject_unknown(given: Iterable[str], rows: Iterable[Option], operation: Operation) -> None:
    supported = {row.name.lower(): row.name for row in rows}
    all_options = {row.name.lower(): row for row in OPTIONS}
    for name in given:
        if name in supported:
            continue
        if row := all_options.get(name):
            others = ", ".join(sorted(it for option in OPTIONS if option.name == row.name for it in option.operations))
            raise option_error("UNKNOWN", f"a {operation} has no option {row.name}; it is an option for: {others}")
        hint = did_you_mean(name, supported)
        for lowered, option_name in supported.items():
            hint = hint.replace(repr(lowered), repr(option_name))
        raise option_error("UNKNOWN", f"a {operation} has no option {name}{hint}")


def _value(row: Option, given: Mapping[str, str]) -> Any:
    value = given.get(row.name.lower(), row.default)
    if value is REQUIRED:
        raise option_error(
            "MISSING",
            f"option {row.name} is missing: {row.doc}. In SQL, use CREATE TEMPORARY VIEW … USING bulltask OPTIONS (…): "
            "Spark does not pass the options of CREATE TABLE to a Python data source",
        )
    try:
        return row.parse(value, f"option {row.name}")
    except ConfigError as exc:
        raise option_error("INVALID", str(exc)) from None  # Spark would print the same message twice


def _unique_queues(queues: Iterable[str], config: Config) -> tuple[str, ...]:
    """Remove duplicates: with ``queueHashTag``, ``emails`` and ``{emails}`` are the same queue."""
    by_bullmq_name = {bullmq_name(queue, hash_tag=config.queue_hash_tag): queue for queue in queues}
    return tuple(by_bullmq_name.values())
