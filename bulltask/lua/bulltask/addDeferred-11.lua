--[[
  Adds a deferred duplicate: a job that a newer BullMQ stores until the owner of its deduplication id finishes.

  With `keepLastIfActive` (BullMQ 5.72) the last job that is rejected as a duplicate while the owner is running is
  stored in a hash, and the script that finishes the owner adds it. The script that bulltask runs (5.65) does not read
  that hash, so the job would never run. Therefore, bulltask calls this script after BullMQ's. It does nothing if no job
  is stored, so it is safe to retry.

  KEYS[1]   the deferred duplicate
  KEYS[2]   owner of the deduplication id
  KEYS[3]   active
  KEYS[4]   wait
  KEYS[5]   paused
  KEYS[6]   prioritized
  KEYS[7]   pc
  KEYS[8]   delayed
  KEYS[9]   marker
  KEYS[10]  meta
  KEYS[11]  events
  ARGV[1]   key prefix of the queue, with the trailing colon
  ARGV[2]   id of the job that has finished
  ARGV[3]   now in milliseconds
  returns   id of the job that was added; "" if there was none
  event     added, then waiting or delayed
]]
local deferred, marker, events = KEYS[1], KEYS[9], KEYS[11]
local name, data, opts, id, parent_key, parent, dependencies, scheduler =
  unpack(redis.call("HMGET", deferred, "name", "data", "opts", "jid", "pk", "pd", "pdk", "rjk"))
if not (name and id) then
  return ""
end
-- If another job owns the deduplication id by now, the deferred duplicate is added when that job finishes.
local owner = redis.call("GET", KEYS[2])
if (owner and owner ~= ARGV[2]) or redis.call("EXISTS", ARGV[1] .. id) == 1 then
  return ""
end

local options = cjson.decode(opts)
local delay, priority = tonumber(options.delay) or 0, tonumber(options.priority) or 0
local job = ARGV[1] .. id
redis.call("HSET", job, "name", name, "data", data, "opts", opts, "timestamp", ARGV[3])
redis.call("HSET", job, "delay", delay, "priority", priority, "deid", options.de.id)
if scheduler then
  redis.call("HSET", job, "rjk", scheduler)
end
if parent_key then
  redis.call("HSET", job, "parentKey", parent_key, "parent", parent)
end
if dependencies then
  redis.call("SADD", dependencies, job)
end
redis.call("SET", KEYS[2], id)
redis.call("XADD", events, "*", "event", "added", "jobId", id, "name", name)

local meta = redis.call("HMGET", KEYS[10], "paused", "concurrency", "opts.maxLenEvents")
local paused, concurrency, max_events = meta[1], tonumber(meta[2]), meta[3] or 10000
if delay > 0 then
  -- A score is milliseconds times 4096, plus a number that keeps jobs with the same millisecond in order.
  local due = tonumber(ARGV[3]) + delay
  local first, last = due * 4096, due * 4096 + 4095
  local previous = redis.call("ZREVRANGEBYSCORE", KEYS[8], last, first, "WITHSCORES", "LIMIT", 0, 1)[2]
  redis.call("ZADD", KEYS[8], previous and math.min(tonumber(previous) + 1, last) or first, id)
  redis.call("XADD", events, "MAXLEN", "~", max_events, "*", "event", "delayed", "jobId", id, "delay", due)
  local head = redis.call("ZRANGE", KEYS[8], 0, 0, "WITHSCORES")[2]
  redis.call("ZADD", marker, tonumber(head) / 4096, "1")
else
  if priority > 0 then
    local count = redis.call("INCR", KEYS[7])
    redis.call("ZADD", KEYS[6], priority * 4294967296 + count % 4294967296, id)
  else
    redis.call(options.lifo and "RPUSH" or "LPUSH", paused and KEYS[5] or KEYS[4], id)
  end
  redis.call("XADD", events, "MAXLEN", "~", max_events, "*", "event", "waiting", "jobId", id)
  if not paused and not (concurrency and redis.call("LLEN", KEYS[3]) >= concurrency) then
    redis.call("ZADD", marker, 0, "0")
  end
end
redis.call("DEL", deferred)
return id
