--[[
  Converts a job in a Bull queue (Bull is BullMQ's predecessor) to BullMQ, in the same queue and under the same keys.

  Bull and BullMQ share the names of most keys, so the job stays in its list or sorted set. Only a waiting job with a
  priority moves to `prioritized`, and a job whose worker has died becomes the next to run. The caller has read the job
  and passes the changes; this script first compares `opts` and `attemptsMade` with the values that the caller has read.

  KEYS[1]  the list or sorted set that contains the job
  KEYS[2]  job
  KEYS[3]  its lock
  KEYS[4]  Bull's sorted set of the priorities of waiting jobs
  KEYS[5]  prioritized
  KEYS[6]  pc
  KEYS[7]  active
  KEYS[8]  meta
  KEYS[9]  marker
  KEYS[10] id
  KEYS[11] wait
  KEYS[12] paused
  ARGV[1]  job id
  ARGV[2]  waiting, delayed, completed, failed, or recovered (it was active, but no worker has it)
  ARGV[3]  its field opts as the caller has read it, "" for none
  ARGV[4]  its field attemptsMade as the caller has read it, "" for none
  ARGV[5]  priority
  ARGV[6]  its expected position in a list, counted from the right end, from 0
  ARGV[7]  number of fields to remove
  ARGV[8…] the names of these fields, then field, value, field, value …
  returns  1: converted; 0: the job is gone; -1: it has no hash; -2: it is locked; -3: it has changed
]]
local id, state, job, source = ARGV[1], ARGV[2], KEYS[2], KEYS[1]

if redis.call("TYPE", source)["ok"] == "list" then
  -- The expected position is checked first, because the more of the list is converted, the longer a search takes.
  local at_position = redis.call("LINDEX", source, -tonumber(ARGV[6]) - 1) == id
  if not at_position and not redis.call("LPOS", source, id, "RANK", -1) then
    return 0
  end
elseif not redis.call("ZSCORE", source, id) then
  return 0
end
if redis.call("EXISTS", job) == 0 then
  return -1
elseif redis.call("EXISTS", KEYS[3]) == 1 then
  return -2
end
local fields = redis.call("HMGET", job, "opts", "attemptsMade")
if (fields[1] or "") ~= ARGV[3] or (fields[2] or "") ~= ARGV[4] then
  return -3
end

-- Writes that Redis rejects at maxmemory come first, before anything has changed.
local last_dropped = 7 + tonumber(ARGV[7])
redis.call("HSET", job, unpack(ARGV, last_dropped + 1))
if last_dropped > 7 then
  redis.call("HDEL", job, unpack(ARGV, 8, last_dropped))
end

-- A custom id may be a number, which BullMQ's counter must not issue later.
if #id <= 15 and string.match(id, "^%d+$") and tonumber(id) > tonumber(redis.call("GET", KEYS[10]) or 0) then
  redis.call("SET", KEYS[10], id)
end

local meta = redis.call("HMGET", KEYS[8], "paused", "concurrency")
local function wake_worker()
  if not meta[1] and not (meta[2] and redis.call("LLEN", KEYS[7]) >= tonumber(meta[2])) then
    redis.call("ZADD", KEYS[9], 0, "0")
  end
end

if state == "waiting" then
  local priority = tonumber(ARGV[5])
  if priority > 0 and redis.call("ZSCORE", KEYS[4], id) then
    local count = redis.call("INCR", KEYS[6])
    redis.call("ZADD", KEYS[5], string.format("%.0f", priority * 4294967296 + count % 4294967296), id)
    redis.call("LREM", source, -1, id)
  end
  redis.call("ZREM", KEYS[4], id)
  wake_worker()
elseif state == "recovered" then
  redis.call("RPUSH", meta[1] and KEYS[12] or KEYS[11], id)
  redis.call("LREM", source, -1, id)
  wake_worker()
elseif state == "delayed" then
  local head = redis.call("ZRANGE", source, 0, 0, "WITHSCORES")
  redis.call("ZADD", KEYS[9], string.format("%.0f", math.floor(tonumber(head[2]) / 4096)), "1")
end
return 1
