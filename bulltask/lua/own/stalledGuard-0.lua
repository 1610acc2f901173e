--[[
  Prevents a malformed stalled job from vanishing, and from hiding others.

  BullMQ's moveStalledJobsToWait empties the set of jobs that may have stalled, and removes each of them from `active`
  before it reads it. At a key that is not a hash, a counter `stc` that is not an integer, or options that are not JSON,
  it stops with an error: that job is in no list any more, and the others are not checked. So these are handled before:
  such a counter is reset; a job with such options waits again, and the worker that acquires it reports the error; a job
  whose key is not a hash is removed from the queue, as in quarantine. A lock that is not a string never expires, and is
  removed.

  This is the end of a script. The text of moveStalledJobsToWait precedes it, as the function `official(KEYS, ARGV)`
  (bulltask.lua.wrappers.guarded).

  ARGV[1]  of the official script, not used here: how often a job may stall
  ARGV[2]  key prefix of the queue
  returns  ids of the jobs that wait again
  event    those of the official script; for malformed jobs waiting and stalled, or failed
]]
local call, places, prefix, back = redis.call, KEYS, ARGV[2], {}
local stalled, active, events = places[1], places[3], places[8]

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
  local known, value = pcall(cjson.decode, opts)
  return known and type(value) == "table"
end

local function put_back(id)
  local paused = call("HEXISTS", places[5], "paused") == 1
  call("RPUSH", paused and places[6] or places[2], id)
  if not paused then
    call("ZADD", places[7], 0, "0")
  end
  call("XADD", events, "*", "event", "waiting", "jobId", id, "prev", "active")
  call("XADD", events, "*", "event", "stalled", "jobId", id)
  back[#back + 1] = id
end

if call("EXISTS", places[4]) == 0 then
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
          put_back(id)
        else
          local reason = "the job was quarantined because its hash is malformed: its key is a " .. kind
          call("XADD", events, "*", "event", "failed", "jobId", id, "failedReason", reason, "prev", "active")
        end
      end
    end
  end
end
for _, id in ipairs(official(KEYS, ARGV)) do
  back[#back + 1] = id
end
return back
