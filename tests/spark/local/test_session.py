"""A real session has the required settings, and the data source's options are always checked."""

from __future__ import annotations

import sys

import pytest
import redis
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

from bulltask.queue import Queue
from bulltask.spark import register

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]


@pytest.fixture
def mail(broker_url: str) -> str:
    """The URL of a server on which the queue ``mail`` has two jobs."""
    with Queue("mail", broker_url) as queue:
        queue.add("send", {"to": "a"})
        queue.add("send", {"to": "b"})
    return broker_url


def test_a_session_has_the_settings_that_the_tables_need(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.parquet.outputTimestampType") == "TIMESTAMP_MICROS"
    assert spark.conf.get("spark.sql.sources.partitionOverwriteMode") == "dynamic"
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert spark.sparkContext.uiWebUrl is None


def test_python_workers_of_spark_run_the_python_of_this_process(spark: SparkSession) -> None:
    executable = udf(lambda _: sys.executable, useArrow=False)
    assert spark.range(1).select(executable("id")).collect()[0][0] == sys.executable


def test_a_registered_source_is_read_by_its_default_name(spark: SparkSession, mail: str) -> None:
    jobs = spark.read.format("bulltask").options(url=mail, queue="mail", state="wait").load()
    assert {(job.name, job.data) for job in jobs.collect()} == {("send", '{"to":"a"}'), ("send", '{"to":"b"}')}


def test_spark_finds_the_source_without_register(spark: SparkSession, mail: str) -> None:
    other = spark.newSession()
    assert other.read.format("bulltask").options(url=mail, queue="mail", state="wait").load().count() == 2


def test_a_source_may_be_registered_under_a_custom_name(spark: SparkSession, mail: str) -> None:
    register(spark, "jobs_of_bulltask")
    jobs = spark.read.format("jobs_of_bulltask").options(url=mail, queue="mail", state="wait").load()
    assert jobs.count() == 2


def test_an_sql_view_is_read(spark: SparkSession, mail: str) -> None:
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW mails USING bulltask OPTIONS (url '{mail}', queue 'mail', state 'wait')"
    )
    assert spark.sql("SELECT count(*) FROM mails WHERE name = 'send'").collect()[0][0] == 2
    spark.catalog.dropTempView("mails")


def test_rows_are_inserted_in_sql_into_a_view_or_a_table(
    spark: SparkSession, mail: str, redis_client: redis.Redis
) -> None:
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW new_mails (name STRING, data STRING) "
        f"USING bulltask OPTIONS (url '{mail}', queue 'mail')"
    )
    spark.sql("CREATE TABLE sent_mails (name STRING, data STRING) USING bulltask")
    try:
        spark.sql("INSERT INTO new_mails VALUES ('send', '{}')")
        spark.sql(f"INSERT INTO sent_mails WITH (`queue` = 'mail', `url` = '{mail}') VALUES ('send', '{{}}')")
        assert redis_client.llen("bull:{mail}:wait") == 4
        with pytest.raises(PySparkException, match=r"BULLTASK_COLUMN_MISSING.*INSERT INTO .* WITH \(`queue`"):
            spark.sql("INSERT INTO sent_mails VALUES ('send', '{}')")
    finally:
        spark.sql("DROP TABLE sent_mails")
        spark.catalog.dropTempView("new_mails")


def test_an_sql_table_without_its_options_is_an_error(spark: SparkSession) -> None:
    spark.sql("CREATE TABLE mails USING bulltask OPTIONS (queue 'mail')")
    try:
        with pytest.raises(PySparkException, match=r"\[BULLTASK_OPTION_MISSING\] option queue is missing.*VIEW"):
            spark.sql("SELECT * FROM mails").collect()
    finally:
        spark.sql("DROP TABLE mails")


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("color", "red", "UNKNOWN"), ("fetchSize", "0", "INVALID"), ("state", "done", "INVALID")],
)
def test_an_invalid_option_fails_a_query_before_it_starts(
    spark: SparkSession, name: str, value: str, code: str
) -> None:
    tracker = spark.sparkContext.statusTracker()
    before = set(tracker.getJobIdsForGroup())
    with pytest.raises(PySparkException, match=rf"\[BULLTASK_OPTION_{code}\].*{name}") as caught:
        spark.read.format("bulltask").options(queue="mail").option(name, value).load().collect()
    assert "Traceback" not in str(caught.value)
    assert set(tracker.getJobIdsForGroup()) == before


def test_plans_and_errors_do_not_contain_the_password(spark: SparkSession, mail: str) -> None:
    url = mail.replace("redis://", "redis://:very-secret@")
    jobs = spark.read.format("bulltask").options(url=url, queue="mail").load()
    assert "very-secret" not in jobs._jdf.queryExecution().toString()
    with pytest.raises(PySparkException) as caught:
        jobs.collect()
    assert "very-secret" not in str(caught.value)
