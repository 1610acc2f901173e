--[[
  Resumes a paused job scheduler: moves it back to BullMQ's keys, and adds its next job.

  No job is added if the schedule is over, or if the job that was next when it was paused still waits: the worker that
  acquires that job adds the next one. An interval continues in its rhythm; iterations that were missed are skipped.

  The source of BullMQ's addJobScheduler is inserted before this one, as the function `add(KEYS, ARGV)`
  (bulltask.lua.wrappers.resume_scheduler).

  KEYS[1]  paused schedulers, by the times of the next jobs that they had
  KEYS[2]  the scheduler while it is paused (see pauseScheduler)
  KEYS[3]  the scheduler's hash
  KEYS[4]  the job that was next when it was paused
  KEYS[5…] the keys of addJobScheduler
  ARGV[1]  the token that the caller has read
  ARGV[2]  the state of KEYS[4] that the caller has read: waiting, started, or "" if it does not exist
  ARGV[3]  1 if a job is to be added, 0 if not
  ARGV[4…] the arguments of addJobScheduler
  returns  the reply from BullMQ's script; {"", 0} if no job was added; false if the scheduler or the job has changed
           since the caller has read it
  event    those of BullMQ's script
]]
local call, paused, own, scheduler, job = redis.call, KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local keys, args = { unpack(KEYS, 5) }, { unpack(ARGV, 4) }
local schedulers, id, now = keys[1], args[3], tonumber(args[7])

local state = ""
if call("HEXISTS", job, "name") == 1 then
  local started = call("HEXISTS", job, "processedOn") == 1 or call("HEXISTS", job, "finishedOn") == 1
  state = started and "started" or "waiting"
end
if call("HGET", own, "token") ~= ARGV[1] or state ~= ARGV[2] then
  return false
end
if call("ZSCORE", schedulers, id) then
  -- A client that does not know pauses has added the scheduler again.
  call("ZREM", paused, id)
  call("DEL", own)
  return { "", 0 }
end
local time, removed = tonumber(call("ZSCORE", paused, id)), call("HGET", own, "removed")
call("RENAME", own, scheduler)
if ARGV[3] == "0" then
  call("HDEL", scheduler, "pausedBy", "pausedAt", "removed", "token")
  call("ZADD", schedulers, time, id)
  call("ZREM", paused, id)
  return { "", 0 }
end

local every, previous = cmsgpack.unpack(args[2])["every"], time
if every and not (state == "started" and time > now) then
  previous = time > now and time - every or time + math.floor((now - time) / every) * every
end
-- BullMQ's script adds the interval to the stored time, and rounds down. Without the fraction, it would replace the job
-- of exactly that time, which may be waiting for a retry.
call("ZADD", schedulers, previous + 0.5, id)
local reply = add(keys, args) -- writes the hash again, without the fields of the pause
if type(reply) == "number" then
  call("RENAME", scheduler, own)
  call("ZREM", schedulers, id)
  return reply
end
if removed == "0" then
  call("HINCRBY", scheduler, "ic", 1)
end
call("ZREM", paused, id)
return reply
