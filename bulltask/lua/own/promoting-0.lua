--[[
  Lets no delayed job that is malformed take others with it when it is promoted.

  BullMQ's scripts promote up to 1,000 jobs that are due: they take all of them out of `delayed` first, and then look at
  one after the other. At a key that is no hash, or a priority that is NaN (Node stores it), they stop with an error, and
  the jobs behind that one are in no list any more. So these two are dealt with before. A priority that is NaN becomes
  0; a job whose key is no hash leaves the queue, as in setAside.

  It is the end of a script, not a whole one: in front of it the text of BullMQ's moveToActive, moveToFinished or retryJob
  stands as the function `official(KEYS, ARGV)` (bulltask.lua.wrappers.guarded). In all three the seventh key is
  `delayed`.

  ARGV[1]  of moveToActive and retryJob: key prefix of the queue
  ARGV[2]  now in milliseconds
  ARGV[7]  of moveToFinished: key prefix of the queue
  returns  what the official script returns
  event    those of the official script; failed for a job whose key is no hash
]]
local places, prefix = KEYS, ARGV[7] or ARGV[1]
local due = redis.call("ZRANGEBYSCORE", places[7], 0, (ARGV[2] + 1) * 4096 - 1, "LIMIT", 0, 1000)
for _, id in ipairs(due) do
  local priority = redis.pcall("HGET", prefix .. id, "priority")
  if type(priority) == "table" then
    redis.call("ZREM", places[7], id)
    local reason = "the job was set aside, because its hash is malformed: " .. priority.err
    redis.call("XADD", prefix .. "events", "*", "event", "failed", "jobId", id, "failedReason", reason, "prev", "delayed")
  else
    priority = tonumber(priority)
    if priority ~= priority then
      redis.call("HSET", prefix .. id, "priority", 0)
    end
  end
end
return official(KEYS, ARGV)
