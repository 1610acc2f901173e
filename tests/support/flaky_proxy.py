"""A TCP proxy that breaks connections to Redis on command, for tests of error handling.

::

    with FlakyProxy("127.0.0.1", 6379) as proxy:
        app = App("shop", broker_url=f"redis://127.0.0.1:{proxy.port}/0")
        proxy.drop_replies(10, every=3, match="evalsha")  # every third script runs, but its reply is lost
        for n in range(30):
            app.send_task("add", kwargs={"x": n, "y": 1})
        assert proxy.dropped == 10

Several faults can be active at the same time, such as ``latency`` and ``drop_replies``; ``pass_all`` ends all of them.
A method returns when its fault is active, so the fault applies to the next byte that the test sends.

``drop_replies``, ``partial_reply`` and ``inject_error`` apply to a command and its reply. The proxy parses RESP2 and
RESP3, and pairs the n-th reply with the n-th command. Pushes (RESP3) and pub/sub messages (RESP2) are not replies and
are never affected. If the stream is not RESP (TLS, inline commands), these faults apply to chunks as ``recv`` returns
them. A chunk of replies then belongs to all chunks that were sent before it.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Literal, Self

from bulltask.embedded.server import STARTED_HERE
from bulltask.jobs.clock import Duration, timeout, to_ms
from bulltask.jobs.errors import BulltaskError, ConfigError

__all__ = ["FlakyProxy", "Frames"]

NO_LIMIT = 2**63
AfterLoss = Literal["reset", "freeze"]
MATCH_BYTES = 4_096
PIECES_PER_SECOND = 20  # at a limited bandwidth, data is written in pieces that take a twentieth of a second
CHUNK = 65_536
BYTES_HELD = 16 * CHUNK
# The reply to SUBSCRIBE and similar commands, once per channel: a push in RESP3, an array in RESP2.
CONFIRMATION = re.compile(rb"[*>]3\r\n\$\d+\r\n[ps]?(un)?subscribe\r\n")
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER with a time of 0: close() sends RST instead of FIN
STRINGS = frozenset(b"$=!")  # length, then that many bytes
PARTS = {ord("*"): 1, ord("~"): 1, ord(">"): 1, ord("%"): 2, ord("|"): 2}  # values per counted element
KINDS = frozenset(b"+-:_#,(") | STRINGS | PARTS.keys()
ATTRIBUTE = ord("|")


class FlakyProxy:
    """A TCP proxy on 127.0.0.1, in a separate thread, for one server; its faults can be switched on and off.

    It is a context manager. Between ``start()`` and ``close()``, methods may be called from any thread.

    Do not fork (without exec) while the proxy is running. A forked process inherits the proxy's sockets, so ``reset``
    would close a connection only after that process has exited. Fork before the start, or start workers as programs.

    Args:
        host: The server's address.
        port: The server's port.
        seed: Seed of the random numbers for ``drop_replies(probability=…)``.

    Attributes:
        host: Address that the proxy listens on, 127.0.0.1.
        port: Its port, assigned by the operating system; reserved while connections are refused.
    """

    def __init__(self, host: str, port: int, *, seed: int = 0) -> None:
        self.host = "127.0.0.1"
        self.port = 0
        self._upstream = (host, port)
        self._rng = random.Random(seed)
        self._faults = Faults()
        self._counts = Counters()
        self._connections: set[ProxiedConnection] = set()
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # Start and end

    def start(self) -> Self:
        """Listen, and pass everything on; return the proxy. A second call does nothing."""
        if self._loop is None:
            # Bound but never listening, so that no other process gets the port while connections are refused.
            self._holder, self._listener = _bind_pair(self.host)
            self.port = self._holder.getsockname()[1]
            STARTED_HERE.add(self.port)  # a test's app may use it
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="flaky-proxy", daemon=True)
            self._thread.start()
            self.accept()
        return self

    def close(self) -> None:
        """Reset every connection and stop the thread; a second call does nothing."""
        if self._loop is not None:
            self._run(self._stop_listening())
            self._run(self._reset())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._holder.close()
            self._loop = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # Faults of whole connections

    def pass_all(self) -> None:
        """End every fault: accept and pass on everything. Frozen connections stay frozen."""
        self._change(self._faults.clear)
        self.accept()

    def latency(self, seconds: Duration) -> None:
        """Delay every byte by ``seconds`` in each direction, which delays a round trip by twice that time."""
        self._change(partial(setattr, self._faults, "latency_ms", to_ms(seconds, "latency")))

    def bandwidth(self, bytes_per_second: int, *, replies_only: bool = False) -> None:
        """Limit the bytes per second, per connection and direction.

        Args:
            bytes_per_second: The limit.
            replies_only: Do not slow down commands.
        """
        limit = _check_positive("bytes_per_second", bytes_per_second)
        self._change(partial(self._faults.throttle, limit, replies_only))

    def slice(self, size: int) -> None:
        """Write at most ``size`` bytes at a time, so that readers receive values in parts."""
        self._change(partial(setattr, self._faults, "slice", _check_positive("size", size)))

    def blackhole(self) -> None:
        """Stall every connection, old and new, until ``pass_all``, which delivers what was sent in between.

        New connections succeed, because the kernel accepts them for the proxy, but receive nothing.
        """
        self._change(self._faults.open.clear)

    def freeze(self) -> None:
        """Freeze all current connections forever: their bytes are dropped, but they are not closed. New ones work.

        The connections to the server stay open, too. Data that the server still sends, such as a popped job, is lost.
        """
        self._change(self._freeze)

    def reset(self) -> None:
        """End all connections, including frozen ones, with RST: "connection reset by peer"."""
        self._run(self._reset())

    def refuse(self) -> None:
        """Refuse new connections until ``accept`` or ``pass_all``; open connections stay open (see ``reset``)."""
        self._run(self._stop_listening())

    def accept(self) -> None:
        """Accept connections again, on the same port."""
        self._run(self._listen())

    # Faults of individual commands

    def drop_replies(
        self,
        count: int | None = None,
        *,
        every: int = 1,
        probability: float = 1.0,
        match: str = "",
        then: AfterLoss = "reset",
    ) -> None:
        """Execute commands but lose their replies, together with the connection.

        The proxy waits for the complete reply, so the command was executed. Commands that the client sent later (the
        rest of a pipeline) are also executed, and their replies are lost. The connection ends when no more data is in
        transit.

        Args:
            count: Number of replies to lose, ``None`` for no limit.
            every: Lose only every n-th reply.
            probability: Probability of losing each of them.
            match: Only commands that contain this text in their first 4 KiB, ignoring case. By default, all commands,
                including the handshake of a new connection (HELLO, CLIENT SETINFO).
            then: ``reset`` the connection, or ``freeze`` it, so that the client waits until its timeout.

        Raises:
            ConfigError: A number is out of range.
        """
        if not 0 <= probability <= 1:
            raise ConfigError(f"probability must be from 0 to 1, not {probability!r}")
        commands = CommandFilter(_limit(count), _check_positive("every", every), probability, match, self._rng)
        self._change(lambda: self._faults.lose_replies(commands, then))

    def partial_reply(self, n_bytes: int, count: int | None = 1, *, match: str = "") -> None:
        """Pass only the first ``n_bytes`` of a reply, then reset the connection.

        The command was executed; it is undefined whether later commands in a pipeline were.

        Args:
            n_bytes: Number of bytes that the client receives.
            count: Number of replies to truncate, ``None`` for no limit.
            match: As in ``drop_replies``.

        Raises:
            ConfigError: A number is out of range.
        """
        commands = CommandFilter(_limit(count), match=match)
        _check_positive("n_bytes", n_bytes)
        self._change(lambda: self._faults.cut_replies(commands, n_bytes))

    def inject_error(self, message: str, count: int | None = 1, *, match: str = "") -> None:
        """Reply to commands with an error instead of passing them to the server.

        Args:
            message: The error, as in ``"READONLY You can't write against a read only replica."``; a leading ``-`` is
                allowed.
            count: Number of commands, ``None`` for no limit.
            match: As in ``drop_replies``.

        Raises:
            ConfigError: ``message`` is empty or has several lines, or ``count`` is out of range.
        """
        text = message.removeprefix("-")
        if not text.strip() or "\r" in text or "\n" in text:
            raise ConfigError(f"an error reply is one line of text, not {message!r}")
        self.inject_reply(f"-{text}\r\n".encode(), count, match=match)

    def inject_reply(self, reply: bytes, count: int | None = 1, *, match: str = "") -> None:
        """Reply to commands with any bytes instead of passing them on, such as a proxy's error page.

        Args:
            reply: The bytes that the client receives.
            count: Number of commands, ``None`` for no limit.
            match: As in ``drop_replies``.

        Raises:
            ConfigError: ``count`` is out of range.
        """
        commands, injected = CommandFilter(_limit(count), match=match), InjectedReply(reply)
        self._change(lambda: self._faults.answer(commands, injected))

    # Counters

    @property
    def connections(self) -> int:
        """Number of connections that have been accepted since the start."""
        return self._counts["connections"]

    @property
    def dropped(self) -> int:
        """Number of replies that ``drop_replies`` has dropped; their commands have run."""
        return self._counts["dropped"]

    @property
    def injected(self) -> int:
        """Number of commands that received an injected error or reply."""
        return self._counts["injected"]

    def wait_for(self, condition: Callable[[FlakyProxy], bool], timeout: Duration = 10) -> None:
        """Wait until ``condition(proxy)`` is true; it is checked whenever one of the counters changes.

        Raises:
            TimeoutError: The condition did not become true in time.
        """
        self._counts.wait_for(lambda: condition(self), to_ms(timeout, "timeout"))

    # In the proxy's thread

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = _bind(self.host, self.port)
        self._listener.listen(512)
        asyncio.get_running_loop().add_reader(self._listener, self._accept_from, self._listener)

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            # close() alone would leave the port listening in processes that were forked since the start.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def _accept_from(self, listener: socket.socket) -> None:
        """Accept a connection in a callback of the loop: a cancelled task could leave an unclosed socket."""
        with suppress(BlockingIOError, ConnectionAbortedError):  # the client has disconnected
            client, _ = listener.accept()
            client.setblocking(False)
            self._serve(client)

    def _serve(self, client: socket.socket) -> None:
        connection = ProxiedConnection(client, self._upstream, self._faults, self._counts)
        self._connections.add(connection)
        connection.task.add_done_callback(lambda _: self._connections.discard(connection))
        self._counts.add("connections")

    def _freeze(self) -> None:
        for connection in self._connections:
            connection.frozen = True

    async def _reset(self) -> None:
        if self._connections:
            await asyncio.wait([connection.reset() for connection in self._connections])

    def _change(self, change: Callable[[], object]) -> None:
        async def call() -> None:
            change()

        self._run(call())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the proxy's thread and wait until it has taken effect."""
        if self._loop is None:
            work.close()
            raise BulltaskError("the flaky proxy is not running: use it inside `with FlakyProxy(host, port) as proxy:`")
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _bind_pair(host: str) -> tuple[socket.socket, socket.socket]:
    """Bind two sockets to one free port; try again if an outgoing connection takes the port between the two."""
    for attempts_left in reversed(range(10)):
        first = _bind(host, 0)
        try:
            return first, _bind(host, first.getsockname()[1])
        except OSError:
            first.close()
            if not attempts_left:
                raise
    raise AssertionError("unreachable")


