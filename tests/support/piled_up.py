"""Queues in which jobs have piled up, filled by the server itself."""

from __future__ import annotations

from typing import Any, Final

from bulltask.transport.call import QueueKeys

__all__ = ["OLD_MS", "pile_up", "pile_up_schedulers"]

OLD_MS: Final = 1_600_000_000_000
"""When the jobs were added, and when the finished ones ended."""
_PER_CALL: Final = 5_000
_LISTS: Final = {"wait", "paused", "active"}
_FILL: Final = """
local base, state, first, last, at = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
for n = first, last do
  local id = "j" .. n
  redis.call("HSET", base .. id, "name", "n", "data", "{}", "opts", "{}", "timestamp", ARGV[5], "priority", 0)
  for field = 7, #ARGV, 2 do
    redis.call("HSET", base .. id, ARGV[field], ARGV[field + 1])
  end
  if ARGV[6] == "list" then
    redis.call("LPUSH", base .. state, id)
  elseif state == "delayed" then
    redis.call("ZADD", base .. state, string.format("%.0f", (at + n) * 4096), id)
  else
    redis.call("ZADD", base .. state, string.format("%.0f", at + n), id)
    redis.call("HSET", base .. id, "finishedOn", ARGV[5])
  end
end
"""
_FILL_SCHEDULERS: Final = """
local base, first, last, at = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
for n = first, last do
  local key = "s" .. n
  local id = "repeat:" .. key .. ":" .. at
  local opts = '{"repeat":{"every":60000,"count":1},"repeatJobKey":"' .. key .. '","jobId":"' .. id .. '"}'
  redis.call("ZADD", base .. "repeat", at, key)
  redis.call("HSET", base .. "repeat:" .. key, "name", "n", "every", 60000, "ic", 1)
  redis.call("HSET", base .. id, "name", "n", "data", "{}", "opts", opts, "timestamp", at, "priority", 0, "rjk", key)
  redis.call("ZADD", base .. "delayed", string.format("%.0f", at * 4096 + 4095), id)
end
"""


def pile_up(redis: Any, keys: QueueKeys, state: str, count: int, *, skipped: int = 0, **fields: str) -> None:
    """Add ``count`` old jobs ``j1``, ``j2`` … to a state, with these fields, after ``skipped`` ids.

    Active jobs have no lock.
    """
    kind, more = "list" if state in _LISTS else "set", [word for pair in fields.items() for word in pair]
    end = skipped + count
    for first in range(skipped + 1, end + 1, _PER_CALL):
        last = min(first + _PER_CALL - 1, end)
        redis.eval(_FILL, 1, keys.base + state, keys.base, state, first, last, OLD_MS, kind, *more)


def pile_up_schedulers(redis: Any, keys: QueueKeys, count: int) -> None:
    """Add ``count`` job schedulers whose next iterations were due at the same time, as those of a cron pattern are."""
    for first in range(1, count + 1, _PER_CALL):
        last = min(first + _PER_CALL - 1, count)
        redis.eval(_FILL_SCHEDULERS, 1, keys.repeat, keys.base, first, last, OLD_MS)
