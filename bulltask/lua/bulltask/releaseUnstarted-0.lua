--[[
  Releases an active job whose attempt has not started: it is the next to be acquired, and the start that
  moveToActive counted is subtracted.

  The source of BullMQ's moveJobFromActiveToWait is inserted before this one, as the function `release(KEYS, ARGV)`
  (bulltask.lua.wrappers.release_unstarted).

  KEYS     those of moveJobFromActiveToWait
  ARGV     those of moveJobFromActiveToWait; ARGV[3] is the job's key
  returns  the reply from moveJobFromActiveToWait; -3 if the job's key is not a hash, because BullMQ's script would
           remove the job from `active` and then stop with an error (the stalled check fails such a job)
  event    waiting
]]
local keys, job = KEYS, ARGV[3]
local kind = redis.call("TYPE", job).ok
if kind ~= "hash" and kind ~= "none" then
  return -3
end
local reply = release(keys, ARGV)
if reply >= 0 then
  redis.call("HINCRBY", job, "ats", -1)
  if redis.call("HEXISTS", keys[5], "paused") == 0 then -- BullMQ's script adds no marker for a prioritized job
    redis.call("ZADD", keys[8], 0, "0")
  end
end
return reply
