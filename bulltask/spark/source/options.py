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
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final, Literal, TypedDict, TypeVar

from bulltask import embedded
from bulltask.config.config import Config
from bulltask.config.parsers import Parse, choice, flag, integer, optional, parse_names, plain_text, queue_name
from bulltask.config.settings import ENV_PREFIX, Settings
from bulltask.config.urls import SecretUrl, url
from bulltask.jobs.errors import ConfigError, DecodeError, did_you_mean
from bulltask.jobs.names import bullmq_name, name_in_app
from bulltask.lake.tables import FINISHED, check_broker, queue_prefix
from bulltask.spark.source.offsets import StartAt, StreamId
from bulltask.transport.call import QueueKeys
from bulltask.transport.scripts.queue import LISTS, SETS

MAX_EVENTS_PER_TRIGGER: Final = 1_000_000
"""The default limit of a batch: with the pipeline's trigger, 100,000 events/s. Two cores need 3 s for such a batch."""


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


def broker_options(arguments: Mapping[str, Any], queues: str | Sequence[str]) -> dict[str, str]:
    """Return the source's queues and location of Redis: from a function's arguments, else from the settings.

    The location is resolved here because Spark plans reads in other processes, which have the environment that the JVM
    was started with. They would not see a ``BULLTASK_BROKER_URL`` that a program sets later.
    """
    config = config_of(arguments)
    named = {"broker": arguments["broker"]} if arguments.get("broker") else {}
    return named | {
        "queue": queues if isinstance(queues, str) else json.dumps(list(queues)),
        "url": config.broker_url.get_secret_value(),
        "prefix": config.prefix,
        "queueHashTag": str(config.queue_hash_tag).lower(),
    }


def config_of(arguments: Mapping[str, Any]) -> Config:
    """Return the settings with a function's arguments (`BrokerOptions`), and the URL resolved.

    If ``broker`` names one, its settings are ``BULLTASK_EU_BROKER_URL``, ``BULLTASK_EU_PREFIX`` …
    """
    broker = arguments.get("broker")
    given = {"broker_url": arguments.get("url")} | {name: arguments.get(name) for name in ("prefix", "queue_hash_tag")}
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


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """An option: its name, parser, default and help. Operations may have different options with the same name."""

    name: str
    parse: Parse
    default: object
    doc: str


def _option(name: str, parse: Parse, default: object, doc: str) -> Any:
    """Declare the field that an option sets."""
    return field(metadata={"option": Option(name, parse, default, doc)})


# Parsers: for an invalid value, each raises a ConfigError whose message names the option.


def _queue_names(value: Any, name: str) -> tuple[str, ...]:
    """Return unique queue names from ``a,b``, a JSON list if a name contains a comma, or ``*`` for all."""
    if EVERY in (names := _words(value, name)) and len(names) > 1:
        raise ConfigError(f"{name} must be either '*' or queue names, not {value!r}")
    if not names:
        raise ConfigError(f"{name} must name a queue, or be '*' for all queues, not {value!r}")
    return tuple(dict.fromkeys(queue if queue == EVERY else queue_name(queue, name) for queue in names))


def _job_states(value: Any, name: str) -> tuple[str, ...]:
    """Return unique job states, by BullMQ's names; ``waiting`` stands for ``wait`` and ``paused``."""
    parse_state = choice(*STATES, "waiting")
    states = [parse_state(word, name) for word in parse_names(value, name)]
    if not states:
        raise ConfigError(f"{name} must name one or more of the states {', '.join(STATES)}, not {value!r}")
    return tuple(dict.fromkeys(s for word in states for s in (("wait", "paused") if word == "waiting" else (word,))))


def _texts(value: Any, name: str) -> tuple[str, ...]:
    """Return unique texts from ``a,b``, or from a JSON list if one contains a comma."""
    if not (texts := _words(value, name)):
        raise ConfigError(f"{name} must not be empty")
    return tuple(dict.fromkeys(texts))


def _words(value: Any, name: str) -> tuple[str, ...]:
    is_json = isinstance(value, str) and value.strip().startswith("[")
    return parse_names(_json(value, name, list) if is_json else value, name)


def _starts(value: Any, name: str) -> str | Mapping[str, StreamId]:
    """Return where a streaming read begins: ``earliest``, ``latest``, or ids by queue."""
    text = str(value).strip()
    if not text.startswith("{"):
        return str(choice("earliest", "latest")(text, name))
    return {queue_name(queue, name): _id(start, name) for queue, start in _json(text, name, dict).items()}


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


