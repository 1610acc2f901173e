"""The arguments of individual calls and the replies to them: details that a test with a server would not notice."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ClusterCrossSlotError, InvalidResponse, ResponseError

from bulltask.config.settings import Settings
from bulltask.errors import (
    BrokerAuthError,
    BrokerError,
    BrokerNotReadyError,
    BrokerOutOfMemoryError,
    BrokerUnavailableError,
    LockMismatchError,
    PayloadTooLargeError,
)
from bulltask.jobs.job import JobOptions, NewJob, RunningJob, check_size
from bulltask.jobs.names import Revocation
from bulltask.transport.call import BullKeys, Call, QueueKeys, SyncClient
from bulltask.transport.client import Client, ClientPool
from bulltask.transport.cluster_slots import CROSS_SLOT
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.produce import Producer, RetryBudget, split_jobs
from bulltask.transport.redis_connection import DeadlineParser
from bulltask.transport.redis_errors import acl_hint, connection_error, is_wrong_type, reply_error
from bulltask.transport.results import RECHECK_MS, _OutageTolerance, revoke
from bulltask.transport.scripts.add import IdempotentWrite, add_job, add_jobs_once
from bulltask.transport.scripts.flow import children
from bulltask.transport.scripts.job import add_log
from bulltask.transport.scripts.move import FetchOptions, fail_malformed, malformed_finish, move_to_finished, retry_job
from bulltask.transport.scripts.queue import JobConversion, move_bull_job, read_repeatable, state_size, worker_queues
from bulltask.transport.streams import Follower, StreamGap, StreamInfo, is_retained, read_blocking

KEYS = QueueKeys("bull", "{mail}", "mail")
NOW_MS = 1_700_000_000_000
CONFIG = Settings({}, {}).freeze()
UNREACHABLE = BrokerUnavailableError("connection refused")


def fail_malformed_call(**options: bool) -> Call[bool]:
    fetch = FetchOptions.from_config(CONFIG, KEYS, "token", "")
    finish = move_to_finished(KEYS, "7", fetch, malformed_finish("no name", {"count": 1}), fetch_next=False, now_ms=1)
    return fail_malformed(KEYS, finish, "token", **options)


def test_a_blocking_read_waits_at_least_a_millisecond() -> None:
    # With 0, Redis would wait forever.
    assert [read_blocking(KEYS, "0-0", block_ms).args[4] for block_ms in (-5, 0, 1, 7)] == [1, 1, 1, 7]


def test_the_retention_check_reads_a_single_entry() -> None:
    assert is_retained(KEYS, "5-0").args[-2:] == ("COUNT", 1)


def test_the_size_of_a_state_is_read_from_its_list_or_sorted_set() -> None:
    assert state_size(KEYS, "wait").args == ("LLEN", KEYS.wait)
    assert state_size(KEYS, "delayed").args == ("ZCARD", KEYS.delayed)


def test_a_page_of_failed_children_has_the_requested_size() -> None:
    assert children(KEYS, "7", "failed", 10, ("0", 0)).args[-2:] == (0, 9)


def test_every_field_of_a_repeatable_job_is_read() -> None:
    reply = [b"name", b"daily", b"every", b"5000", b"tz", b"Europe/Berlin"]
    assert read_repeatable(KEYS, "k").parse_reply(reply) == {"name": "daily", "every": "5000", "tz": "Europe/Berlin"}


def test_a_log_keeps_at_most_a_billion_lines() -> None:
    assert [add_log(KEYS, "7", "x", keep, None).args[-1] for keep in (5, 10**9, 10**15, 0)] == [5, 10**9, 10**9, ""]


def test_a_malformed_job_of_another_worker_does_not_fail() -> None:
    with pytest.raises(LockMismatchError):
        fail_malformed_call().parse_reply(-6)


def test_the_option_only_malformed_changes_one_argument_of_the_script() -> None:
    always, only_malformed = fail_malformed_call().args, fail_malformed_call(only_malformed=True).args
    assert [pair for pair in zip(always, only_malformed, strict=True) if pair[0] != pair[1]] == [("", "1")]


def test_a_moved_job_keeps_its_deduplication_in_the_new_queue() -> None:
    source = BullKeys("bull", "old")
    job = JobConversion(
        id="7",
        new_id="7",
        source="wait",
        state="waiting",
        read={},
        fields={},
        dropped=(),
        priority=0,
        debounce_id="only-one",
    )
    script_keys = move_bull_job(source, KEYS, job).args[1:23]
    assert (script_keys[5], script_keys[21]) == (source.deduplication("only-one"), KEYS.deduplication("only-one"))
    without = move_bull_job(source, KEYS, replace(job, debounce_id=None)).args[1:23]
    assert (without[5], without[21]) == (source.job("7"), KEYS.job("7"))


def test_revoking_a_job_without_a_deduplication_id_takes_two_calls() -> None:
    operation = revoke(KEYS, "7", CONFIG, lambda: NOW_MS, terminate=False)
    next(operation)
    operation.send([[b"add", b"{}"]])
    with pytest.raises(StopIteration) as end:
        operation.send([Revocation.REVOKED])
    assert end.value.value is Revocation.REVOKED


def test_revoking_checks_that_a_hash_is_malformed_before_it_fails_the_job() -> None:
    operation = revoke(KEYS, "7", CONFIG, lambda: NOW_MS, terminate=False)
    next(operation)
    operation.send([[b"add", b"{}"]])
    (call,) = operation.throw(BrokerError("the script stopped"))
    assert "1" in call.args


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("NOPERM User app has no permissions to run the 'evalsha' command", "ACL SETUSER app +evalsha"),
        ("No permissions to access a key", "ACL SETUSER app ~bull:*"),
        ("The user executing the script can't run this command or subcommand", "`bulltask acl ROLE`"),
    ],
)
def test_an_acl_error_names_the_permission_to_grant(error: str, text: str) -> None:
    assert text in acl_hint(error, "redis://app:secret@redis:6379/0")


IN_SCRIPT = f"Error running script (call to f_{'0a' * 20}): @user_script:12: "


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        ("@user_script: 12: -OOM command not allowed when used memory > 'maxmemory'.", BrokerOutOfMemoryError, ": OOM"),
        ("@user_script: 12: -READONLY You can't write against a read only replica.", BrokerNotReadyError, ": READONLY"),
        ("@user_script: 12: The user executing the script can't run this", BrokerAuthError, "`bulltask acl ROLE`"),
        ("@user_script: 12: -MISCONF Redis is configured to save", BrokerNotReadyError, ": MISCONF"),
        ("WRONGTYPE Operation against a key", BrokerError, ": WRONGTYPE"),
    ],
)
def test_an_error_in_a_script_of_redis_6_2_is_the_same_as_outside(error: str, kind: type, text: str) -> None:
    reply = ResponseError(IN_SCRIPT + error)
    found = reply_error(reply, "redis://server")
    found.__cause__ = reply
    assert (type(found), text in str(found), "user_script" in str(found)) == (kind, True, False), found
    assert is_wrong_type(found) == ("WRONGTYPE" in error)


def test_an_error_of_the_script_itself_keeps_its_line() -> None:
    text = IN_SCRIPT + "user_script:3: attempt to index a nil value"
    assert text in str(reply_error(ResponseError(text), "redis://server"))


class Socket:
    """A fake socket with a timeout."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout

    def gettimeout(self) -> float | None:
        return self.timeout

    def settimeout(self, seconds: float) -> None:
        self.timeout = seconds


