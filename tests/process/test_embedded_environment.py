"""The environment in which embedded servers are started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis

from bulltask.testing.worker import RedisServer
from tests.support.programs import run_program

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not Path("/proc/self/environ").exists(), reason="needs /proc to read the environment of a process"
    ),
]

USER = "import sys; from bulltask.embedded import resolve_url; print(resolve_url('embedded://')); sys.stdin.read()"
CACHE = "glibc.malloc.tcache_count=512"


def tunables(pid: int) -> list[str]:
    """Return the glibc tunables of a process. glibc removes the colons between them when it has parsed them."""
    return re.findall(r"glibc\.[\w.]+=\d+", Path(f"/proc/{pid}/environ").read_text())


@pytest.mark.parametrize(
    ("user", "server_tunables"),
    [
        ("", [CACHE]),
        ("glibc.malloc.arena_max=1", ["glibc.malloc.arena_max=1", CACHE]),
        ("glibc.malloc.tcache_count=9", ["glibc.malloc.tcache_count=9"]),
    ],
)
def test_a_server_has_a_larger_malloc_cache_unless_the_user_has_set_its_size(
    tmp_path, monkeypatch, user, server_tunables
):
    monkeypatch.setenv("GLIBC_TUNABLES", user)
    with RedisServer.start(tmp_path) as server:
        assert tunables(server.pid) == server_tunables


def test_the_server_of_an_embedded_url_has_a_larger_malloc_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    with run_program(USER) as program, redis.Redis.from_url(program.read_line()) as client:
        assert tunables(int(client.info()["process_id"])) == [CACHE]
