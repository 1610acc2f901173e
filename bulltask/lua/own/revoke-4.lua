--[[
  Ends a job that does not run, as one that has failed; a job that runs is left alone or marked to be ended.

  It is the end of a script, not a whole one: in front of it the text of BullMQ's moveToFinished stands as the function
  `finish(KEYS, ARGV)` (bulltask.lua.wrappers.ending), so that taking the job out of its place and ending it are one step:
  nobody who dies leaves a job between the two, and all that hears of a job that fails (events, the parent of a flow,
  metrics) hears of this one. That function looks for the job in the active list, so it is put there first.

  KEYS[1]  marks: the ids of running jobs that are to be ended, by the time of the wish: a sorted set of ours
  KEYS[2]  waiting-children
  KEYS[3]  completed
  KEYS[4]  repeat
  KEYS[5…] those of moveToFinished, for a job that fails
  ARGV[1]  1: mark a job that runs; 0: leave it alone
  ARGV[2]  the time, in milliseconds
  ARGV[3]  how many marks are kept, the newest ones
  ARGV[4]  the job's id, which is the first argument of moveToFinished
  ARGV[5…] its others, with the token "0": nobody holds a lock of such a job
  returns  "revoked": it has ended now; "running"; "terminating": it runs and is marked; "finished": it had ended before;
           "unknown": there is no such job; -8: it is the next one of a job scheduler, which would end with it
  event    those of moveToFinished, when the job has ended
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

-- The lists come last: they are looked through from end to end.
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
  -- The function below would look for the colon in a time that grows with the square of the length.
  call("HDEL", job, "parentKey")
end
local reply = finish(places, args)
if type(reply) == "number" and reply < 0 then
  return reply
end
call("ZREM", marks, id)
return "revoked"
