--[[
  Fails a job that is not running; for a running job it does nothing, or adds a revocation request.

  The source of BullMQ's moveToFinished is inserted before this one, as the function `finish(KEYS, ARGV)`
  (bulltask.lua.wrappers.with_finish). Therefore, removing the job from its list and failing it are one step, which a
  crash cannot interrupt, and the events, the job's parent in a flow and the metrics are updated. That function expects
  the job in `active`, so this script moves it there first.

  KEYS[1]  revocation requests: the ids of running jobs to cancel, by time (bulltask's own sorted set)
  KEYS[2]  waiting-children
  KEYS[3]  completed
  KEYS[4]  repeat
  KEYS[5…] the keys of moveToFinished, for a job that fails
  ARGV[1]  1: add a revocation request if the job is running; 0: do nothing to a running job
  ARGV[2]  now in milliseconds
  ARGV[3]  maximum number of revocation requests; the oldest ones are removed
  ARGV[4]  the job's id, which is the first argument of moveToFinished
  ARGV[5…] its other arguments, with the token "0", because such a job has no lock
  returns  "revoked": the job has now failed; "running"; "terminating": it is running, and a request was added;
           "finished": it had already finished; "unknown": there is no such job; -8: it is the next job of a job
           scheduler, which would end with it
  event    those of moveToFinished, if the job has failed
]]
local call, requests, id = redis.call, KEYS[1], ARGV[4]
local finish_keys, finish_args = { unpack(KEYS, 5) }, { unpack(ARGV, 4) }
local wait, active, prioritized, delayed, paused =
  finish_keys[1], finish_keys[2], finish_keys[3], finish_keys[7], finish_keys[8]
local failed, job = finish_keys[11], finish_keys[12]

local function is_next_of_scheduler()
  local scheduler = call("HGET", job, "rjk")
  local due = scheduler and call("ZSCORE", KEYS[4], scheduler)
  return due and id == "repeat:" .. scheduler .. ":" .. due
end

-- From the newest job on, as BullMQ's removeJob does, unless it is one of the next jobs: in a list of a million, the
-- search for these would take 11 ms.
local function remove_from_list(list)
  local from = call("LPOS", list, id, "RANK", -1, "MAXLEN", 1000) and -1 or 1
  return call("LREM", list, from, id) > 0
end

-- The lists come last, because they are searched.
local function remove_from_state()
  for _, set in ipairs({ prioritized, delayed, KEYS[2] }) do
    if call("ZREM", set, id) == 1 then
      return true
    end
  end
  return remove_from_list(wait) or remove_from_list(paused)
end

if call("EXISTS", job) == 0 then
  call("ZREM", requests, id)
  return "unknown"
end
if call("ZSCORE", failed, id) or call("ZSCORE", KEYS[3], id) then
  call("ZREM", requests, id)
  return "finished"
end
if call("LPOS", active, id) then
  if ARGV[1] ~= "1" then
    return "running"
  end
  call("ZADD", requests, ARGV[2], id)
  local excess = call("ZCARD", requests) - ARGV[3]
  if excess > 0 then
    call("ZREMRANGEBYRANK", requests, 0, math.min(excess, 10000) - 1)
  end
  return "terminating"
end
if is_next_of_scheduler() then
  return -8
end
local parent, options = unpack(call("HMGET", job, "parentKey", "parent"))
-- The failure changes the parent, maybe in another queue, if the job has one of the options fpof, cpof, idof and rdof.
-- If the user may not access that queue, finish() would stop after this script has moved the job.
local changes_parent = parent and options and string.find(options, '"[fcir][pd]of"')
if changes_parent and redis.acl_check_cmd and not redis.acl_check_cmd("HSET", parent, "field", "value") then
  return redis.error_reply("NOPERM No permissions to access a key")
end
if not remove_from_state() then
  return "unknown"
end
call("RPUSH", active, id)
if parent and not string.find(parent, ":", 1, true) then
  -- finish() would search for the colon in quadratic time.
  call("HDEL", job, "parentKey")
end
local reply = finish(finish_keys, finish_args)
if type(reply) == "number" and reply < 0 then
  return reply
end
call("ZREM", requests, id)
return "revoked"
