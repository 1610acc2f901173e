--[[
  Fails a job that does not run; a job that runs is left alone or marked as revoked.

  This is the end of a script. The text of BullMQ's moveToFinished precedes it, as the function `finish(KEYS, ARGV)`
  (bulltask.lua.wrappers.ending), so that removing the job from its list and failing it are one step: a crash cannot
  leave it between the two, and everything that follows a failed job (events, the parent of a flow, metrics) happens.
  The function expects the job in the active list, so it is put there first.

  KEYS[1]  marks: the ids of running jobs to cancel, by the time of revocation: a sorted set of bulltask's
  KEYS[2]  waiting-children
  KEYS[3]  completed
  KEYS[4]  repeat
  KEYS[5…] those of moveToFinished, for a job that fails
  ARGV[1]  1: mark a job that runs; 0: leave it alone
  ARGV[2]  the time, in milliseconds
  ARGV[3]  maximum number of marks; the oldest ones are removed
  ARGV[4]  the job's id, which is the first argument of moveToFinished
  ARGV[5…] its other arguments, with the token "0", because such a job has no lock
  returns  "revoked": it has failed now; "running"; "terminating": it runs and is marked; "finished": it had finished
           before; "unknown": there is no such job; -8: it is the next job of a job scheduler, which would end with it
  event    those of moveToFinished, if the job has failed
]]
local call, marks, id = redis.call, KEYS[1], ARGV[4]
local places, args = { unpack(KEYS, 5) }, { unpack(ARGV, 4) }
local wait, active, prioritized, delayed, paused = places[1], places[2], places[3], places[7], places[8]
local failed, job = places[11], places[12]

local function is_next_of_a_scheduler()
  local scheduler = call("HGET", job, "rjk")
  local due = scheduler and call("ZSCORE", KEYS[4], scheduler)
  return due and id == "repeat:" .. scheduler .. ":" .. due
end

-- The lists come last: they are searched from end to end.
local function take_out()
  for _, set in ipairs({ prioritized, delayed, KEYS[2] }) do
    if call("ZREM", set, id) == 1 then
      return true
    end
  end
  return call("LREM", wait, 0, id) > 0 or call("LREM", paused, 0, id) > 0
end

if call("EXISTS", job) == 0 then
  call("ZREM", marks, id)
  return "unknown"
end
if call("ZSCORE", failed, id) or call("ZSCORE", KEYS[3], id) then
  call("ZREM", marks, id)
  return "finished"
end
if call("LPOS", active, id) then
  if ARGV[1] ~= "1" then
    return "running"
  end
  call("ZADD", marks, ARGV[2], id)
  call("ZREMRANGEBYRANK", marks, 0, -ARGV[3] - 1)
  return "terminating"
end
if is_next_of_a_scheduler() then
  return -8
end
if not take_out() then
  return "unknown"
end
call("RPUSH", active, id)
local parent = call("HGET", job, "parentKey")
if parent and not string.find(parent, ":", 1, true) then
  -- The function below would search for the colon in quadratic time.
  call("HDEL", job, "parentKey")
end
local reply = finish(places, args)
if type(reply) == "number" and reply < 0 then
  return reply
end
call("ZREM", marks, id)
return "revoked"
