"""The baseline: BullMQ's scripts, called by a client that does nothing else.

A framework that runs jobs with these scripts cannot be much faster than this: requests are packed by hand, hiredis
parses the replies, and there is no renewal of locks, no error handling and no retry.

``baseline_app.py PROCESSES BATCH`` runs a worker; each process acquires and finishes ``BATCH`` jobs per round trip.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hiredis
import msgpack

from benchmarks.apps.counter import count

SCRIPTS = Path(__file__).parent.parent.parent / "bulltask/lua/official"
PREFIX = "bull:{default}:"
ACQUIRE = "wait active prioritized events stalled limiter delayed paused meta pc marker".split()
FINISH = "wait active prioritized events stalled limiter delayed paused meta pc completed".split()
LOCK_MS = 30_000


class Connection:
    """A connection to Redis that loads each script once."""

    def __init__(self) -> None:
        url = urlsplit(os.environ["BENCH_BROKER"])
        self._socket = socket.create_connection((url.hostname, url.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()

    def load(self, name: str) -> bytes:
        """Load an official script; return its hash."""
        source = (SCRIPTS / name).read_bytes()
        self.call([pack("SCRIPT", "LOAD", source)])
        return hashlib.sha1(source).hexdigest().encode()

    def call(self, requests: Sequence[bytes]) -> list[Any]:
        """Send all requests, then return their replies."""
        self._socket.sendall(b"".join(requests))
        replies: list[Any] = []
        while len(replies) < len(requests):
            reply = self._reader.gets()
            if reply is False:
                self._reader.feed(self._socket.recv(1 << 18))
            elif isinstance(reply, Exception):
                raise reply
            else:
                replies.append(reply)
        return replies


def pack(*args: object) -> bytes:
    """Return a request in Redis' protocol."""
    encoded = [arg if isinstance(arg, bytes) else str(arg).encode() for arg in args]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in encoded)


def keys(names: Sequence[str]) -> list[str]:
    return [PREFIX + name for name in names]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Producer:
    """Adds jobs without ids and options."""

    def __init__(self) -> None:
        self._connection = Connection()
        names = keys("wait paused meta id completed delayed active events marker".split())
        self._head = ["EVALSHA", self._connection.load("addStandardJob-9.lua"), len(names), *names]

    def add(self, indexes: Sequence[int]) -> None:
        self._connection.call([self._request(index) for index in indexes])

    def _request(self, index: int) -> bytes:
        now = now_ms()
        packed = msgpack.packb([PREFIX, "", "noop", now, None, None, None])
        options = msgpack.packb({"attempts": 0, "timestamp": now})
        return pack(*self._head, packed, json.dumps({"index": index}), options, now)


class Consumer:
    """Runs all jobs, ``batch`` per round trip; each call that finishes a job also acquires the next one."""

    def __init__(self, batch: int) -> None:
        self._connection = Connection()
        self._tokens = [f"{os.getpid()}:{number}" for number in range(batch)]
        names = keys(ACQUIRE)
        self._acquire = ["EVALSHA", self._connection.load("moveToActive-11.lua"), len(names), *names, PREFIX]
        self._finish = ["EVALSHA", self._connection.load("moveToFinished-14.lua"), len(FINISH) + 3, *keys(FINISH)]
        lock = {"limiter": None, "lockDuration": LOCK_MS}
        self._locks = {token: msgpack.packb({"token": token, **lock}) for token in self._tokens}
        finish = {"keepJobs": {"count": -1}, "attempts": 1, "attemptsMade": 0, "maxMetricsSize": "", **lock}
        flags = {"fpof": False, "cpof": False, "idof": False}
        self._options = {token: msgpack.packb({"token": token, **finish, **flags}) for token in self._tokens}

    def run(self) -> None:
        while True:
            requests = [pack(*self._acquire, now_ms(), self._locks[token]) for token in self._tokens]
            self._run_jobs(self._connection.call(requests))
            self._connection.call([pack("BZPOPMIN", f"{PREFIX}marker", 1)])

    def _run_jobs(self, replies: list[Any]) -> None:
        tokens = self._tokens
        # A reply is the job's fields and its id; the fields are 0 if no job is waiting.
        while jobs := [(reply, token) for reply, token in zip(replies, tokens, strict=True) if reply and reply[0]]:
            requests = [self._run_job(reply[0], reply[1].decode(), token) for reply, token in jobs]
            replies, tokens = self._connection.call(requests), [token for _, token in jobs]

    def _run_job(self, fields: list[bytes], job: str, token: str) -> bytes:
        index = json.loads(fields[fields.index(b"data") + 1])["index"]
        count(index)
        names = (PREFIX + job, f"{PREFIX}metrics:completed", f"{PREFIX}marker")
        result = (job, now_ms(), "returnvalue", index, "completed", "1", PREFIX, self._options[token])
        return pack(*self._finish, *names, *result)


def send(index: int) -> None:
    _producer().add([index])


def send_many(indexes: Sequence[int]) -> None:
    _producer().add(indexes)


_producers: list[Producer] = []


def _producer() -> Producer:
    if not _producers:
        _producers.append(Producer())
    return _producers[0]


def work(processes: int, batch: int) -> None:
    """Run the worker's processes until SIGTERM."""
    pids = [_fork(lambda: Consumer(batch).run()) for _ in range(processes)]

    def stop(*_: object) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    for _ in pids:
        os.wait()


def _fork(run: Callable[[], None]) -> int:
    pid = os.fork()
    if not pid:
        try:
            run()
        finally:
            os._exit(1)
    return pid


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]))
