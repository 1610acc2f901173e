"""A connection through a flaky proxy, with one direction for requests and one for replies."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from enum import Enum

from bulltask.testing.flaky_faults import MATCH_BYTES, AfterLoss, Counters, Faults, InjectedReply
from bulltask.testing.flaky_frames import Frames

__all__ = ["ProxiedConnection"]

CHUNK = 65_536
CHUNKS_HELD = 16
# The reply to SUBSCRIBE and similar commands, once per channel: a push in RESP3, an array in RESP2.
CONFIRMATION = re.compile(rb"[*>]3\r\n\$\d+\r\n[ps]?(un)?subscribe\r\n")
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER with a time of 0: close() sends RST instead of FIN


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
        self._queue: asyncio.Queue[tuple[float, bytes | End]] = asyncio.Queue(CHUNKS_HELD)
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
        await self._queue.put((asyncio.get_running_loop().time(), item))

    async def write(self) -> None:
        """Pass the bytes on as the faults allow, and then the end of the stream.

        Raises:
            OSError: The connection must end with RST.
        """
        item: bytes | End = b""
        while item is not End.CLOSED or self.connection.frozen:
            read_at, item = await self._queue.get()
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
