"""Real event streams that grow and are trimmed, deleted and recreated; and what a reader can know of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import redis

from bulltask.spark.source.offsets import BEGINNING, StreamId

__all__ = ["Generation", "Streams"]


@dataclass
class Generation:
    """One generation of a queue's stream: from its first entry until it is deleted.

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
        self.generations: dict[str, list[Generation]] = {}
        self.deleted = 0

    def disturb(self) -> None:
        """Do one thing to one queue."""
        queue = self._chance.choice(list(self.generations))
        self._chance.choice([self.add, self.add, self.add, self.trim, self.trim, self.delete])(queue)

    def appear(self, queue: str) -> None:
        """Let there be a queue, mostly with some events."""
        self.generations[queue] = [Generation()]
        self.add(queue)
        self.generations[queue][0].looked = True  # there is no other one

    def add(self, queue: str) -> None:
        """Add up to eight events of one or several milliseconds, trimming as BullMQ does, or not."""
        generation, chance = self.generations[queue][-1], self._chance
        with self._client.pipeline(transaction=False) as pipe:
            pipe.hset(_key(queue, "meta"), "opts.maxLenEvents", "10000")
            for number in range(chance.randrange(9)):
                self._ms += chance.randrange(3)
                last = generation.ids[-1] if generation.ids else BEGINNING
                entry = StreamId(self._ms, last.seq + 1 if last.ms == self._ms else 0)
                most = chance.randrange(12) if generation.looked and chance.random() < 0.1 else None
                words = {"event": "stalled", "jobId": str(number)}
                pipe.xadd(_key(queue), words, id=str(entry), maxlen=most, approximate=False)  # type: ignore[arg-type]
                generation.ids.append(entry)
            pipe.execute()

    def trim(self, queue: str) -> None:
        """Take the oldest entries away; not of a stream that looks like another one that was read so far."""
        if self.generations[queue][-1].looked:
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
        if self.generations[queue][-1].ids:
            self.deleted += 1
            self._ms += 1  # an id is given once, as the server's clock has moved on
            self.generations[queue].append(Generation())

    def looking(self) -> dict[str, tuple[Generation, int]]:
        """What a look finds that is taken now."""
        return {queue: (generations[-1], len(generations[-1].ids)) for queue, generations in self.generations.items()}

    def looked(self, found: dict[str, tuple[Generation, int]], *, counting: bool = True) -> None:
        """A reader has looked, and perhaps counted; of streams deleted since then nothing is certain."""
        for queue, (generation, there) in found.items():
            if generation is self.generations[queue][-1]:
                generation.looked = generation.looked or there > 0
                generation.known = max(generation.known, there) if counting else generation.known

    def unknown(self, queue: str) -> int:
        """How many entries were gone with their stream before any reader can have seen them."""
        return sum(len(generation.ids) - generation.known for generation in self.generations[queue][:-1])

    def added(self, queue: str) -> list[StreamId]:
        """All that were ever added, in their order."""
        return [entry for generation in self.generations[queue] for entry in generation.ids]

    def seen(self, queue: str) -> Iterator[StreamId]:
        """Those of them that a reader can have seen."""
        for generation in self.generations[queue]:
            yield from (
                generation.ids if generation is self.generations[queue][-1] else generation.ids[: generation.known]
            )


def _key(queue: str, name: str = "events") -> str:
    return f"bull:{{{queue}}}:{name}"
