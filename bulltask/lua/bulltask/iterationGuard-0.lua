--[[
  Adds the next iteration of a job scheduler whose job is missing, and does nothing if it exists.

  The job that carries a schedule on is missing if it was lost with its server's data, if it was deleted, or if it was
  acquired by a worker that does not add the following one, such as the Python package `bullmq` 2.

  The source of BullMQ's addJobScheduler is inserted before this one, as the function `official(KEYS, ARGV)`
  (bulltask.lua.wrappers.with_guard). An interval continues from the time of the missing job. If that job has not run
  and its time has not passed, it is added again for the same time.

  ARGV[2]  msgpack: the schedule
  ARGV[3]  the scheduler's id
  ARGV[7]  the time in milliseconds
  ARGV[8]  key prefix of the queue
  ARGV[10] the time of the missing job, as the caller has read it
  returns  the reply from BullMQ's script; false if the job exists, or the schedule was changed or removed
  event    those of BullMQ's script
]]
local call, keys, id, base, score = redis.call, KEYS, ARGV[3], ARGV[8], ARGV[10]
local job = "repeat:" .. id .. ":" .. score
local every = cmsgpack.unpack(ARGV[2])["every"]

if tonumber(call("ZSCORE", keys[1], id) or "") ~= tonumber(score) then
  return false
end
local now, time, finished = tonumber(ARGV[7]), tonumber(score), call("HEXISTS", base .. job, "finishedOn") == 1
if finished then
  call("HINCRBY", keys[1] .. ":" .. id, "ic", 1)
elseif call("EXISTS", base .. job) == 1 then
  if
    call("ZSCORE", keys[2], job)
    or call("ZSCORE", keys[6], job)
    or call("LPOS", keys[11], job)
    or call("LPOS", keys[3], job)
    or call("LPOS", keys[4], job)
  then
    return false
  end
  call("DEL", base .. job) -- it is in no state, so no worker can acquire it
end
if every and not (finished and time > now) then
  -- BullMQ's script adds the interval to the stored time, and rounds down. Without the fraction, it would replace the
  -- job of exactly that time, which may be waiting for a retry.
  local previous = time > now and time - every or time + math.floor((now - time) / every) * every
  call("ZADD", keys[1], previous + 0.5, id)
end
return official(KEYS, ARGV)
