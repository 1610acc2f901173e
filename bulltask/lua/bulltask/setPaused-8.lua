--[[
  Pauses or resumes a queue without losing jobs, whichever versions of BullMQ paused it and added jobs.

  BullMQ 5's script renames `wait` to `paused`, or back. If both lists contain jobs (BullMQ 6 clients only set a flag to
  pause a queue), the renamed list overwrites the existing one. This script first moves the shorter list into the longer
  one, in BullMQ 6's order: the jobs of `paused` run before those of `wait`. If one list is empty, the effect is that of
  BullMQ's script.

  KEYS[1]  wait
  KEYS[2]  paused
  KEYS[3]  meta
  KEYS[4]  prioritized
  KEYS[5]  events
  KEYS[6]  delayed
  KEYS[7]  marker
  KEYS[8]  who has paused the queue, and when; removed when it is resumed
  ARGV[1]  "paused" or "resumed"
  ARGV[2]  maximum number of ids that one call moves
  ARGV[3]  value of KEYS[8], if the queue is not paused yet
  returns  number of ids still to move (call the script again); 0: done
  event    paused or resumed, when done
]]
local wait, paused, meta, marker = KEYS[1], KEYS[2], KEYS[3], KEYS[7]
local max_moved = tonumber(ARGV[2])
local wait_length, paused_length = redis.call("LLEN", wait), redis.call("LLEN", paused)
local merged = wait_length > 0 and paused_length > 0

-- Workers acquire jobs from the right end of both lists, so the jobs of `paused` belong on the right of `wait`.
local function move_wait_to_paused()
  local ids = redis.call("LRANGE", wait, -max_moved, -1)
  for i = 1, #ids, 5000 do
    local part = {}
    for j = i, math.min(i + 4999, #ids) do
      part[#part + 1] = ids[#ids + 1 - j]
    end
    redis.call("LPUSH", paused, unpack(part))
  end
  redis.call("LTRIM", wait, 0, -#ids - 1)
  return wait_length - #ids
end

local function move_paused_to_wait()
  local ids = redis.call("LRANGE", paused, 0, max_moved - 1)
  for i = 1, #ids, 5000 do
    redis.call("RPUSH", wait, unpack(ids, i, math.min(i + 4999, #ids)))
  end
  redis.call("LTRIM", paused, #ids, -1)
  return paused_length - #ids
end

if merged then
  local left = wait_length <= paused_length and move_wait_to_paused() or move_paused_to_wait()
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
  if redis.call("HSET", meta, "paused", 1) == 1 then
    redis.call("SET", KEYS[8], ARGV[3])
  end
  redis.call("DEL", marker)
else
  redis.call("DEL", KEYS[8])
  -- BullMQ 6 only sets the flag and leaves the jobs in `wait`.
  local was_paused = redis.call("HDEL", meta, "paused") == 1
  local ready = moved or merged or (was_paused and wait_length > 0)
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
