"""The options of ``format("bulltask")``: checked before any task starts, also when they come from SQL.

Spark hands options over as texts, by names whose case does not matter. An unknown name, a wrong value or one that is
missing is a ``ConfigError`` whose message begins with a code: an option that is silently ignored reads the wrong rows.

Where Redis is and how queues are spelled are bulltask's own settings; here an option wins over the environment
(``BULLTASK_BROKER_URL`` …), because a read may go to a replica and the write beside it may not. Both are looked up
where the query is planned, and travel to the executors with the plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, TypeVar, cast

from bulltask.config.config import ENV_PREFIX, Conf, Config
from bulltask.config.urls import SecretUrl
from bulltask.errors import ConfigError, did_you_mean
from bulltask.jobs.names import wire_name
from bulltask.spark.source.option_table import EVERY, OPTIONS, REQUIRED, SPARKS_OWN, Option, Use
from bulltask.spark.source.positions import StartAt, StreamId
from bulltask.transport.keys import QueueKeys

__all__ = [
    "CountsOptions",
    "EventsOptions",
    "JobsOptions",
    "ReadOptions",
    "SourceOptions",
    "StreamOptions",
    "WriteOptions",
    "read_options",
    "settings",
    "table_of",
    "user_name",
]

Table = Literal["jobs", "events", "counts"]
OptionsT = TypeVar("OptionsT", bound="SourceOptions")

_SETTINGS: Final = {"url": "broker_url", "prefix": "prefix", "hash_tag": "queue_hash_tag"}
"""Fields of the table that are settings of bulltask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What every read and write has.

    Attributes:
        config: the settings of bulltask that say where Redis is and how queues are spelled.
    """

    use: ClassVar[Use]
    config: Config = field(repr=False)  # its URL may have a password

    def keys(self, queue: str) -> QueueKeys:
        """The keys of a queue, as the user spells it."""
        return QueueKeys(self.config.prefix, self.wire_name(queue), queue)

    def wire_name(self, queue: str) -> str:
        """BullMQ's spelling of a queue: offsets hold it, as it stays right when ``queueHashTag`` changes."""
        return wire_name(queue, hash_tag=self.config.queue_hash_tag)

    def user_name(self, found: str) -> str | None:
        """The user's spelling of a queue that was found in Redis; ``None`` if no spelling leads to it.

        With hash tags on, ``{emails}`` is ``emails``, and a queue ``emails`` without braces cannot be named.
        """
        return user_name(found, hash_tag=self.config.queue_hash_tag)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(SourceOptions):
    """What every read has.

    Attributes:
        queues: as the user spells them, each once; empty when every queue is meant.
        every: every queue of the prefix is meant.
        skip_foreign: queues that a lake cannot hold are set aside.
        table: what is read.
    """

    queues: tuple[str, ...]
    every: bool
    skip_foreign: bool
    table: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsOptions(ReadOptions):
    """A batch read of jobs; the table of options says what each field means."""

    use: ClassVar[Use] = Use.JOBS
    states: tuple[str, ...]
    partitions: int | None
    min_rows: int
    batch: int
    pushdown: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CountsOptions(ReadOptions):
    """A batch read of how many jobs each queue has in each state."""

    use: ClassVar[Use] = Use.COUNTS
    pushdown: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsOptions(ReadOptions):
    """A batch read of events."""

    use: ClassVar[Use] = Use.EVENTS
    batch: int
    per_partition: int
    pushdown: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions(ReadOptions):
    """A stream of events."""

    use: ClassVar[Use] = Use.STREAM
    batch: int
    per_partition: int
    starting: Literal["earliest", "latest"] | Mapping[str, StreamId]
    max_events: int | None
    align: bool
    fail_on_loss: bool
    gap_rows: bool

    def starts_at(self, queue: str) -> StartAt:
        """Where to begin with a queue, by BullMQ's spelling; those that ``startingOffsets`` does not name: earliest."""
        if isinstance(self.starting, str):
            return self.starting
        # A queue that no spelling leads to is called as BullMQ calls it, also in the rows.
        shown = self.user_name(queue) or queue
        named = (at for name, at in self.starting.items() if shown == name or self.wire_name(name) == queue)
        return next(named, "earliest")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions(SourceOptions):
    """A write of jobs, batch or streaming; the table of options says what each field means."""

    use: ClassVar[Use] = Use.WRITE
    queue: str | None
    batch: int
    write_id: str | None
    id_column: str | None
    fence: bool
    fence_ttl_ms: int
    job_opts: Mapping[str, Any]


