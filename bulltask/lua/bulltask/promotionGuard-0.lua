--[[
  Prevents other jobs from being lost when a malformed delayed job is promoted.

  BullMQ's scripts promote up to 1,000 jobs that are due: they first remove all of them from `delayed`, and then read
  them one by one. They fail with an error on a key that is not a hash, or on a priority that is NaN (which Node may
  store), and the following jobs are then no longer in any list. Therefore, this script handles both cases first. It
  changes a priority of NaN to 0, and removes from the queue a job whose key is not a hash, as `failMalformed` does.

  It also promotes the throttled jobs that are due: jobs that were delayed because of their task's rate limit
  (`startOrThrottle`). BullMQ's scripts would add them after all waiting jobs, and they would miss their turn. This
  script adds them before the waiting jobs, in the order of the task's list of throttled jobs.

  If a queue is paused, or its global concurrency is reached, BullMQ's scripts do not return when the next delayed job is
  due, and it would be promoted up to 5 s late. This script does.

  The source of BullMQ's moveToActive, moveToFinished or retryJob is inserted before this one, as the function
  `official(KEYS, ARGV)` (bulltask.lua.wrappers.with_guard). In all three, the seventh key is `delayed`.

  ARGV[1]  moveToActive and retryJob: key prefix of the queue
  ARGV[2]  now in milliseconds
  ARGV[7]  moveToFinished: key prefix of the queue
  returns  the reply from BullMQ's script
  event    those of BullMQ's script; failed for a job whose key is not a hash
]]
local official_keys, prefix = KEYS, ARGV[7] or ARGV[1]
local delayed = official_keys[7]
local due = redis.call("ZRANGEBYSCORE", delayed, 0, (ARGV[2] + 1) * 4096 - 1, "LIMIT", 0, 1000)
local throttled = {}
for _, id in ipairs(due) do
  local fields = redis.pcall("HMGET", prefix .. id, "priority", "bulltask:throttled")
  if fields.err then
    redis.call("ZREM", delayed, id)
    local reason = "malformed job: " .. fields.err
    redis.call("XADD", prefix .. "events", "*", "event", "failed", "jobId", id, "failedReason", reason, "prev", "delayed")
  else
    local priority = tonumber(fields[1])
    if priority ~= priority then
      redis.call("HSET", prefix .. id, "priority", 0)
      priority = 0
    end
    if fields[2] then
      throttled[#throttled + 1] = { id = id, priority = priority or 0, place = tonumber(fields[2]) or 0 }
    end
  end
end
if #throttled > 0 then
  local paused = redis.call("HEXISTS", prefix .. "meta", "paused") == 1
  table.sort(throttled, function(one, other) return one.place < other.place end)
  for i = #throttled, 1, -1 do
    local id, priority = throttled[i].id, throttled[i].priority
    redis.call("ZREM", delayed, id)
    redis.call("HSET", prefix .. id, "delay", 0)
    if priority > 0 then
      redis.call("ZADD", prefix .. "prioritized", string.format("%.0f", priority * 0x100000000 + i), id)
    else
      redis.call("RPUSH", prefix .. (paused and "paused" or "wait"), id)
    end
    redis.call("XADD", prefix .. "events", "*", "event", "waiting", "jobId", id, "prev", "delayed")
  end
  if not paused then
    redis.call("ZADD", prefix .. "marker", 0, "0")
  end
end
local reply = official(KEYS, ARGV)
if type(reply) == "table" and reply[1] == 0 and reply[3] == 0 and reply[4] == 0 then
  local next_due = redis.call("ZRANGE", delayed, 0, 0, "WITHSCORES")[2]
  reply[4] = next_due and tonumber(next_due) / 4096 or 0
end
return reply
