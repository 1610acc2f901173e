--[[
  Retries a failed child job of a flow, even if its failure was ignored.

  BullMQ 5.62's reprocessJob mistakes the hash of ignored failures for a sorted set: after it has moved the job to the
  waiting jobs, it fails with an error, without an event, and the parent does not wait for the job again. Apart from
  that, this script has the same effect.

  KEYS[1]  job
  KEYS[2]  events
  KEYS[3]  failed
  KEYS[4]  wait
  KEYS[5]  meta
  KEYS[6]  paused
  KEYS[7]  active
  KEYS[8]  marker
  ARGV[1]  job id
  ARGV[2]  LPUSH, or RPUSH for a lifo job
  returns  1: done; -1: there is no such job; -3: it has not failed
  event    waiting
]]
local job, id = KEYS[1], ARGV[1]
if redis.call("EXISTS", job) == 0 then
  return -1
end
if redis.call("ZREM", KEYS[3], id) == 0 then
  return -3
end
redis.call("HDEL", job, "finishedOn", "processedOn", "failedReason")

local meta = redis.call("HMGET", KEYS[5], "paused", "concurrency", "opts.maxLenEvents")
local paused, concurrency, max_events = meta[1], meta[2], meta[3]
redis.call(ARGV[2], paused and KEYS[6] or KEYS[4], id)
if not paused and not (concurrency and redis.call("LLEN", KEYS[7]) >= tonumber(concurrency)) then
  redis.call("ZADD", KEYS[8], 0, "0")
end

local parent = redis.call("HGET", job, "parentKey")
if parent and redis.call("EXISTS", parent) == 1 then
  local removed = redis.call("ZREM", parent .. ":unsuccessful", job)
  if removed + redis.call("HDEL", parent .. ":failed", job) > 0 then
    redis.call("SADD", parent .. ":dependencies", job)
  end
end

if not max_events then
  max_events = 10000
  redis.call("HSET", KEYS[5], "opts.maxLenEvents", max_events)
end
redis.call("XADD", KEYS[2], "MAXLEN", "~", max_events, "*", "event", "waiting", "jobId", id, "prev", "failed")
return 1
