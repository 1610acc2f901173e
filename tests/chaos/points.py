"""Injection points of the process in which this module is imported: a supervisor and its forks, or a sender.

A point is a step and a side of it, such as ``("fetchNow:moveToActive", "before")``. A step is a call to Redis, named
after its script or command, or one of bulltask's methods in `METHODS`. At most one fault is injected in each cell of
the matrix: the variable ``CHAOS_POINT`` says where, and ``CHAOS_FAULT`` which one.

The points are patches, not a proxy, because a proxy cannot see which process a command comes from, cannot stop in the
middle of a pipeline on every topology, and cannot see shared memory.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import mmap
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import redis.asyncio.connection
import redis.connection

from bulltask.outbox import outbox
from bulltask.transport import redis_errors
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.call import Call
from bulltask.transport.client import Client
from bulltask.worker import child_pool, run
from bulltask.worker.slots import Slot, SlotState

__all__ = ["BUSY_S", "FAULTS", "LOCK_S", "METHODS", "STALLED_S", "install", "reach", "record"]

METHODS: Final[dict[str, tuple[str, SlotState | None]]] = {
    "reserve the slot": ("enter", SlotState.RESERVED),
    "write the job into the slot": ("activate", None),
    "store the outcome in the slot": ("end", None),
    "mark the slot as finishing": ("enter", SlotState.FINISHING),
    "free the slot": ("free", None),
}
"""Steps of a child that are not calls to Redis: methods of `Slot`, and the state that it enters."""

LOCK_S: Final = 1
STALLED_S: Final = 1
"""The settings ``lock_duration`` and ``stalled_interval`` of the workers."""

BUSY_S: Final = LOCK_S + 2 * STALLED_S + 0.5
"""How long a fault stops a process, or holds the GIL: without a renewed lock, its jobs would run a second time."""

_MEMORY: Final = 1 << 30


def record(what: str, **fields: object) -> None:
    """Append a line to the cell's journal, in one write; all processes use the same clock."""
    line = {"what": what, "at": time.monotonic(), "pid": os.getpid(), "parent": os.getppid(), **fields}
    os.write(_journal(), json.dumps(line).encode() + b"\n")


def reach(step: str, side: str) -> None:
    """Inject the fault if this is its point."""
    if _injector.is_due(step, side):
        _injector.inject()


def install(role: str) -> None:
    """Install the points in this process, which has the role ``supervisor`` or ``sender``."""
    _injector.role = role
    # A child that dies in its first second would be replaced a second after its start, which hides the recovery's time.
    child_pool._MIN_LIFETIME_MS = 0  # type: ignore[misc]
    _change_role(run, "run_child", "child")
    _change_role(outbox, "run_relays", "relay")
    _name_scripts()
    for step, (method, state) in METHODS.items():
        _surround(Slot, method, step, state)
    _surround(redis.connection.AbstractConnection, "connect", "connect")
    _surround_async(redis.asyncio.connection.AbstractConnection, "connect", "connect")
    _patch_round_trips()


