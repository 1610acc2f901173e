"""Event streams in Redis that grow and are trimmed, deleted and recreated, and the entries that a reader can count."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import redis

from bulltask.spark.source.offsets import BEGINNING, StreamId

__all__ = ["Generation", "RandomStreams"]


@dataclass
class Generation:
    """One generation of a queue's stream: from its first entry until it is deleted.

    Attributes:
        ids: The ids of all entries that were added.
        known: The number of entries when a reader last read the stream's state.
        is_known: Whether a reader has read the state of this stream.
    """

    ids: list[StreamId] = field(default_factory=list)
    known: int = 0
    is_known: bool = False


class RandomStreams:
    """Changes the streams of some queues at random, and records every entry.

    Args:
        client: A client for the tests' server.
        rng: The source of randomness.
    """

    def __init__(self, client: redis.Redis, rng: random.Random) -> None:
        self._client, self._rng, self._ms = client, rng, 1_000
        self.generations: dict[str, list[Generation]] = {}
        self.deleted = 0

    def change_one(self) -> None:
        """Make one random change to one queue."""
        queue = self._rng.choice(list(self.generations))
        self._rng.choice([self.add, self.add, self.add, self.trim, self.trim, self.delete])(queue)

    def create_queue(self, queue: str) -> None:
        """Create a queue, usually with some events."""
        self.generations[queue] = [Generation()]
        self.add(queue)
        self.generations[queue][0].is_known = True  # no reader can confuse it with an older generation

    def add(self, queue: str) -> None:
        """Add up to eight events in one or several milliseconds, sometimes with BullMQ's trimming."""
        generation, rng = self.generations[queue][-1], self._rng
        with self._client.pipeline(transaction=False) as pipe:
            pipe.hset(_key(queue, "meta"), "opts.maxLenEvents", "10000")
            for number in range(rng.randrange(9)):
                self._ms += rng.randrange(3)
                last = generation.ids[-1] if generation.ids else BEGINNING
                entry = StreamId(self._ms, last.seq + 1 if last.ms == self._ms else 0)
                max_length = rng.randrange(12) if generation.is_known and rng.random() < 0.1 else None
                fields = {"event": "stalled", "jobId": str(number)}
                pipe.xadd(_key(queue), fields, id=str(entry), maxlen=max_length, approximate=False)  # type: ignore[arg-type]
                generation.ids.append(entry)
            pipe.execute()

    def trim(self, queue: str) -> None:
        """Remove the oldest entries, unless no reader has seen this generation yet."""
        if self.generations[queue][-1].is_known:
            self._client.xtrim(_key(queue), maxlen=self._rng.randrange(10), approximate=False)

    def delete(self, queue: str) -> None:
        """Delete the stream, sometimes the whole queue; usually a new generation follows immediately."""
        self._client.delete(_key(queue))
        self._start_generation(queue)
        if self._rng.random() < 0.3:
            self._client.delete(_key(queue, "meta"))
        if self._rng.random() < 0.7:
            self.add(queue)

    def obliterate(self, queue: str) -> None:
        """Delete the whole queue."""
        self._client.delete(_key(queue), _key(queue, "meta"))
        self._start_generation(queue)

    def _start_generation(self, queue: str) -> None:
        if self.generations[queue][-1].ids:
            self.deleted += 1
            self._ms += 1  # ids are unique, because the server's clock has advanced
            self.generations[queue].append(Generation())

    def current(self) -> dict[str, tuple[Generation, int]]:
        """Return each queue's current generation and number of entries."""
        return {queue: (generations[-1], len(generations[-1].ids)) for queue, generations in self.generations.items()}

    def mark_read(self, current: dict[str, tuple[Generation, int]], *, counting: bool = True) -> None:
        """Record what a reader has seen, unless the stream was deleted in the meantime."""
        for queue, (generation, count) in current.items():
            if generation is self.generations[queue][-1]:
                generation.is_known = generation.is_known or count > 0
                generation.known = max(generation.known, count) if counting else generation.known

    def lost_unread(self, queue: str) -> int:
        """Return the number of entries that were deleted with their stream before any reader could see them."""
        return sum(len(generation.ids) - generation.known for generation in self.generations[queue][:-1])

    def added(self, queue: str) -> list[StreamId]:
        """Return the ids of all entries that were added, in order."""
        return [entry for generation in self.generations[queue] for entry in generation.ids]

    def seen(self, queue: str) -> Iterator[StreamId]:
        """Yield the ids of the entries that a reader may have seen."""
        for generation in self.generations[queue]:
            yield from (
                generation.ids if generation is self.generations[queue][-1] else generation.ids[: generation.known]
            )


def _key(queue: str, name: str = "events") -> str:
    return f"bull:{{{queue}}}:{name}"
