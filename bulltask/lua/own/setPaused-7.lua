--[[
  Pauses or resumes a queue without losing a job, regardless of who paused it and who has added jobs since.

  BullMQ 5's own script renames one of the lists `wait` and `paused` to the other. If both have jobs (clients of BullMQ 6
  pause by the flag alone), the renamed one overwrites the other. This script first moves the shorter list into the
  longer one, in BullMQ 6's order: the jobs of `paused` run before those of `wait`. If one list is empty, the effect is
  that of BullMQ's script.

  KEYS[1]  wait
  KEYS[2]  paused
  KEYS[3]  meta
  KEYS[4]  prioritized
  KEYS[5]  events
  KEYS[6]  delayed
  KEYS[7]  marker
  ARGV[1]  "paused" or "resumed"
  ARGV[2]  maximum number of ids that one call moves
  returns  number of ids that are left to move: call again; 0: done
  event    paused or resumed, when done
]]
local wait, paused, meta, marker = KEYS[1], KEYS[2], KEYS[3], KEYS[7]
local most = tonumber(ARGV[2])
local waiting, held = redis.call("LLEN", wait), redis.call("LLEN", paused)
local merged = waiting > 0 and held > 0

-- Jobs are taken from the right end of both lists, so `paused` belongs to the right of `wait`.
local function shift_wait()
  local ids = redis.call("LRANGE", wait, -most, -1)
  for i = 1, #ids, 5000 do
    local part = {}
    for j = i, math.min(i + 4999, #ids) do
      part[#part + 1] = ids[#ids + 1 - j]
    end
    redis.call("LPUSH", paused, unpack(part))
  end
  redis.call("LTRIM", wait, 0, -#ids - 1)
  return waiting - #ids
end

local function shift_paused()
  local ids = redis.call("LRANGE", paused, 0, most - 1)
  for i = 1, #ids, 5000 do
    redis.call("RPUSH", wait, unpack(ids, i, math.min(i + 4999, #ids)))
  end
  redis.call("LTRIM", paused, #ids, -1)
  return held - #ids
end

if merged then
  local left = waiting <= held and shift_wait() or shift_paused()
  if left > 0 then
    return left
  end
end

local source, target = paused, wait
if ARGV[1] == "paused" then
  source, target = wait, paused
end
local moved = redis.call("EXISTS", source) == 1
if moved then
  redis.call("RENAME", source, target)
end
if ARGV[1] == "paused" then
  redis.call("HSET", meta, "paused", 1)
  redis.call("DEL", marker)
else
  -- A queue that was paused by the flag alone has its jobs in `wait` already.
  local was_paused = redis.call("HDEL", meta, "paused") == 1
  local ready = moved or merged or (was_paused and waiting > 0)
  if ready or redis.call("ZCARD", KEYS[4]) > 0 then
    redis.call("ZADD", marker, 0, "0")
  else
    local due = redis.call("ZRANGE", KEYS[6], 0, 0, "WITHSCORES")
    if due[2] then
      -- Scores of delayed jobs are milliseconds times 4096.
      redis.call("ZADD", marker, tonumber(due[2]) / 4096, "1")
    end
  end
end
redis.call("XADD", KEYS[5], "*", "event", ARGV[1])
return 0