def _bind(host: str, port: int) -> socket.socket:
    bound = socket.socket()
    # Two sockets share the port, one reserves it and one listens: Linux requires the first option, macOS the second.
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound


def _limit(count: int | None) -> int:
    return NO_LIMIT if count is None else _check_positive("count", count)


def _check_positive(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{name} must be 1 or more, not {value!r}")
    return value


# A client's connection through the proxy: one direction for requests and one for replies.


class End(Enum):
    """How a sender stopped."""

    CLOSED = "closed"
    BROKEN = "broken"


class ProxiedConnection:
    """A client's connection and its connection to the server.

    Attributes:
        frozen: True if bytes are dropped and no connection is closed anymore.
        after_loss: How the connection ends after all outstanding replies were dropped; ``None`` while replies pass.
        due: Commands without a reply so far (their first 4 KiB), or the proxy's replies to them.
        task: Runs until both connections have ended, and closes them.
    """

    def __init__(self, client: socket.socket, upstream: tuple[str, int], faults: Faults, counts: Counters) -> None:
        self.frozen = False
        self.after_loss: AfterLoss | None = None
        self.due: deque[bytes] = deque()
        self._client = client
        self._upstream = upstream
        self._faults = faults
        self._counts = counts
        self._server = socket.socket(socket.AF_INET6 if ":" in upstream[0] else socket.AF_INET)
        self._hard = False
        self.task = asyncio.create_task(self._run())
        # Not a `finally` inside the task, which would not run if the task is cancelled before its first step.
        self.task.add_done_callback(self._close)

    def reset(self) -> asyncio.Task[None]:
        """End both connections with RST; return the task that is done when they are closed."""
        self._hard = True
        self.task.cancel()
        return self.task

    def command_of(self, reply: bytes, opaque: bool) -> bytes | None:
        """Return the command that ``reply`` belongs to; ``None`` for a push or pub/sub message.

        Args:
            reply: A whole reply, or a chunk of an ``opaque`` stream, which answers all that came before it.
            opaque: The stream of replies is not RESP.
        """
        if not self.due or isinstance(self.due[0], InjectedReply):
            return None
        if not opaque and not self._answers(reply, self.due[0]):
            return None
        command = self.due.popleft()
        while opaque and self.due and not isinstance(self.due[0], InjectedReply):
            command += self.due.popleft()
        return command

    @staticmethod
    def _answers(reply: bytes, command: bytes) -> bool:
        if CONFIRMATION.match(reply):
            return b"subscribe" in command.lower()  # otherwise the reply is for a second channel of the same command
        return not reply.startswith(b">")

    def injected_replies(self) -> bytes:
        """Return the proxy's replies that are next in order."""
        replies = b""
        while self.due and isinstance(self.due[0], InjectedReply):
            replies += self.due.popleft()
        return replies

    async def _run(self) -> None:
        try:
            for end in (self._client, self._server):
                end.setblocking(False)
                # Otherwise the kernel delays small writes and joins pieces again.
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._faults.open.wait()
            await asyncio.get_running_loop().sock_connect(self._server, self._upstream)
            up = RequestLane(self, self._client, self._server, self._faults, self._counts)
            down = ReplyLane(self, self._server, self._client, self._faults, self._counts)
            up.replies = down
            down.requests = up
            async with asyncio.TaskGroup() as tasks:
                for direction in (up, down):
                    tasks.create_task(direction.read())
                    tasks.create_task(direction.write())
        except* OSError:
            self._hard = True  # one side is gone, or a fault requires it: reset both

    def _close(self, _: asyncio.Task[None]) -> None:
        for end in (self._client, self._server):
            if self._hard:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            end.close()


class Lane(ABC):
    """One direction of a connection: a reader and a writer with a short queue between them.

    The queue lets the reader continue while the writer waits because of a fault.
    """

    has_replies = False

    def __init__(
        self,
        connection: ProxiedConnection,
        source: socket.socket,
        target: socket.socket,
        faults: Faults,
        counts: Counters,
    ) -> None:
        self.connection = connection
        self.source = source
        self.target = target
        self.faults = faults
        self.counts = counts
        self.frames = Frames()
        self._queue: asyncio.Queue[tuple[float, bytes | End]] = asyncio.Queue()
        self._size = 0  # bytes in the queue; chunks may be small, so their number would limit the speed
        self._has_room = asyncio.Event()
        self._held = False  # the writer has removed bytes from the queue and has not sent them yet

    @property
    def idle(self) -> bool:
        """True if nothing is in transit, not even a part of a value."""
        return self._queue.empty() and not self._held and not self.frames.partial

    async def read(self) -> None:
        """Read from the source until it stops."""
        loop = asyncio.get_running_loop()
        item: bytes | End = b""
        while not isinstance(item, End):
            try:
                item = await loop.sock_recv(self.source, CHUNK) or End.CLOSED
            except OSError:
                item = End.BROKEN
            await self.put(item)

    async def put(self, item: bytes | End) -> None:
        """Queue bytes that have just arrived; empty bytes only wake up the writer."""
        read_at = asyncio.get_running_loop().time()
        while self._size >= BYTES_HELD:
            self._has_room.clear()
            await self._has_room.wait()
        self._size += _size(item)
        self._queue.put_nowait((read_at, item))

    async def write(self) -> None:
        """Pass the bytes on as the faults allow, and then the end of the stream.

        Raises:
            OSError: The connection must end with RST.
        """
        item: bytes | End = b""
        while item is not End.CLOSED or self.connection.frozen:
            read_at, item = await self._queue.get()
            self._size -= _size(item)
            self._has_room.set()
            self._held = True
            await self.faults.delay(read_at)
            self._held = False
            if self.connection.frozen:
                continue  # drop the end of the stream as well: the loop then waits until the connection is reset
            if item is End.BROKEN:
                raise ConnectionResetError("the sender has reset its connection")
            if isinstance(item, bytes):
                await self.handle(item)
        await self.send(self.frames.rest())
        self.target.shutdown(socket.SHUT_WR)

    @abstractmethod
    async def handle(self, data: bytes) -> None:
        """Apply the faults of individual commands to ``data``."""

    async def send(self, data: bytes | bytearray) -> None:
        """Write to the target, at the speed and in the chunks that the faults allow."""
        loop, view = asyncio.get_running_loop(), memoryview(data)
        while view and not self.connection.frozen:
            size = self.faults.chunk_size(len(view), reply=self.has_replies)
            await loop.sock_sendall(self.target, view[:size])
            await self.faults.pace(size, reply=self.has_replies)
            view = view[size:]


def _size(item: bytes | End) -> int:
    return len(item) if isinstance(item, bytes) else 0


class RequestLane(Lane):
    """From the client to the server."""

    replies: ReplyLane

    async def handle(self, data: bytes) -> None:
        """Pass commands on and record them as due; for commands that match the fault, record the injected error."""
        passed, has_injected = bytearray(), False
        for command in self.frames.feed(data):
            if self.faults.error.matches(command):
                has_injected = True
                self.connection.due.append(self.faults.error_reply)
                self.counts.add("injected")
            else:
                self.connection.due.append(command[:MATCH_BYTES])
                passed += command
        await self.send(passed)
        if has_injected:
            # Only the replies' direction writes to the client: an error must not overtake an earlier command's reply.
            await self.replies.put(b"")


class ReplyLane(Lane):
    """From the server to the client."""

    has_replies = True
    requests: RequestLane

    async def handle(self, data: bytes) -> None:
        """Match replies with their commands; pass them on, or lose or cut replies that match a fault."""
        connection = self.connection
        passed = bytearray(connection.injected_replies())
        for reply in self.frames.feed(data):
            command = connection.command_of(reply, self.frames.opaque)
            if command is not None and connection.after_loss is None and self.faults.drop.matches(command):
                connection.after_loss = self.faults.then
                self.counts.add("dropped")
            elif command is not None and connection.after_loss is None and self.faults.cut.matches(command):
                await self.send(passed + reply[: self.faults.cut_bytes])
                raise ConnectionResetError("the reply ends here")
            injected = connection.injected_replies()
            if connection.after_loss is None:
                passed += reply + injected
        await self.send(passed)
        # Not earlier: a reset discards data that the server has not read yet, so a transaction would not be executed.
        if connection.after_loss is not None and not connection.due and self.requests.idle:
            if connection.after_loss == "reset":
                raise ConnectionResetError("the reply was lost")
            connection.frozen = True


# The active faults, and their counters.


class InjectedReply(bytes):
    """A reply that the proxy sends instead of the server."""


class Counters:
    """Counters that a test can wait for."""

    def __init__(self) -> None:
        self._values = {"connections": 0, "dropped": 0, "injected": 0}
        self._changed = threading.Condition()

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def add(self, name: str) -> None:
        """Increment a counter and wake up waiting threads."""
        with self._changed:
            self._values[name] += 1
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], timeout_ms: int) -> None:
        """Wait until ``condition()`` is true; it is checked after each change.

        Raises:
            TimeoutError: It did not become true in time.
        """
        with self._changed:
            if not self._changed.wait_for(condition, timeout_ms / 1000):
                raise TimeoutError(f"still not true after {timeout_ms} ms; the flaky proxy has counted {self._values}")


