--[[
  Releases an active job whose attempt has not started: it is the next to be acquired, and the start that
  moveToActive counted is subtracted.

  The source of BullMQ's moveJobFromActiveToWait is inserted before this one, as the function `release(KEYS, ARGV)`
  (bulltask.lua.wrappers.release_unstarted).

  KEYS     those of moveJobFromActiveToWait
  ARGV     those of moveJobFromActiveToWait; ARGV[1] is the job's id, ARGV[2] the token of its lock, ARGV[3] its key
  returns  the reply from moveJobFromActiveToWait; -3 if the job's key is not a hash, because BullMQ's script would
           remove the job from `active` and then stop with an error (the stalled check fails such a job)
  event    released and waiting
]]
local keys, id, token, job = KEYS, ARGV[1], ARGV[2], ARGV[3]
local kind = redis.call("TYPE", job).ok
if kind ~= "hash" and kind ~= "none" then
  return -3
end
local is_released = kind == "hash" and redis.call("LPOS", keys[1], id) and redis.call("GET", job .. ":lock") == token
-- BullMQ's script gives each prioritized job that it releases the same score, and Redis sorts these by their ids. A
-- score just below that of the next job keeps the order of several jobs that are released one after another.
local priority, score = tonumber(redis.call("HGET", job, "priority")) or 0, nil
if priority > 0 then
  local first = priority * 0x100000000
  local _, exponent = math.frexp(first)
  local range = {first, "(" .. string.format("%.17g", first + 0x100000000), "WITHSCORES", "LIMIT", 0, 1}
  local next_score = redis.call("ZRANGEBYSCORE", keys[7], unpack(range))[2]
  score = math.max(first, (tonumber(next_score) or first + 1) - math.ldexp(1, exponent - 53))
end
if is_released then
  redis.call("HINCRBY", job, "ats", -1)
  redis.call("XADD", keys[9], "*", "event", "released", "jobId", id)
end
local reply = release(keys, ARGV)
if reply >= 0 then
  if score and redis.call("ZSCORE", keys[7], id) then
    redis.call("ZADD", keys[7], score, id)
  end
  if redis.call("HEXISTS", keys[5], "paused") == 0 then -- BullMQ's script adds no marker for a prioritized job
    redis.call("ZADD", keys[8], 0, "0")
  end
end
return reply
