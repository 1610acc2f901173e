"""One connection through a flaky proxy: two lanes, requests up and replies down."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from enum import Enum

from bulltask.testing.flaky_faults import MATCH_BYTES, Aftermath, Canned, Counts, Faults
from bulltask.testing.flaky_frames import Frames

__all__ = ["Link"]

CHUNK = 65_536
CHUNKS_HELD = 16
# What answers SUBSCRIBE and its like, once for each channel: a push in RESP3, an array in RESP2.
CONFIRMATION = re.compile(rb"[*>]3\r\n\$\d+\r\n[ps]?(un)?subscribe\r\n")
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER without time to linger: close() sends RST in place of FIN


class End(Enum):
    """How a sender stopped."""

    CLOSED = "closed"
    BROKEN = "broken"


class Link:
    """A client's connection and the connection to the server that belongs to it.

    Attributes:
        frozen: True when bytes vanish and nothing is closed any more.
        doomed: what to do once all replies that are due have been swallowed; ``None`` while replies pass.
        due: commands without an answer so far (their first 4 KiB), and the proxy's own replies in their places.
        task: runs until both connections have ended, and closes them.
    """

    def __init__(self, client: socket.socket, upstream: tuple[str, int], faults: Faults, counts: Counts) -> None:
        self.frozen = False
        self.doomed: Aftermath | None = None
        self.due: deque[bytes] = deque()
        self._client, self._upstream, self._faults, self._counts = client, upstream, faults, counts
        self._server = socket.socket(socket.AF_INET6 if ":" in upstream[0] else socket.AF_INET)
        self._hard = False
        self.task = asyncio.create_task(self._run())
        # No `finally` inside the task: one that is cancelled before its first step never gets there.
        self.task.add_done_callback(self._close)

    def reset(self) -> asyncio.Task[None]:
        """End both connections with RST. Returns the task that is done when they are closed."""
        self._hard = True
        self.task.cancel()
        return self.task

    def answered_by(self, reply: bytes, opaque: bool) -> bytes | None:
        """Return the command that ``reply`` answers; ``None`` when nobody asked (a push, a pub/sub message).

        Args:
            reply: a whole reply, or a chunk of an ``opaque`` stream, which answers all that came before it.
            opaque: whether the stream of replies is no RESP.
        """
        if not self.due or isinstance(self.due[0], Canned):
            return None
        if not opaque and not self._answers(reply, self.due[0]):
            return None
        command = self.due.popleft()
        while opaque and self.due and not isinstance(self.due[0], Canned):
            command += self.due.popleft()
        return command

    @staticmethod
    def _answers(reply: bytes, command: bytes) -> bool:
        if CONFIRMATION.match(reply):
            return b"subscribe" in command.lower()  # else it is the second channel's: one reply more than commands
        return not reply.startswith(b">")

    def canned(self) -> bytes:
        """Return the proxy's own replies whose turn has come."""
        replies = b""
        while self.due and isinstance(self.due[0], Canned):
            replies += self.due.popleft()
        return replies

    async def _run(self) -> None:
        try:
            for end in (self._client, self._server):
                end.setblocking(False)
                # Otherwise the kernel waits for more before it sends what is small, and puts pieces together again.
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._faults.open.wait()
            await asyncio.get_running_loop().sock_connect(self._server, self._upstream)
            up = RequestLane(self, self._client, self._server, self._faults, self._counts)
            down = ReplyLane(self, self._server, self._client, self._faults, self._counts)
            up.replies, down.requests = down, up
            async with asyncio.TaskGroup() as tasks:
                for lane in (up, down):
                    tasks.create_task(lane.read())
                    tasks.create_task(lane.write())
        except* OSError:
            self._hard = True  # one side is gone, or a fault wants it so: both learn it the hard way

    def _close(self, _: asyncio.Task[None]) -> None:
        for end in (self._client, self._server):
            if self._hard:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            end.close()