def user_name(found: str, *, hash_tag: bool) -> str | None:
    """Return the user's spelling of a queue, by BullMQ's; ``None`` if no spelling leads to it."""
    if not hash_tag:
        return found
    bare = found[1:-1] if found.startswith("{") and found.endswith("}") else found
    return next((name for name in (bare, found) if wire_name(name, hash_tag=hash_tag) == found), None)


def table_of(options: Mapping[str, str]) -> Table:
    """Which table a batch read is about; ``jobs`` unless it says otherwise.

    Raises:
        ConfigError: there is no such table.
    """
    row = next(row for row in OPTIONS if row.name == "table")
    return cast("Table", _value(row, _lowered(options)))


def read_options(
    kind: type[OptionsT], options: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> OptionsT:
    """Read and check the options of one use.

    Args:
        kind: the use: :class:`JobsOptions`, :class:`StreamOptions` …
        options: as Spark gives them; the case of their names does not matter.
        environ: the environment, for ``BULLTASK_BROKER_URL`` and other settings; this process' own by default.

    Raises:
        ConfigError: an option is unknown, wrong, missing, or has no meaning for this use. The message begins with
            ``[BULLTASK_OPTION_UNKNOWN]``, ``[BULLTASK_OPTION_WRONG]`` or ``[BULLTASK_OPTION_MISSING]`` and names the
            option; it shows no password.
    """
    options = given = _lowered(options)
    rows = [row for row in OPTIONS if kind.use in row.uses]
    _refuse_unknown(given, rows, kind.use)
    fields = {row.field: _value(row, given) for row in rows}
    fields["config"] = settings({_SETTINGS[name]: fields.pop(name) for name in _SETTINGS}, environ)
    if "queues" in fields:
        fields["every"] = fields["queues"] == (EVERY,)
        fields["queues"] = () if fields["every"] else _distinct(fields["queues"], fields["config"])
    return kind(**fields)


def _lowered(options: Mapping[str, str]) -> dict[str, str]:
    given = {str(name).lower(): value for name, value in options.items()}
    if "url" in given:  # from here on no variable shows its password
        given["url"] = SecretUrl(given["url"]).get_secret_value()
    return {name: value for name, value in given.items() if name not in SPARKS_OWN}


def _refuse_unknown(given: Iterable[str], rows: Iterable[Option], use: Use) -> None:
    here = {row.name.lower(): row.name for row in rows}
    elsewhere = {row.name.lower(): row for row in OPTIONS}
    for name in given:
        if name in here:
            continue
        if row := elsewhere.get(name):
            uses = ", ".join(sorted(use for one in OPTIONS if one.name == row.name for use in one.uses))
            raise _error("UNKNOWN", f"a {use} has no option {row.name}; it is one of: {uses}")
        hint = did_you_mean(name, here)
        for low, spelled in here.items():
            hint = hint.replace(repr(low), repr(spelled))
        raise _error("UNKNOWN", f"a {use} has no option {name}{hint}")


def _value(row: Option, given: Mapping[str, str]) -> Any:
    value = given.get(row.name.lower(), row.default)
    if value is REQUIRED:
        raise _error(
            "MISSING",
            f"option {row.name} is missing: {row.doc}. In SQL, use CREATE TEMPORARY VIEW … USING bulltask OPTIONS (…): "
            "the options of CREATE TABLE do not reach a source in Python",
        )
    try:
        return row.parse(value, f"option {row.name}")
    except ConfigError as exc:
        raise _error("WRONG", str(exc)) from None  # the cause's message is the same, and Spark would print both


def settings(given: Mapping[str, object], environ: Mapping[str, str] | None = None) -> Config:
    """Return bulltask's settings: what is given, and is not ``None``, wins over the environment.

    Raises:
        ConfigError: one is wrong.
    """
    set_here = {name: value for name, value in given.items() if value is not None}
    beaten = {ENV_PREFIX + name.upper() for name in set_here}
    around = os.environ if environ is None else environ
    try:
        return Conf(set_here, {name: text for name, text in around.items() if name not in beaten}).freeze()
    except ConfigError as exc:
        raise _error("WRONG", str(exc)) from None


def _distinct(queues: Iterable[str], config: Config) -> tuple[str, ...]:
    """Each queue once: with hash tags on, ``emails`` and ``{emails}`` are the same."""
    spelled = {wire_name(queue, hash_tag=config.queue_hash_tag): queue for queue in queues}
    return tuple(spelled.values())


def _error(code: str, text: str) -> ConfigError:
    return ConfigError(f"[BULLTASK_OPTION_{code}] {text}")