@pytest.mark.parametrize(("before", "after"), [(None, 4.0), (10.0, 4.0), (2.0, 2.0)])
def test_reading_a_reply_shortens_the_socket_timeout_to_its_deadline(
    monkeypatch: pytest.MonkeyPatch, before: float | None, after: float
) -> None:
    monkeypatch.setattr("bulltask.transport.redis_connection.mono_ms", lambda: 1_000)
    monkeypatch.setattr(DeadlineParser.__base__, "read_from_socket", lambda _: b"read")
    parser = DeadlineParser(1024)
    parser._sock, parser.deadline_ms = Socket(before), 5_000
    assert parser.read_from_socket() == b"read"
    assert parser._sock.timeout == after


def test_waiting_for_a_result_tolerates_an_outage_of_two_recheck_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = 1_000
    monkeypatch.setattr("bulltask.transport.results.mono_ms", lambda: now_ms)
    tolerance = _OutageTolerance()
    with pytest.raises(BrokerUnavailableError):
        tolerance.pause_ms(UNREACHABLE)
    tolerance.record_success()
    now_ms += 2 * RECHECK_MS - 1
    assert tolerance.pause_ms(UNREACHABLE) > 0
    now_ms += 1
    with pytest.raises(BrokerUnavailableError):
        tolerance.pause_ms(UNREACHABLE)


