--[[
  Prevents other jobs from being lost when a malformed delayed job is promoted.

  BullMQ's scripts promote up to 1,000 jobs that are due: they first remove all of them from `delayed`, and then read
  them one by one. They fail with an error on a key that is not a hash, or on a priority that is NaN (which Node may
  store), and the following jobs are then no longer in any list. Therefore, this script handles both cases first. It
  changes a priority of NaN to 0, and removes a job whose key is not a hash from the queue, as `failMalformed` does.

  The source of BullMQ's moveToActive, moveToFinished or retryJob is inserted before this one, as the function
  `official(KEYS, ARGV)` (bulltask.lua.wrappers.with_guard). In all three, the seventh key is `delayed`.

  ARGV[1]  moveToActive and retryJob: key prefix of the queue
  ARGV[2]  now in milliseconds
  ARGV[7]  moveToFinished: key prefix of the queue
  returns  the reply of BullMQ's script
  event    those of BullMQ's script; failed for a job whose key is not a hash
]]
local official_keys, prefix = KEYS, ARGV[7] or ARGV[1]
local delayed = official_keys[7]
local due = redis.call("ZRANGEBYSCORE", delayed, 0, (ARGV[2] + 1) * 4096 - 1, "LIMIT", 0, 1000)
for _, id in ipairs(due) do
  local priority = redis.pcall("HGET", prefix .. id, "priority")
  if type(priority) == "table" then
    redis.call("ZREM", delayed, id)
    local reason = "malformed job: " .. priority.err
    redis.call("XADD", prefix .. "events", "*", "event", "failed", "jobId", id, "failedReason", reason, "prev", "delayed")
  else
    priority = tonumber(priority)
    if priority ~= priority then
      redis.call("HSET", prefix .. id, "priority", 0)
    end
  end
end
return official(KEYS, ARGV)
