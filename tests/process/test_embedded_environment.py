"""The environment with which real servers are started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis

from bulltask.testing.server import RedisServer
from tests.support.programs import run_program

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the environment of a process is read in /proc"),
]

USER = "import sys; from bulltask.embedded import resolve_url; print(resolve_url('embedded://')); sys.stdin.read()"
CACHE = "glibc.malloc.tcache_count=512"


def tunables(pid: int) -> list[str]:
    """glibc's settings of a process; it takes the colons away between them when it has read them."""
    return re.findall(r"glibc\.[\w.]+=\d+", Path(f"/proc/{pid}/environ").read_text())


@pytest.mark.parametrize(
    ("mine", "servers"),
    [
        ("", [CACHE]),
        ("glibc.malloc.arena_max=1", ["glibc.malloc.arena_max=1", CACHE]),
        ("glibc.malloc.tcache_count=9", ["glibc.malloc.tcache_count=9"]),
    ],
)
def test_a_server_keeps_more_small_memory_at_hand_unless_the_user_has_set_how_much(
    tmp_path, monkeypatch, mine, servers
):
    monkeypatch.setenv("GLIBC_TUNABLES", mine)
    with RedisServer.start(tmp_path) as server:
        assert tunables(server.pid) == servers


def test_so_does_the_server_of_all_who_use_embedded_urls(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    with run_program(USER) as program, redis.Redis.from_url(program.read_line()) as client:
        assert tunables(int(client.info()["process_id"])) == [CACHE]
