"""Calls are packed as hiredis packs them, even when parts of them come from the cache."""

from __future__ import annotations

import hiredis
import pytest

from bulltask.jobs.job import JobOptions, NewJob
from bulltask.transport.call import Arg, Call, QueueKeys, command, to_msgpack
from bulltask.transport.scripts.add import add_job
from bulltask.transport.scripts.move import FetchOptions, FinishOptions, find_by_token, move_to_finished, retry_job

KEYS = QueueKeys("bull", "{mail}", "mail")


def finish_call(job_id: str, value: bytes = b"5") -> Call[object]:
    ending = FinishOptions(True, value, {"count": -1}, 3)
    return move_to_finished(KEYS, job_id, FetchOptions("token", 30_000, "worker"), ending, fetch_next=True, now_ms=5)


def packed_by_hiredis(args: tuple[Arg, ...]) -> object:
    return hiredis.pack_command(args)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        finish_call("1"),
        finish_call("another", b'{"\xc3\xa4":1}'),
        add_job(KEYS, NewJob("mail", "7", "näme", b"{}", JobOptions()), 5),
        retry_job(KEYS, "1", "token", lifo=True, fields=["a", "b"], now_ms=5),
        find_by_token(KEYS, []),
        find_by_token(QueueKeys("böll", "q"), ["a", "b"]),
    ],
)
def test_a_script_call_is_packed_as_hiredis_packs_it(call: Call[object]) -> None:
    assert call.script is not None
    for _ in range(2):  # the second time the names are cached
        assert call.packed() == packed_by_hiredis(("EVALSHA", call.script.sha, *call.args))


def test_a_script_call_with_keys_only_is_packed() -> None:
    call = Call((2, "a", "b"), lambda reply: reply, find_by_token(KEYS, []).script)
    assert call.packed().startswith(b"*5\r\n")
    assert call.packed().endswith(b"$1\r\na\r\n$1\r\nb\r\n")


def test_a_plain_command_is_packed() -> None:
    assert command("SET", "k", 1, b"\xff").packed() == b"*4\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\n1\r\n$1\r\n\xff\r\n"


def test_an_id_that_is_not_utf8_is_packed_unchanged() -> None:
    assert b"$2\r\n\xff1\r\n" in finish_call(b"\xff1".decode("utf-8", "surrogateescape")).packed()


def test_bytes_are_packed_as_a_string_that_redis_can_read() -> None:
    assert to_msgpack(b"x") == to_msgpack("x") == b"\xa1x"