def _id(value: Any, name: str) -> StreamId:
    """Return the id after which to begin. A number stands for the beginning of that millisecond."""
    text = str(value)
    try:
        return StreamId(int(text), 0).before if text.isdecimal() else StreamId.parse(text)
    except DecodeError as exc:
        raise ConfigError(f"{name}: {exc}") from exc


_TASKS: Final = optional(integer(1, 10_000))
_PAGE: Final = integer(1, 100_000)
_LOCATION: Final = {
    "broker_url": Option("url", optional(url), None, "URL of Redis; default: BULLTASK_BROKER_URL"),
    "prefix": Option("prefix", optional(plain_text), None, "prefix of BullMQ's keys; default: BULLTASK_PREFIX"),
    "queue_hash_tag": Option("queueHashTag", optional(flag), None, "store 'emails' as '{emails}'; default: true"),
}
"""The options that all operations have, by the setting that they override."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of every read and write. ``config`` has the location of Redis, and settings for names."""

    operation: ClassVar[str]
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
    """The options of every read. ``queues`` has no name twice, and none at all for ``*``."""

    broker: str = _option("broker", check_broker, "", "name of the broker, such as eu: queue 'mail' becomes 'eu:mail'")
    queues: tuple[str, ...] = _option("queue", _queue_names, REQUIRED, "comma-separated names, or * for all queues")
    skip_unsupported: bool = _option("skipUnsupportedQueues", flag, False, "skip queues that a lake cannot record")
    table: Table = _option("table", choice("jobs", "events", "counts"), "jobs", "what to read")
    columns: tuple[str, ...] | None = _option(
        "columns", optional(_texts), None, "comma-separated names; default: all, or the schema's"
    )

    @property
    def every(self) -> bool:
        """Whether all queues under the prefix are read."""
        return not self.queues

    @property
    def queue_prefix(self) -> str:
        """How the names of queues begin in rows."""
        return queue_prefix(self.broker)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsOptions(ReadOptions):
    """A batch read of jobs."""

    operation: ClassVar = "batch read of jobs"
    states: tuple[str, ...] = _option("state", _job_states, "completed,failed", "states of the jobs to read")
    ids: tuple[str, ...] | None = _option("id", optional(_texts), None, "only the jobs with these comma-separated ids")
    partitions: int | None = _option("numPartitions", _TASKS, None, "maximum number; default: 2 per core")
    min_rows: int = _option("minRowsPerPartition", integer(1), 1_000, "minimum number of jobs per partition")
    since_ms: int | None = _option("since", optional(_moment_ms), None, "only jobs that finished at this time or later")
    until_ms: int | None = _option("until", optional(_moment_ms), None, "only jobs that finished before this time")
    fetch_size: int = _option("fetchSize", _PAGE, 1_000, "jobs per round trip to Redis")

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

    operation: ClassVar = "batch read of counts"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsOptions(ReadOptions):
    """A batch read of events."""

    operation: ClassVar = "batch read of events"
    partitions: int | None = _option("numPartitions", _TASKS, None, "tasks of a large read; default: 2 per core")
    fetch_size: int = _option("fetchSize", _PAGE, 5_000, "events per round trip to Redis")
    per_partition: int = _option("eventsPerPartition", integer(1), 100_000, "events per partition")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions(EventsOptions):
    """A streaming read of events."""

    operation: ClassVar = "streaming read of events"
    table: Table = _option("table", choice("events"), "events", "what to read")
    starting: Literal["earliest", "latest"] | Mapping[str, StreamId] = _option(
        "startingOffsets", _starts, "earliest", "earliest, latest, or JSON: an id for each queue"
    )
    max_events_per_trigger: int | None = _option(
        "maxEventsPerTrigger", optional(integer(1)), MAX_EVENTS_PER_TRIGGER, "events per batch; none: no limit"
    )
    align: bool = _option("alignQueues", flag, True, "end a batch at the same event time for all queues")
    fail_on_loss: bool = _option("failOnDataLoss", flag, True, "fail if events were trimmed before they were read")
    gap_rows: bool = _option("gapRows", flag, False, "if failOnDataLoss is false: add a row for lost events")

    def starts_at(self, queue: str) -> StartAt:
        """Return where to begin with a queue (BullMQ's name); ``earliest`` if ``startingOffsets`` does not name it."""
        if isinstance(self.starting, str):
            return self.starting
        row_queue = row_name(queue, hash_tag=self.config.queue_hash_tag)
        named = (start for name, start in self.starting.items() if row_queue == name or self.bullmq_name(name) == queue)
        return next(named, "earliest")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions(SourceOptions):
    """A write of jobs, batch or streaming."""

    operation: ClassVar = "write"
    queue: str | None = _option("queue", optional(queue_name), None, "the queue; default: the column 'queue'")
    chunk_size: int = _option("chunkSize", integer(1, 10_000), 500, "jobs per round trip to Redis")
    write_id: str | None = _option(
        "writeId", optional(plain_text), None, "id of the write, to retry it without duplicates"
    )
    id_column: str | None = _option(
        "idColumn", optional(plain_text), None, "column with job ids; default: id, if it exists"
    )
    idempotent: bool = _option("idempotent", flag, True, "do not add a job again after it has been removed")
    idempotency_ttl_ms: int = _option("idempotencyTtl", _duration_ms, "7d", "how long Redis keeps ids of added jobs")
    job_opts: Mapping[str, Any] = _option(
        "jobOpts", _job_options, "{}", "options of every job in JSON, as for Queue.add"
    )