@functools.cache
def _journal() -> int:
    return os.open(Path(os.environ["CHAOS_DIRECTORY"], "journal"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)


class _Injector:
    """Injects the cell's fault, once, when a process has reached its point ``CHAOS_NTH`` times.

    Attributes:
        role: The role of this process.
    """

    def __init__(self) -> None:
        self.role = ""
        self._role, self._step, self._side = os.environ.get("CHAOS_POINT", "||").split("|")
        self._nth, self._reached = int(os.environ.get("CHAOS_NTH", "1")), mmap.mmap(-1, 1)
        self._seen: set[tuple[str, str]] = set()
        self._fired = Path(os.environ.get("CHAOS_DIRECTORY", ""), "fired")

    def is_due(self, step: str, side: str) -> bool:
        """Whether this is the point, and its fault has not been injected yet. Records each point once per process."""
        if (step, side) not in self._seen:
            self._seen.add((step, side))
            record("point", role=self.role, step=step, side=side)
        if (self.role, step, side) != (self._role, self._step, self._side):
            return False
        self._reached[0] = min(255, self._reached[0] + 1)
        return self._reached[0] >= self._nth and self._is_first()

    def _is_first(self) -> bool:
        try:
            self._fired.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    @staticmethod
    def inject() -> None:
        """Inject the fault; returns only if the process survives it."""
        name = os.environ["CHAOS_FAULT"]
        record("fault", fault=name)
        FAULTS[name]()


def _exhaust_memory() -> None:
    """Raise the ``MemoryError`` of an allocation that exceeds the address space that the kernel allows."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY // 2, before[1]))
    try:
        bytearray(_MEMORY)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


FAULTS: Final[dict[str, Callable[[], object]]] = {
    "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "os._exit": lambda: os._exit(7),
    "segfault": lambda: ctypes.string_at(0),
    "MemoryError": _exhaust_memory,
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),  # the matrix sends SIGCONT
    "GIL held": lambda: ctypes.PyDLL(None).usleep(int(BUSY_S * 1_000_000)),
    "reply lost": lambda: None,  # the client below raises the error
}

_injector = _Injector()
_scripts: dict[str, str] = {}


def _name_of(packed: bytes) -> str:
    """Return the name of a packed call: its script's, or its command's."""
    words = packed.split(b"\r\n", 4)
    command = words[2].decode().upper()
    if not command.startswith("EVAL") or not words[3]:  # a check of permissions has no arguments
        return command
    size = int(words[3][1:])
    argument = words[4][:size]
    sha = argument.decode() if command.startswith("EVALSHA") else hashlib.sha1(argument).hexdigest()
    return _scripts.get(sha, "an outcome from a slot")  # another process has packed it


def _name_scripts() -> None:
    original = Call.__init__

    def initialize(self: Call[Any], *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.script is not None:
            _scripts[self.script.sha] = self.script.name

    Call.__init__ = initialize  # type: ignore[method-assign]


def _change_role(module: Any, function: str, role: str) -> None:
    original = getattr(module, function)

    def enter(*args: Any) -> Any:
        _injector.role = role
        _injector._seen.clear()
        return original(*args)

    setattr(module, function, enter)


def _surround(owner: type, method: str, step: str, state: SlotState | None = None) -> None:
    original = getattr(owner, method)

    def surrounded(*args: Any, **kwargs: Any) -> Any:
        if state is not None and args[1] is not state:
            return original(*args, **kwargs)
        reach(step, "before")
        result = original(*args, **kwargs)
        reach(step, "after")
        return result

    setattr(owner, method, surrounded)


def _surround_async(owner: type, method: str, step: str) -> None:
    original = getattr(owner, method)

    async def surrounded(*args: Any, **kwargs: Any) -> Any:
        reach(step, "before")
        result = await original(*args, **kwargs)
        reach(step, "after")
        return result

    setattr(owner, method, surrounded)


def _fault_in_round_trip(packed: Sequence[bytes]) -> tuple[int, str] | None:
    """Return how many calls of a round trip to make before the fault, and its side; ``None`` if there is none."""
    names = [_name_of(each) for each in packed]
    if names[-1] == "DISCARD":  # no call of this transaction is executed
        return (0, "before") if _injector.is_due("DISCARD", "before") else None
    for index, name in enumerate(names):
        for made, side in ((index, "before"), (index + 1, "after"), (len(packed), "lost")):
            if _injector.is_due(name, side):
                return made, side
    return None


def _patch_round_trips() -> None:
    """Make each call a point: before it is sent, after Redis has executed it, and with a lost reply."""
    original, original_async = Client._round_trip, AsyncClient._round_trip

    def round_trip(self: Client, connection: Any, packed: Sequence[bytes], between: Any = None) -> list[Any]:
        if (fault := _fault_in_round_trip(packed)) is None:
            return original(self, connection, packed, between)
        made, side = fault
        replies = original(self, connection, packed[:made], between) if made else []
        _injector.inject()
        if side == "lost":
            self.close()
            raise _lost_reply(self)
        return replies + (original(self, connection, packed[made:], between) if packed[made:] else [])

    async def async_round_trip(
        self: AsyncClient, connection: Any, packed: Sequence[bytes], deadline_ms: int | None = None
    ) -> list[Any]:
        if (fault := _fault_in_round_trip(packed)) is None:
            return await original_async(self, connection, packed, deadline_ms)
        made, side = fault
        replies = await original_async(self, connection, packed[:made], deadline_ms) if made else []
        _injector.inject()
        if side == "lost":
            await self._drop(ConnectionResetError(), only=connection)
            raise _lost_reply(self)
        return replies + (await original_async(self, connection, packed[made:], deadline_ms) if packed[made:] else [])

    Client._round_trip = round_trip  # type: ignore[method-assign]
    AsyncClient._round_trip = async_round_trip  # type: ignore[method-assign]


def _lost_reply(client: Client | AsyncClient) -> Exception:
    exc = ConnectionResetError("the matrix has lost the reply")
    return redis_errors.connection_error(exc, client._endpoint.safe_url, connecting=False)
