--[[
  Prevents a malformed delayed job from taking others with it when it is promoted.

  BullMQ's scripts promote up to 1,000 jobs that are due: they first remove all of them from `delayed`, and then read
  them one by one. At a key that is not a hash, or a priority that is NaN (Node stores it), they stop with an error, and
  the jobs after that one are in no list any more. So both are handled before: a priority that is NaN becomes 0, and a
  job whose key is not a hash is removed from the queue, as in quarantine.

  This is the end of a script. The text of BullMQ's moveToActive, moveToFinished or retryJob precedes it, as the function
  `official(KEYS, ARGV)` (bulltask.lua.wrappers.guarded). In all three the seventh key is `delayed`.

  ARGV[1]  of moveToActive and retryJob: key prefix of the queue
  ARGV[2]  now in milliseconds
  ARGV[7]  of moveToFinished: key prefix of the queue
  returns  what the official script returns
  event    those of the official script; failed for a job whose key is not a hash
]]
local places, prefix = KEYS, ARGV[7] or ARGV[1]
local due = redis.call("ZRANGEBYSCORE", places[7], 0, (ARGV[2] + 1) * 4096 - 1, "LIMIT", 0, 1000)
for _, id in ipairs(due) do
  local priority = redis.pcall("HGET", prefix .. id, "priority")
  if type(priority) == "table" then
    redis.call("ZREM", places[7], id)
    local reason = "the job was quarantined because its hash is malformed: " .. priority.err
    redis.call("XADD", prefix .. "events", "*", "event", "failed", "jobId", id, "failedReason", reason, "prev", "delayed")
  else
    priority = tonumber(priority)
    if priority ~= priority then
      redis.call("HSET", prefix .. id, "priority", 0)
    end
  end
end
return official(KEYS, ARGV)