KINDS: Final[tuple[type[SourceOptions], ...]] = (JobsOptions, EventsOptions, CountsOptions, StreamOptions, WriteOptions)
"""The options of each operation."""


def options_of(kind: type[SourceOptions]) -> dict[str, Option]:
    """Return the options of an operation, by the names of the settings and fields that they set."""
    return _LOCATION | {it.name: it.metadata["option"] for it in fields(kind) if it.metadata}


def row_name(stored_name: str, *, hash_tag: bool) -> str:
    """Return a queue's name in rows, given BullMQ's name: with ``hash_tag``, ``{emails}`` is ``emails``.

    A queue for which bulltask has no name, such as one without braces, keeps BullMQ's.
    """
    inner = name_in_app(stored_name, hash_tag=hash_tag)
    return inner if bullmq_name(inner, hash_tag=hash_tag) == stored_name else stored_name


def option_of(options: Mapping[str, str], name: str) -> Any:
    """Return one option of a read, by the name of its field in `ReadOptions`."""
    return _value(options_of(ReadOptions)[name], _lower_names(options))


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
    _reject_unknown(given, kind)
    values = {name: _value(row, given) for name, row in options_of(kind).items()}
    values["config"] = config = resolve_config({name: values.pop(name) for name in _LOCATION}, environ)
    if "queues" in values:
        values["queues"] = _unique_queues(values["queues"], config)
    return kind(**values)


def _lower_names(options: Mapping[str, str]) -> dict[str, str]:
    given = {str(name).lower(): value for name, value in options.items()}
    if "url" in given:  # from now on, no variable shows the password
        given["url"] = SecretUrl(given["url"]).get_secret_value()
    return {name: value for name, value in given.items() if name not in SPARK_OPTIONS}


def _reject_unknown(given: Iterable[str], kind: type[SourceOptions]) -> None:
    names = {it: {row.name.lower(): row.name for row in options_of(it).values()} for it in KINDS}
    supported = names[kind]
    for name in given:
        if name in supported:
            continue
        if others := {it.operation: known[name] for it, known in names.items() if name in known}:
            shown, operations = next(iter(others.values())), ", ".join(sorted(others))
            text = f"a {kind.operation} has no option {shown}; it is an option for: {operations}"
            raise option_error("UNKNOWN", text)
        hint = did_you_mean(name, supported)
        for lowered, option_name in supported.items():
            hint = hint.replace(repr(lowered), repr(option_name))
        raise option_error("UNKNOWN", f"a {kind.operation} has no option {name}{hint}")


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


def _unique_queues(queues: Sequence[str], config: Config) -> tuple[str, ...]:
    """Return names once; with ``queueHashTag``, ``emails`` and ``{emails}`` are one queue. ``*`` has no names."""
    by_bullmq_name = {bullmq_name(queue, hash_tag=config.queue_hash_tag): queue for queue in queues if queue != EVERY}
    return tuple(by_bullmq_name.values())