def test_a_producer_connects_before_reading_the_servers_clock() -> None:
    clock = SimpleNamespace(now_ms=lambda: 0)

    class Sender:
        def connect(self) -> None:
            clock.now_ms = lambda: NOW_MS

        def run_many(self, calls: list[Call[Any]]) -> list[Any]:
            return ["7" for _ in calls]

    pool: Any = SimpleNamespace(client=lambda _: nullcontext(Sender()))
    sleep: Any = None
    fake_clock: Any = clock
    added: list[int] = []
    producer = Producer(pool, sleep, lambda _: KEYS, fake_clock, CONFIG)
    producer._add = lambda part, now_ms: iter(added.append(now_ms) or [])  # type: ignore[method-assign,func-returns-value]
    producer.send([NewJob("mail", "7", "send", b"{}", JobOptions())])
    assert added == [NOW_MS]


def test_the_queues_of_workers_are_read_from_their_connection_names() -> None:
    lines = [
        "id=1 name=bull:bWFpbA== db=0",
        "id=2 name=bull:c21z:w:worker db=0",
        "id=3 name=other:bWFpbA==",
        "id=4 name=",
    ]
    assert worker_queues("bull").parse_reply("\n".join([*lines, "id=5 name=bull:mail", "id=6"]).encode()) == {
        "mail",
        "sms",
    }


def jobs_of(sizes: list[int]) -> list[NewJob]:
    return [NewJob("mail", str(size), "send", b"x" * size, JobOptions()) for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([1] * 1_000, [1_000]),
        ([1] * 2_001, [1_000, 1_000, 1]),
        ([2_000_000] * 5, [2, 2, 1]),
        ([4_000_001, 1, 4_000_000, 4_000_000], [1, 1, 1, 1]),
        ([], []),
    ],
)
def test_a_round_trip_has_at_most_a_thousand_jobs_and_four_megabytes(sizes: list[int], parts: list[int]) -> None:
    result = split_jobs(jobs_of(sizes))
    assert [len(part) for part in result] == parts
    assert [len(job.data) for part in result for job in part] == sizes


def test_an_idempotent_add_has_the_keys_and_arguments_of_plain_adds() -> None:
    jobs = [NewJob("mail", job_id, "send", b"{}", JobOptions()) for job_id in ("7", "8")]
    (once,) = add_jobs_once(KEYS, jobs, NOW_MS, IdempotentWrite("w1", 60_000))
    calls = [add_job(KEYS, job, NOW_MS) for job in jobs]
    assert calls[0].script is not None
    first = calls[0].script.key_count + 1
    job_args = [
        arg for job, call in zip(jobs, calls, strict=True) for arg in (job.id, KEYS.job(job.id), *call.args[first:])
    ]
    assert once.args == (first, KEYS.added_ids("w1"), *calls[0].args[1:first], 60_000, *job_args)