@dataclass
class CommandFilter:
    """The commands that a fault affects: every n-th command that contains ``match``, up to ``left`` commands.

    Attributes:
        left: How many more commands are affected; default: none.
        every: Affect only every n-th command.
        probability: Probability of affecting each of them.
        match: Text that the command's first 4 KiB must contain, ignoring case.
        rng: Random number generator for ``probability``.
        seen: Number of commands that matched so far.
    """

    left: int = 0
    every: int = 1
    probability: float = 1.0
    match: str = ""
    rng: random.Random = field(default_factory=random.Random)
    seen: int = 0

    def matches(self, command: bytes) -> bool:
        """Return whether the fault affects this command; call it once for each command."""
        if self.left <= 0 or self.match.lower().encode() not in command[:MATCH_BYTES].lower():
            return False
        self.seen += 1
        if self.seen % self.every or self.rng.random() >= self.probability:
            return False
        self.left -= 1
        return True


class Faults:
    """The active faults; used in the proxy's thread only."""

    def __init__(self) -> None:
        self.open = asyncio.Event()  # cleared: blackhole
        self._cleared = asyncio.Event()
        self.then: AfterLoss = "reset"
        self.clear()

    def clear(self) -> None:
        """End all faults, and wake up waiting connections."""
        self.latency_ms = 0
        self.bandwidth = 0
        self.slice = 0
        self.replies_only = False
        self.drop = CommandFilter()
        self.cut = CommandFilter()
        self.cut_bytes = 0
        self.error = CommandFilter()
        self.error_reply = InjectedReply()
        self.open.set()
        self._cleared.set()
        self._cleared = asyncio.Event()

    def lose_replies(self, commands: CommandFilter, then: AfterLoss) -> None:
        """Lose the replies to the given commands."""
        self.drop = commands
        self.then = then

    def cut_replies(self, commands: CommandFilter, n_bytes: int) -> None:
        """Pass only ``n_bytes`` of each reply to the given commands."""
        self.cut = commands
        self.cut_bytes = n_bytes

    def answer(self, commands: CommandFilter, reply: InjectedReply) -> None:
        """Answer the given commands with ``reply``."""
        self.error = commands
        self.error_reply = reply

    async def delay(self, read_at: float) -> None:
        """Wait until bytes that were read at ``read_at`` (the loop's clock, seconds) may be passed on."""
        await self._pause(read_at + self.latency_ms / 1000 - asyncio.get_running_loop().time())
        await self.open.wait()

    def throttle(self, bandwidth: int, replies_only: bool) -> None:
        """Limit the bytes per second."""
        self.bandwidth = bandwidth
        self.replies_only = replies_only

    def chunk_size(self, size: int, *, reply: bool) -> int:
        """Return how many of ``size`` bytes to write in one call."""
        limit = max(1, self.bandwidth // PIECES_PER_SECOND) if self._slow(reply) else size
        return min(size, limit, self.slice or size)

    def _slow(self, reply: bool) -> bool:
        return self.bandwidth > 0 and (reply or not self.replies_only)

    async def pace(self, size: int, *, reply: bool) -> None:
        """Wait for the time that the ``size`` bytes just written take at the limited bandwidth."""
        if self._slow(reply):
            await self._pause(size / self.bandwidth)
        elif self.slice:
            await asyncio.sleep(0)  # let the reader receive this piece alone
        await self.open.wait()

    async def _pause(self, seconds: float) -> None:
        if seconds > 0:
            with suppress(TimeoutError):
                async with timeout(seconds):
                    await self._cleared.wait()


# Redis' protocol.


class Frames:
    """Splits a byte stream into whole RESP2 and RESP3 values; any other stream into the chunks in which it arrives.

    Attributes:
        opaque: True once the stream is known not to be RESP (TLS, inline commands).
    """

    def __init__(self) -> None:
        self.opaque = False
        self._buffer = bytearray()
        self._at = 0
        self._missing = 1  # how far the first value was read, and how many of its parts are missing

    def feed(self, data: bytes) -> list[bytes]:
        """Return the values that ``data`` completes."""
        self._buffer += data
        values = []
        try:
            while not self.opaque and self._read_value():
                values.append(self._take(self._at))
        except ValueError:
            self.opaque = True
        return values + ([self.rest()] if self.opaque and self._buffer else [])

    @property
    def partial(self) -> bool:
        """True if a part of a value has arrived."""
        return bool(self._buffer)

    def rest(self) -> bytes:
        """Return the bytes of a value that will never be complete."""
        return self._take(len(self._buffer))

    def _take(self, size: int) -> bytes:
        value = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._at = 0
        self._missing = 1
        return value

    def _read_value(self) -> bool:
        while self._missing and self._read_part():
            pass
        return not self._missing

    def _read_part(self) -> bool:
        """Skip one header and its text; False if it has not arrived completely.

        Raises:
            ValueError: This is not RESP.
        """
        if self._at == len(self._buffer):
            return False
        kind = self._buffer[self._at]
        if kind not in KINDS:
            raise ValueError("not RESP")
        line_end = self._buffer.find(b"\r\n", self._at)
        if line_end < 0:
            return False
        counted = kind in STRINGS or kind in PARTS
        size = int(self._buffer[self._at + 1 : line_end]) if counted else 0
        end = line_end + 2 + (size + 2 if kind in STRINGS and size >= 0 else 0)
        if end > len(self._buffer):
            return False
        # An attribute precedes the value that it describes and does not count as that value.
        self._missing += PARTS.get(kind, 0) * max(size, 0) - (kind != ATTRIBUTE)
        self._at = end
        return True
