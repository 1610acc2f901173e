"""Real event streams that grow and are trimmed, deleted and recreated; and what a reader can know of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import redis

from bulltask.spark.source.offsets import BEGINNING, StreamId

__all__ = ["Life", "Streams"]


@dataclass
class Life:
    """One stream of a queue, from its first entry until it is deleted.

    Attributes:
        ids: of all entries that were ever added.
        known: how many of them were there when a reader looked last.
        looked: a reader has seen this stream.
    """

    ids: list[StreamId] = field(default_factory=list)
    known: int = 0
    looked: bool = False


class Streams:
    """Changes the streams of some queues as BullMQ, its users and its enemies would; remembers every entry.

    Args:
        client: of the server, which is the tests' own.
        chance: decides.
    """

    def __init__(self, client: redis.Redis, chance: random.Random) -> None:
        self._client, self._chance, self._ms = client, chance, 1_000
        self.lives: dict[str, list[Life]] = {}
        self.deleted = 0

    def disturb(self) -> None:
        """Do one thing to one queue."""
        queue = self._chance.choice(list(self.lives))
        self._chance.choice([self.add, self.add, self.add, self.trim, self.trim, self.delete])(queue)

    def appear(self, queue: str) -> None:
        """Let there be a queue, mostly with some events."""
        self.lives[queue] = [Life()]
        self.add(queue)
        self.lives[queue][0].looked = True  # there is no other one

    def add(self, queue: str) -> None:
        """Add up to eight events of one or several milliseconds, trimming as BullMQ does, or not."""
        life, chance = self.lives[queue][-1], self._chance
        with self._client.pipeline(transaction=False) as pipe:
            pipe.hset(_key(queue, "meta"), "opts.maxLenEvents", "10000")
            for number in range(chance.randrange(9)):
                self._ms += chance.randrange(3)
                last = life.ids[-1] if life.ids else BEGINNING
                entry = StreamId(self._ms, last.seq + 1 if last.ms == self._ms else 0)
                most = chance.randrange(12) if life.looked and chance.random() < 0.1 else None
                words = {"event": "stalled", "jobId": str(number)}
                pipe.xadd(_key(queue), words, id=str(entry), maxlen=most, approximate=False)  # type: ignore[arg-type]
                life.ids.append(entry)
            pipe.execute()

    def trim(self, queue: str) -> None:
        """Take the oldest entries away; not of a stream that looks like another one that was read so far."""
        if self.lives[queue][-1].looked:
            self._client.xtrim(_key(queue), maxlen=self._chance.randrange(10), approximate=False)

    def delete(self, queue: str) -> None:
        """Delete the stream, sometimes the whole queue; mostly another one comes at once."""
        self._client.delete(_key(queue))
        self._gone(queue)
        if self._chance.random() < 0.3:
            self._client.delete(_key(queue, "meta"))
        if self._chance.random() < 0.7:
            self.add(queue)

    def obliterate(self, queue: str) -> None:
        """Delete the whole queue."""
        self._client.delete(_key(queue), _key(queue, "meta"))
        self._gone(queue)

    def _gone(self, queue: str) -> None:
        if self.lives[queue][-1].ids:
            self.deleted += 1
            self._ms += 1  # an id is given once, as the server's clock has moved on
            self.lives[queue].append(Life())

    def looking(self) -> dict[str, tuple[Life, int]]:
        """What a look finds that is taken now."""
        return {queue: (lives[-1], len(lives[-1].ids)) for queue, lives in self.lives.items()}

    def looked(self, found: dict[str, tuple[Life, int]], *, counting: bool = True) -> None:
        """A reader has looked, and perhaps counted; of streams deleted since then nothing is certain."""
        for queue, (life, there) in found.items():
            if life is self.lives[queue][-1]:
                life.looked = life.looked or there > 0
                life.known = max(life.known, there) if counting else life.known

    def unknown(self, queue: str) -> int:
        """How many entries were gone with their stream before any reader can have seen them."""
        return sum(len(life.ids) - life.known for life in self.lives[queue][:-1])

    def added(self, queue: str) -> list[StreamId]:
        """All that were ever added, in their order."""
        return [entry for life in self.lives[queue] for entry in life.ids]

    def seen(self, queue: str) -> Iterator[StreamId]:
        """Those of them that a reader can have seen."""
        for life in self.lives[queue]:
            yield from life.ids if life is self.lives[queue][-1] else life.ids[: life.known]


def _key(queue: str, name: str = "events") -> str:
    return f"bull:{{{queue}}}:{name}"