class Lane(ABC):
    """One direction of a link: a reader and a writer with a short queue between, so that waiting delays no reading."""

    carries_replies = False

    def __init__(
        self, link: Link, source: socket.socket, target: socket.socket, faults: Faults, counts: Counts
    ) -> None:
        self.link, self.source, self.target, self.faults, self.counts = link, source, target, faults, counts
        self.frames = Frames()
        self._queue: asyncio.Queue[tuple[float, bytes | End]] = asyncio.Queue(CHUNKS_HELD)
        self._held = False  # the writer has something in hand that is in the queue no more

    @property
    def idle(self) -> bool:
        """True when nothing is on its way, not even a part of a value."""
        return self._queue.empty() and not self._held and not self.frames.partial

    async def read(self) -> None:
        """Take in what the source sends, until it stops."""
        loop = asyncio.get_running_loop()
        item: bytes | End = b""
        while not isinstance(item, End):
            try:
                item = await loop.sock_recv(self.source, CHUNK) or End.CLOSED
            except OSError:
                item = End.BROKEN
            await self.put(item)

    async def put(self, item: bytes | End) -> None:
        """Queue bytes that came just now; no bytes at all only wake the writer up."""
        await self._queue.put((asyncio.get_running_loop().time(), item))

    async def write(self) -> None:
        """Pass the bytes on as the faults allow, and then the end of the stream.

        Raises:
            OSError: the link shall end with RST.
        """
        item: bytes | End = b""
        while item is not End.CLOSED or self.link.frozen:
            read_at, item = await self._queue.get()
            self._held = True
            await self.faults.hold(read_at)
            self._held = False
            if self.link.frozen:
                continue  # the end of the stream is swallowed as well: this loop then waits until the link is reset
            if item is End.BROKEN:
                raise ConnectionResetError("the sender has reset its connection")
            if isinstance(item, bytes):
                await self.handle(item)
        await self.send(self.frames.rest())
        self.target.shutdown(socket.SHUT_WR)

    @abstractmethod
    async def handle(self, data: bytes) -> None:
        """Do with ``data`` what the faults of single commands demand."""

    async def send(self, data: bytes | bytearray) -> None:
        """Write to the target, as fast and in such pieces as the faults allow."""
        loop, view = asyncio.get_running_loop(), memoryview(data)
        while view and not self.link.frozen:
            size = self.faults.piece(len(view), reply=self.carries_replies)
            await loop.sock_sendall(self.target, view[:size])
            await self.faults.pace(size, reply=self.carries_replies)
            view = view[size:]


class RequestLane(Lane):
    """From the client to the server."""

    replies: ReplyLane

    async def handle(self, data: bytes) -> None:
        """Pass commands on and note them as due; put an injected error in the place of those that it hits."""
        passed, answered = bytearray(), False
        for command in self.frames.feed(data):
            if self.faults.error.hits(command):
                answered = True
                self.link.due.append(self.faults.error_reply)
                self.counts.add("injected")
            else:
                self.link.due.append(command[:MATCH_BYTES])
                passed += command
        await self.send(passed)
        if answered:
            # Only the lane of replies writes to the client: an error must not overtake an earlier command's reply.
            await self.replies.put(b"")


class ReplyLane(Lane):
    """From the server to the client."""

    carries_replies = True
    requests: RequestLane

    async def handle(self, data: bytes) -> None:
        """Pair replies with their commands; pass them on, or lose or cut those that a fault hits."""
        link = self.link
        passed = bytearray(link.canned())
        for reply in self.frames.feed(data):
            command = link.answered_by(reply, self.frames.opaque)
            if command is not None and link.doomed is None and self.faults.drop.hits(command):
                link.doomed = self.faults.then
                self.counts.add("dropped")
            elif command is not None and link.doomed is None and self.faults.cut.hits(command):
                await self.send(passed + reply[: self.faults.cut_bytes])
                raise ConnectionResetError("the reply ends here")
            canned = link.canned()
            if link.doomed is None:
                passed += reply + canned
        await self.send(passed)
        # Not before: a reset takes from the server what it has not read yet, and a transaction would not run at all.
        if link.doomed is not None and not link.due and self.requests.idle:
            if link.doomed == "reset":
                raise ConnectionResetError("the reply was lost")
            link.frozen = True
