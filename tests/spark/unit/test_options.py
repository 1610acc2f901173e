"""The options of the data source are parsed, and a wrong option is rejected before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict

from bulltask.errors import ConfigError
from bulltask.spark.source.offsets import LAST_SEQ, StreamId
from bulltask.spark.source.options import (
    KINDS,
    REQUIRED,
    CountsOptions,
    EventsOptions,
    JobsOptions,
    SourceOptions,
    StreamOptions,
    WriteOptions,
    config_of,
    option_of,
    options_of,
    read_options,
)


def error_of(kind: type[SourceOptions], **options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_options(kind, options, {})
    return str(caught.value)


def jobs(**options: str) -> JobsOptions:
    return read_options(JobsOptions, options, {})


def stream(**options: str) -> StreamOptions:
    return read_options(StreamOptions, {"queue": "emails", **options}, {})


def write(**options: str) -> WriteOptions:
    return read_options(WriteOptions, options, {})


def test_a_batch_read_requires_only_a_queue() -> None:
    options = jobs(queue="emails")
    assert (options.queues, options.every, options.table) == (("emails",), False, "jobs")
    assert options.states == ("completed", "failed")
    assert (options.partitions, options.min_rows, options.fetch_size) == (None, 1_000, 1_000)
    assert options.config.broker_url == "redis://localhost:6379/0"


@pytest.mark.parametrize(
    ("text", "ms"),
    [("1970-01-01", 0), ("1970-01-01T01:00:00.001001+01:00", 2), ("1970-01-01 00:00:01", 1_000), ("", None)],
)
def test_a_time_is_in_utc_and_in_whole_milliseconds(text: str, ms: int | None) -> None:
    assert jobs(queue="emails", since=text).since_ms == jobs(queue="emails", until=text).until_ms == ms


def test_a_stream_limits_batches_aligns_queues_and_fails_on_data_loss() -> None:
    options = stream()
    assert (options.starting, options.max_events_per_trigger, options.per_partition) == ("earliest", 1_000_000, 100_000)
    assert (options.align, options.fail_on_loss, options.gap_rows, options.fetch_size) == (True, True, False, 5_000)


def test_a_write_requires_no_option_and_is_idempotent_for_a_week() -> None:
    options = write()
    assert (options.queue, options.write_id, options.id_column, options.chunk_size) == (None, None, None, 500)
    assert (options.idempotent, options.idempotency_ttl_ms, options.job_opts) == (True, 7 * 86_400_000, {})


@pytest.mark.parametrize("kind", KINDS)
def test_every_default_is_valid_for_its_own_parser(kind: type[SourceOptions]) -> None:
    for row in options_of(kind).values():
        if row.default is not REQUIRED:
            row.parse(row.default, row.name)


def test_option_names_are_case_insensitive_as_in_sparks_option_map() -> None:
    values = CaseInsensitiveDict({"QUEUE": "emails", "NumPartitions": "3", "minrowsperpartition": "7"})
    options = read_options(JobsOptions, values, {})
    assert (options.queues, options.partitions, options.min_rows) == (("emails",), 3, 7)


@pytest.mark.parametrize(
    ("text", "queues"),
    [
        ("emails", ("emails",)),
        (" b , a,b ", ("b", "a")),
        ('["a,b", "c"]', ("a,b", "c")),
    ],
)
def test_queues_are_comma_separated_names_or_a_json_list(text: str, queues: tuple[str, ...]) -> None:
    assert jobs(queue=text).queues == queues


def test_a_queue_given_with_and_without_a_hash_tag_is_one_queue() -> None:
    assert len(jobs(queue="emails,{emails}").queues) == 1
    assert len(jobs(queue="emails,{emails}", queueHashTag="false").queues) == 2


def test_a_star_means_every_queue() -> None:
    options = jobs(queue="*")
    assert (options.queues, options.every) == ((), True)


@pytest.mark.parametrize("text", ["", " , ", "a,*", "a:b", "{a", "[1]", "[", "a\x00"])
def test_an_invalid_queue_option_is_rejected(text: str) -> None:
    assert error_of(JobsOptions, queue=text).startswith("[BULLTASK_OPTION_INVALID] option queue")


@pytest.mark.parametrize("kind", [JobsOptions, EventsOptions, CountsOptions, StreamOptions])
def test_a_read_without_a_queue_is_rejected_with_advice_for_sql(kind: type[SourceOptions]) -> None:
    text = error_of(kind)
    assert text.startswith("[BULLTASK_OPTION_MISSING] option queue is missing")
    assert "CREATE TEMPORARY VIEW" in text


def test_an_unknown_option_is_rejected_with_a_suggestion() -> None:
    assert error_of(JobsOptions, queue="a", numpartition="3") == (
        "[BULLTASK_OPTION_UNKNOWN] a batch read of jobs has no option numpartition; did you mean 'numPartitions'?"
    )
    assert error_of(JobsOptions, queue="a", color="red") == (
        "[BULLTASK_OPTION_UNKNOWN] a batch read of jobs has no option color"
    )


def test_an_option_of_another_operation_is_rejected_with_the_name_of_that_operation() -> None:
    text = error_of(JobsOptions, queue="a", maxEventsPerTrigger="5")
    assert text.endswith("has no option maxEventsPerTrigger; it is an option for: streaming read of events")
    assert error_of(StreamOptions, queue="a", state="failed").endswith("it is an option for: batch read of jobs")
    assert "batch read of events" in error_of(WriteOptions, table="jobs")


def test_options_that_spark_adds_are_accepted() -> None:
    assert write(queryName="q", checkpointLocation="/tmp/x").queue is None


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (JobsOptions, "state", "done"),
        (JobsOptions, "state", ""),
        (JobsOptions, "numPartitions", "0"),
        (JobsOptions, "numPartitions", "two"),
        (JobsOptions, "minRowsPerPartition", "-1"),
        (JobsOptions, "fetchSize", "1e3"),
        (JobsOptions, "since", "yesterday"),
        (JobsOptions, "until", "1760000000000"),
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
        (WriteOptions, "idempotencyTtl", "7w"),
        (WriteOptions, "idempotencyTtl", "0"),
        (WriteOptions, "idempotencyTtl", "-5"),
        (WriteOptions, "jobOpts", "[]"),
        (WriteOptions, "jobOpts", "attempts=3"),
    ],
)
def test_a_wrong_value_is_rejected_with_the_name_of_its_option(
    kind: type[SourceOptions], name: str, value: str
) -> None:
    values = {name: value} if kind is WriteOptions else {"queue": "a", name: value}
    assert error_of(kind, **values).startswith(f"[BULLTASK_OPTION_INVALID] option {name}")


@pytest.mark.parametrize(
    ("text", "ms"), [("90", 90_000), ("1.5", 1_500), ("15m", 900_000), ("12h", 43_200_000), ("7 d", 604_800_000)]
)
def test_a_duration_is_seconds_or_has_a_unit(text: str, ms: int) -> None:
    assert write(idempotencyTtl=text).idempotency_ttl_ms == ms


def test_states_are_bullmqs_and_waiting_includes_the_paused_list() -> None:
    assert jobs(queue="a", state="waiting, delayed,wait").states == ("wait", "paused", "delayed")


def test_a_stream_starts_at_an_id_or_a_time_given_for_a_queue() -> None:
    options = stream(startingOffsets='{"emails": "1760010061025-3", "images": 1760010061025}')
    assert options.starts_at("{emails}") == StreamId(1760010061025, 3)
    assert options.starts_at("{images}") == StreamId(1760010061024, LAST_SEQ)
    assert options.starts_at("emails") == StreamId(
        1760010061025, 3
    )  # a Node.js queue, discovered by *: its rows have the name emails
    assert options.starts_at("{reports}") == "earliest"
    assert stream(startingOffsets="LATEST").starts_at("{emails}") == "latest"


def test_the_batch_limit_of_a_stream_can_be_disabled() -> None:
    assert stream(maxEventsPerTrigger="none").max_events_per_trigger is None


def test_redis_keys_follow_prefix_and_hash_tag_options() -> None:
    options = jobs(queue="emails", prefix="mine")
    assert options.keys("emails").events == "mine:{emails}:events"
    assert options.keys("emails").queue == "emails"
    bare = jobs(queue="emails", queueHashTag="false")
    assert bare.keys("emails").events == "bull:emails:events"


@pytest.mark.parametrize(
    ("redis_name", "tagged", "bare"),
    [
        ("{emails}", "emails", "{emails}"),
        ("emails", "emails", "emails"),
        ("{a}b", "{a}b", "{a}b"),
        ("{a}-{b}", "{a}-{b}", "{a}-{b}"),
    ],
)
def test_a_discovered_queue_has_the_name_that_a_user_would_give(redis_name: str, tagged: str, bare: str) -> None:
    assert jobs(queue="*").row_name(redis_name) == tagged
    assert jobs(queue="*", queueHashTag="false").row_name(redis_name) == bare


def test_rows_of_a_named_broker_have_its_name_before_that_of_the_queue() -> None:
    options = jobs(queue="emails", broker="eu-west")
    assert (options.keys("emails").queue, options.keys("emails").events) == ("eu-west:emails", "bull:{emails}:events")
    assert options.row_name("{emails}") == "eu-west:emails"
    assert options.bullmq_name("eu-west:emails") == options.bullmq_name("emails") == "{emails}"
    with pytest.raises(ConfigError, match=r"option broker: the name must consist of a-z, 0-9 and '-'.* not 'EU:1'"):
        jobs(queue="emails", broker="EU:1")


def test_the_settings_of_a_named_broker_have_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BULLTASK_BROKER_URL", "redis://other:1/0")
    monkeypatch.setenv("BULLTASK_PREFIX", "all")
    with pytest.raises(ConfigError, match=r"set BULLTASK_EU_WEST_BROKER_URL, or BULLTASK_EU_WEST_BROKER_URL_FILE"):
        config_of({"broker": "eu-west"})
    monkeypatch.setenv("BULLTASK_EU_WEST_BROKER_URL", "redis://:secret@eu:2/0")
    assert config_of({"broker": "eu-west"}).prefix == "all"
    monkeypatch.setenv("BULLTASK_EU_WEST_PREFIX", "own")
    config = config_of({"broker": "eu-west"})
    assert (config.broker_url.get_secret_value(), config.prefix) == ("redis://:secret@eu:2/0", "own")
    (tmp_path / "url").write_text("redis://us:3/0\n")
    monkeypatch.setenv("BULLTASK_US_BROKER_URL_FILE", str(tmp_path / "url"))
    assert config_of({"broker": "us"}).broker_url.get_secret_value() == "redis://us:3/0"
    assert config_of({"broker": "us", "url": "redis://given:4/0"}).broker_url.get_secret_value() == "redis://given:4/0"


def test_options_override_the_environment_which_overrides_defaults() -> None:
    environ = {
        "BULLTASK_BROKER_URL": "redis://primary:6379/0",
        "BULLTASK_QUEUE_HASH_TAG": "false",
        "BULLTASK_REDIS_SOCKET_TIMEOUT": "3",
    }
    plain = read_options(JobsOptions, {"queue": "a"}, environ)
    assert plain.config.broker_url == "redis://primary:6379/0"
    assert not plain.config.queue_hash_tag
    assert plain.config.command_timeout_ms == 3_000
    replica = read_options(JobsOptions, {"queue": "a", "url": "redis://replica:6379/0"}, environ)
    assert replica.config.broker_url == "redis://replica:6379/0"
    assert not replica.config.queue_hash_tag


def test_an_invalid_environment_variable_is_reported_with_a_code() -> None:
    with pytest.raises(ConfigError, match=r"\[BULLTASK_OPTION_INVALID\] broker_url must start with"):
        read_options(JobsOptions, {"queue": "a"}, {"BULLTASK_BROKER_URL": "http://x"})


def test_messages_and_repr_of_options_do_not_show_the_password() -> None:
    assert "secret" not in error_of(JobsOptions, queue="a", url="reddis://:secret@host")
    assert "secret" not in error_of(JobsOptions, queue="a", redisUrl="redis://:secret@host")
    options = jobs(queue="a", url="redis://:secret@host:6379/0")
    assert "secret" not in repr(options)
    assert options.config.broker_url == "redis://:secret@host:6379/0"


@pytest.mark.parametrize("kind", KINDS)
def test_options_can_be_pickled_for_executors(kind: type[SourceOptions]) -> None:
    values = {} if kind is WriteOptions else {"queue": "a,b"}
    options: Any = read_options(kind, values, {})
    assert cloudpickle.loads(cloudpickle.dumps(options)) == options


def test_the_table_of_a_batch_read_is_known_before_its_options_are_read() -> None:
    assert option_of({}, "table") == "jobs"
    assert option_of(CaseInsensitiveDict({"TABLE": "Events", "nonsense": "1"}), "table") == "events"
    with pytest.raises(
        ConfigError, match=r"\[BULLTASK_OPTION_INVALID\] option table must be one of jobs, events, counts"
    ):
        option_of({"table": "job"}, "table")


@pytest.mark.parametrize("kind", KINDS)
def test_option_names_are_unique_for_each_operation(kind: type[SourceOptions]) -> None:
    names = [row.name.lower() for row in options_of(kind).values()]
    assert len(names) == len(set(names))