def test_a_pool_keeps_ten_idle_clients() -> None:
    pool = ClientPool(lambda: Client(Endpoint("redis://127.0.0.1:1/0", 1_000, 1_000), None))

    def take(count: int) -> list[SyncClient]:
        return [pool.client().__enter__() for _ in range(count)]

    lent = take(12)
    for client in lent:
        pool.put_back(client)
    assert {id(client) for client in take(10)} == {id(client) for client in lent[:10]}
    assert take(1)[0] not in lent


def test_a_malformed_job_is_treated_as_in_its_first_attempt() -> None:
    broken = RunningJob.placeholder("mail", "7", "no name")
    assert (broken.attempts_started, broken.attempts_made, broken.malformed) == (1, 0, True)


@pytest.mark.parametrize(
    ("error", "cross_slot"),
    [
        (ClusterCrossSlotError("Keys in request don't hash to the same slot"), True),
        (ResponseError("Script attempted to access a non local key in a cluster node"), True),
        (ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"), False),
    ],
)
def test_only_a_cross_slot_error_gets_advice_about_hash_tags(error: ResponseError, cross_slot: bool) -> None:
    assert (CROSS_SLOT in str(reply_error(error, "redis://server"))) == cross_slot


@pytest.mark.parametrize(("counted", "missing"), [(3, 1), (5, None), (9, None)])
def test_a_gap_is_counted_unless_the_stream_was_replaced(counted: int, missing: int | None) -> None:
    follower = Follower(KEYS, "1-0", "server")
    follower._count = counted
    gap = follower._gap("1-0", StreamInfo(2, "9-0", 6, deleted=False), [("8-0", {})])
    assert gap == StreamGap("1-0", "8-0", missing)


def test_a_reply_in_another_protocol_is_marked_as_such() -> None:
    error = connection_error(InvalidResponse("HTTP/1.1 400"), "redis://server", connecting=True)
    assert isinstance(error, BrokerUnavailableError)
    assert error.wrong_protocol


def budget(**settings: Any) -> RetryBudget:
    return RetryBudget(replace(CONFIG, **settings), [NewJob("mail", "7", "send", b"{}", JobOptions())])


def test_each_attempt_to_send_gets_half_of_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bulltask.transport.produce.mono_ms", lambda: 1_000)
    assert budget(publish_timeout_ms=8_000).next_deadline_ms() == 5_000
    assert budget(publish_timeout_ms=8_000, publish_retries=0).next_deadline_ms() == 9_000


def test_pauses_between_sends_are_not_shortened_without_a_publish_timeout() -> None:
    unlimited = budget(publish_timeout_ms=None, reconnect_delay_ms=100, reconnect_delay_max_ms=100)
    assert 80 <= unlimited.pause_ms(UNREACHABLE) <= 120


@pytest.mark.parametrize(("lifo", "push"), [(True, "RPUSH"), (False, "LPUSH")])
def test_lifo_selects_the_end_of_the_list_to_which_a_retried_job_is_added(lifo: bool, push: str) -> None:
    call = retry_job(KEYS, "7", "token", lifo=lifo, fields=[], now_ms=NOW_MS)
    assert push in call.args
    assert {"RPUSH", "LPUSH"} & set(call.args) == {push}


@pytest.mark.parametrize(("block_ms", "timeout_ms", "blocking_ms"), [(10_000, 10_000, 15_000), (10_000, 300, 10_300)])
def test_a_blocking_call_may_take_its_block_time_plus_up_to_5_seconds(
    block_ms: int, timeout_ms: int, blocking_ms: int
) -> None:
    endpoint = Endpoint("redis://localhost", 1_000, timeout_ms)
    assert endpoint.blocking(block_ms).command_timeout_ms == blocking_ms


def test_the_size_of_data_and_options_together_is_limited() -> None:
    options = JobOptions(headers=json.dumps({"trace": "x" * 1_000}))
    check_size(b"x" * 2_000, options, 20_000, "data")
    with pytest.raises(PayloadTooLargeError):
        check_size(b"x" * 19_500, options, 20_000, "data")
