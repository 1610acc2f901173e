"""The options of the source: what they become, and that a wrong one is refused before anything is read."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict

from bulltask.errors import ConfigError
from bulltask.spark.source.offsets import LAST_SEQ, StreamId
from bulltask.spark.source.options import (
    OPTIONS,
    REQUIRED,
    CountsOptions,
    EventsOptions,
    JobsOptions,
    SourceOptions,
    StreamOptions,
    Use,
    WriteOptions,
    read_options,
    table_of,
)

KINDS = [JobsOptions, EventsOptions, CountsOptions, StreamOptions, WriteOptions]


def refused(kind: type[SourceOptions], **options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_options(kind, options, {})
    return str(caught.value)


def jobs(**options: str) -> JobsOptions:
    return read_options(JobsOptions, options, {})


def stream(**options: str) -> StreamOptions:
    return read_options(StreamOptions, {"queue": "emails", **options}, {})


def write(**options: str) -> WriteOptions:
    return read_options(WriteOptions, options, {})


def test_a_queue_is_all_that_a_read_needs() -> None:
    options = jobs(queue="emails")
    assert (options.queues, options.every, options.table) == (("emails",), False, "jobs")
    assert options.states == ("completed", "failed")
    assert (options.partitions, options.min_rows, options.batch, options.pushdown) == (None, 1_000, 1_000, False)
    assert options.config.broker_url == "redis://localhost:6379/0"


def test_a_stream_has_a_budget_keeps_queues_together_and_stops_at_a_loss() -> None:
    options = stream()
    assert (options.starting, options.max_events, options.per_partition) == ("earliest", 200_000, 100_000)
    assert (options.align, options.fail_on_loss, options.gap_rows, options.batch) == (True, True, False, 5_000)


def test_a_write_needs_no_option_and_is_fenced_for_a_week() -> None:
    options = write()
    assert (options.queue, options.write_id, options.id_column, options.batch) == (None, None, None, 500)
    assert (options.fence, options.fence_ttl_ms, options.job_opts) == (True, 7 * 86_400_000, {})


def test_every_default_is_valid_for_its_own_parser() -> None:
    for row in OPTIONS:
        if row.default is not REQUIRED:
            row.parse(row.default, row.name)


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_of_a_use_has_its_field(kind: type[SourceOptions]) -> None:
    names = {row.field for row in OPTIONS if kind.use in row.uses} - {"url", "prefix", "hash_tag"}
    assert names == {field.name for field in fields(kind)} - {"config", "every"}


def test_the_case_of_names_does_not_matter_and_sparks_own_map_is_read_whole() -> None:
    given = CaseInsensitiveDict({"QUEUE": "emails", "NumPartitions": "3", "minrowsperpartition": "7"})
    options = read_options(JobsOptions, given, {})
    assert (options.queues, options.partitions, options.min_rows) == (("emails",), 3, 7)


@pytest.mark.parametrize(
    ("text", "queues"),
    [
        ("emails", ("emails",)),
        (" b , a,b ", ("b", "a")),
        ('["a,b", "c"]', ("a,b", "c")),
    ],
)
def test_queues_are_names_with_commas_or_a_json_list(text: str, queues: tuple[str, ...]) -> None:
    assert jobs(queue=text).queues == queues


def test_two_spellings_of_one_queue_are_one_queue() -> None:
    assert len(jobs(queue="emails,{emails}").queues) == 1
    assert len(jobs(queue="emails,{emails}", queueHashTag="false").queues) == 2


def test_a_star_means_every_queue() -> None:
    options = jobs(queue="*")
    assert (options.queues, options.every) == ((), True)


@pytest.mark.parametrize("text", ["", " , ", "a,*", "a:b", "{a", "[1]", "[", "a\x00"])
def test_what_names_no_queue_is_refused(text: str) -> None:
    assert refused(JobsOptions, queue=text).startswith("[BULLTASK_OPTION_WRONG] option queue")


@pytest.mark.parametrize("kind", [JobsOptions, EventsOptions, CountsOptions, StreamOptions])
def test_a_read_without_a_queue_is_refused_with_the_way_out_for_sql(kind: type[SourceOptions]) -> None:
    text = refused(kind)
    assert text.startswith("[BULLTASK_OPTION_MISSING] option queue is missing")
    assert "CREATE TEMPORARY VIEW" in text


def test_an_unknown_option_is_refused_with_the_one_that_was_meant() -> None:
    assert refused(JobsOptions, queue="a", numpartition="3") == (
        "[BULLTASK_OPTION_UNKNOWN] a batch read of jobs has no option numpartition; did you mean 'numPartitions'?"
    )
    assert refused(JobsOptions, queue="a", colour="red") == (
        "[BULLTASK_OPTION_UNKNOWN] a batch read of jobs has no option colour"
    )


def test_an_option_of_another_use_is_refused_with_that_use() -> None:
    text = refused(JobsOptions, queue="a", maxEventsPerTrigger="5")
    assert text.endswith("has no option maxEventsPerTrigger; it is one of: stream of events")
    assert refused(StreamOptions, queue="a", state="failed").endswith("it is one of: batch read of jobs")
    assert "batch read of events" in refused(WriteOptions, table="jobs")


def test_options_of_spark_itself_are_accepted() -> None:
    assert write(queryName="q", checkpointLocation="/tmp/x").queue is None


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (JobsOptions, "state", "done"),
        (JobsOptions, "state", ""),
        (JobsOptions, "numPartitions", "0"),
        (JobsOptions, "numPartitions", "two"),
        (JobsOptions, "minRowsPerPartition", "-1"),
        (JobsOptions, "batch", "1e3"),
        (JobsOptions, "pushdown", "maybe"),
        (JobsOptions, "table", "events_"),
        (JobsOptions, "prefix", "a\nb"),
        (JobsOptions, "queueHashTag", "perhaps"),
        (EventsOptions, "eventsPerPartition", "0"),
        (StreamOptions, "table", "jobs"),
        (StreamOptions, "maxEventsPerTrigger", "0"),
        (StreamOptions, "startingOffsets", "first"),
        (StreamOptions, "startingOffsets", "{"),
        (StreamOptions, "startingOffsets", '{"a:b": "5-0"}'),
        (StreamOptions, "startingOffsets", '{"a": "5-x"}'),
        (StreamOptions, "failOnDataLoss", "2"),
        (WriteOptions, "queue", "a:b"),
        (WriteOptions, "fenceTtl", "7w"),
        (WriteOptions, "fenceTtl", "0"),
        (WriteOptions, "fenceTtl", "-5"),
        (WriteOptions, "jobOpts", "[]"),
        (WriteOptions, "jobOpts", "attempts=3"),
    ],
)
def test_a_wrong_value_is_refused_with_the_options_name(kind: type[SourceOptions], name: str, value: str) -> None:
    given = {name: value} if kind is WriteOptions else {"queue": "a", name: value}
    assert refused(kind, **given).startswith(f"[BULLTASK_OPTION_WRONG] option {name}")


@pytest.mark.parametrize(
    ("text", "ms"), [("90", 90_000), ("1.5", 1_500), ("15m", 900_000), ("12h", 43_200_000), ("7 d", 604_800_000)]
)
def test_a_duration_is_seconds_or_has_a_unit(text: str, ms: int) -> None:
    assert write(fenceTtl=text).fence_ttl_ms == ms


def test_states_are_bullmqs_and_waiting_is_both_of_its_lists() -> None:
    assert jobs(queue="a", state="waiting, delayed,wait").states == ("wait", "paused", "delayed")


def test_a_stream_may_begin_at_an_id_or_a_time_of_some_queues() -> None:
    options = stream(startingOffsets='{"emails": "1760010061025-3", "images": 1760010061025}')
    assert options.starts_at("{emails}") == StreamId(1760010061025, 3)
    assert options.starts_at("{images}") == StreamId(1760010061024, LAST_SEQ)
    assert options.starts_at("emails") == StreamId(1760010061025, 3)  # of Node, found by *: its rows say emails
    assert options.starts_at("{reports}") == "earliest"
    assert stream(startingOffsets="LATEST").starts_at("{emails}") == "latest"


def test_a_budget_is_optional() -> None:
    assert stream(maxEventsPerTrigger="none").max_events is None


def test_queues_are_spelled_as_everywhere_in_bulltask() -> None:
    options = jobs(queue="emails", prefix="mine")
    assert options.keys("emails").events == "mine:{emails}:events"
    assert options.keys("emails").queue == "emails"
    bare = jobs(queue="emails", queueHashTag="false")
    assert bare.keys("emails").events == "bull:emails:events"


@pytest.mark.parametrize(
    ("found", "tagged", "bare"),
    [
        ("{emails}", "emails", "{emails}"),
        ("emails", None, "emails"),
        ("{a}b", "{a}b", "{a}b"),
        ("{a}-{b}", "{a}-{b}", "{a}-{b}"),
    ],
)
def test_a_discovered_queue_has_the_user_name_that_leads_to_it(found: str, tagged: str | None, bare: str) -> None:
    assert jobs(queue="*").user_name(found) == tagged
    assert jobs(queue="*", queueHashTag="false").user_name(found) == bare


def test_an_option_wins_over_the_environment_which_wins_over_the_default() -> None:
    around = {
        "BULLTASK_BROKER_URL": "redis://primary:6379/0",
        "BULLTASK_QUEUE_HASH_TAG": "false",
        "BULLTASK_REDIS_SOCKET_TIMEOUT": "3",
    }
    plain = read_options(JobsOptions, {"queue": "a"}, around)
    assert plain.config.broker_url == "redis://primary:6379/0"
    assert not plain.config.queue_hash_tag
    assert plain.config.command_timeout_ms == 3_000
    replica = read_options(JobsOptions, {"queue": "a", "url": "redis://replica:6379/0"}, around)
    assert replica.config.broker_url == "redis://replica:6379/0"
    assert not replica.config.queue_hash_tag


def test_an_invalid_environment_variable_is_reported_with_a_code() -> None:
    with pytest.raises(ConfigError, match=r"\[BULLTASK_OPTION_WRONG\] broker_url must start with"):
        read_options(JobsOptions, {"queue": "a"}, {"BULLTASK_BROKER_URL": "http://x"})


def test_no_message_and_no_text_of_options_shows_the_password() -> None:
    assert "secret" not in refused(JobsOptions, queue="a", url="reddis://:secret@host")
    assert "secret" not in refused(JobsOptions, queue="a", redisUrl="redis://:secret@host")
    options = jobs(queue="a", url="redis://:secret@host:6379/0")
    assert "secret" not in repr(options)
    assert options.config.broker_url == "redis://:secret@host:6379/0"


@pytest.mark.parametrize("kind", KINDS)
def test_options_travel_to_executors(kind: type[SourceOptions]) -> None:
    given = {} if kind is WriteOptions else {"queue": "a,b"}
    options: Any = read_options(kind, given, {})
    assert cloudpickle.loads(cloudpickle.dumps(options)) == options


def test_the_table_of_a_batch_read_is_known_before_its_options_are_read() -> None:
    assert table_of({}) == "jobs"
    assert table_of(CaseInsensitiveDict({"TABLE": "Events", "nonsense": "1"})) == "events"
    with pytest.raises(
        ConfigError, match=r"\[BULLTASK_OPTION_WRONG\] option table must be one of jobs, events, counts"
    ):
        table_of({"table": "job"})


def test_option_names_are_unique_for_each_use() -> None:
    for use in Use:
        names = [row.name.lower() for row in OPTIONS if use in row.uses]
        assert len(names) == len(set(names)), use
