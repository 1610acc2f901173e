--[[
  Pauses a job scheduler: moves it out of BullMQ's keys, and removes its next job if that is delayed.

  BullMQ has no paused schedulers. Its clients, and bulltask's scripts, add no further job for a scheduler that is not
  in `repeat`, even if one of its jobs runs now.

  The source of BullMQ's removeJobScheduler is inserted before this one, as the function `remove(KEYS, ARGV)`
  (bulltask.lua.wrappers.pause_scheduler).

  KEYS[1]  paused schedulers, by the times of the next jobs that they had (bulltask's own set)
  KEYS[2]  the scheduler while it is paused (bulltask's own hash): BullMQ's fields; `pausedBy`, `pausedAt`; `removed`,
           1 if its next job was removed, 0 if that job waits or has run; `token`, which changes with each change
  KEYS[3]  the scheduler's hash
  KEYS[4…] the keys of removeJobScheduler: repeat, delayed, events
  ARGV[1]  who pauses it
  ARGV[2]  the time in milliseconds
  ARGV[3]  the token
  ARGV[4]  the scheduler's id; with ARGV[5], the arguments of removeJobScheduler
  ARGV[5]  key prefix of the queue
  returns  1 if it is paused now, or was before; 0 if it does not exist; -1 if it is a repeatable job (BullMQ before 5.16)
  event    that of removeJobScheduler
]]
local call, paused, own, scheduler, id = redis.call, KEYS[1], KEYS[2], KEYS[3], ARGV[4]
local keys = { unpack(KEYS, 4) }
local time = call("ZSCORE", keys[1], id)
if not time then
  return call("ZSCORE", paused, id) and 1 or 0
end
if call("HEXISTS", scheduler, "ic") == 0 then
  return -1
end
local removed = call("ZSCORE", keys[2], "repeat:" .. id .. ":" .. time) and 1 or 0
call("RENAME", scheduler, own)
call("HSET", own, "pausedBy", ARGV[1], "pausedAt", ARGV[2], "removed", removed, "token", ARGV[3])
call("ZADD", paused, time, id)
remove(keys, { unpack(ARGV, 4) })
return 1
