--[[
  Prevents a malformed stalled job from being lost, and other stalled jobs from being missed, and applies the stall limit
  to the jobs of job schedulers.

  BullMQ's moveStalledJobsToWait empties the set of jobs that may have stalled, and removes each job from `active`
  before it reads the job. It fails with an error on a key that is not a hash, a counter `stc` that is not an integer,
  or options that are not JSON. That job is then no longer in any list, and the remaining jobs are not checked.
  Therefore, this script handles such jobs first. It resets the counter. It moves a job with malformed options to the
  waiting jobs, so that the worker that acquires it reports the error. It removes from the queue a job whose key is not
  a hash, as `failMalformed` does. It removes a lock that is not a string, because such a lock never expires.

  BullMQ's script never fails a job of a job scheduler, however often it stalls. A job that takes its worker down would
  take down one worker after the other, so this script fails it like any other job. Its scheduler continues, because the
  worker that acquires the job adds the next iteration before the job fails.

  The source of moveStalledJobsToWait is inserted before this one, as the function `official(KEYS, ARGV)`
  (bulltask.lua.wrappers.with_guard).

  ARGV[1]  how many times a job may stall
  ARGV[2]  key prefix of the queue
  returns  ids of the jobs that are waiting again
  event    those of BullMQ's script; for a malformed job waiting and stalled, or failed
]]
local call, official_keys, prefix, released = redis.call, KEYS, ARGV[2], {}
local stalled, active, events = official_keys[1], official_keys[3], official_keys[8]

local function is_valid(job)
  if type(redis.pcall("HINCRBY", job, "stc", 1)) == "table" then
    call("HDEL", job, "stc")
  else
    call("HINCRBY", job, "stc", -1)
  end
  local opts = call("HGET", job, "opts")
  if not opts then
    return true
  end
  local decoded, value = pcall(cjson.decode, opts)
  return decoded and type(value) == "table"
end

local function release(id)
  local paused = call("HEXISTS", official_keys[5], "paused") == 1
  call("RPUSH", paused and official_keys[6] or official_keys[2], id)
  if not paused then
    call("ZADD", official_keys[7], 0, "0")
  end
  call("XADD", events, "*", "event", "waiting", "jobId", id, "prev", "active")
  call("XADD", events, "*", "event", "stalled", "jobId", id)
  released[#released + 1] = id
end

if call("EXISTS", official_keys[4]) == 0 then
  for _, id in ipairs(call("SMEMBERS", stalled)) do
    local job = prefix .. id
    local kind, lock = call("TYPE", job)["ok"], call("TYPE", job .. ":lock")["ok"]
    if lock ~= "none" and lock ~= "string" then
      call("DEL", job .. ":lock")
    end
    if kind ~= "none" and call("EXISTS", job .. ":lock") == 0 and not (kind == "hash" and is_valid(job)) then
      call("SREM", stalled, id)
      if call("LREM", active, 1, id) > 0 then
        if kind == "hash" then
          release(id)
        else
          local reason = "malformed job: its key is a " .. kind
          call("XADD", events, "*", "event", "failed", "jobId", id, "failedReason", reason, "prev", "active")
        end
      end
    end
  end
end
for _, id in ipairs(official(KEYS, ARGV)) do
  released[#released + 1] = id
  local count = tonumber(call("HGET", prefix .. id, "stc"))
  if count and count > tonumber(ARGV[1]) then
    call("HSET", prefix .. id, "defa", "job stalled more than allowable limit")
  end
end
return released
