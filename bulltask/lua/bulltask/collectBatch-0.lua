--[[
  Acquires further jobs of one task, for a batch or for the event loop: one for each token, in a worker's usual order,
  until the next job belongs to another task. That job stays where it is.

  The source of BullMQ's moveToActive, with promotionGuard, is inserted before this one, as the function
  `fetch(KEYS, ARGV)` (bulltask.lua.wrappers.collect_batch). It runs once for each job, so pauses, limits and priorities
  apply as usual. If it promotes a delayed job of another task and acquires it, the caller releases that job. Each run
  promotes up to 1,000 delayed jobs that are due. If more than that are due, one job is acquired, so that Redis is not
  blocked for long.

  KEYS     those of moveToActive
  ARGV[1]  key prefix of the queue
  ARGV[2]  now in milliseconds
  ARGV[3]  the task's name
  ARGV[4…] packed options of moveToActive, one for each token
  returns  the replies from moveToActive
  event    those of moveToActive
]]
local keys, prefix, now, task = KEYS, ARGV[1], ARGV[2], ARGV[3]
local wait, prioritized, marker = keys[1], keys[3], keys[11]

local function next_id()
  local ids = redis.call("LRANGE", wait, -2, -1)
  local id = table.remove(ids)
  if id and string.sub(id, 1, 2) == "0:" then -- the marker of an older BullMQ
    id = table.remove(ids)
  end
  return id or redis.call("ZRANGE", prioritized, 0, 0)[1]
end

local replies = {}
local due = redis.call("ZCOUNT", keys[7], 0, (now + 1) * 4096 - 1)
for index = 4, due > 1000 and 4 or #ARGV do
  local id = next_id()
  if id and redis.pcall("HGET", prefix .. id, "name") ~= task then
    -- The caller may have removed the marker that another worker needs to acquire the other task's job.
    redis.call("ZADD", marker, 0, "0")
    break
  end
  local reply = fetch(keys, { prefix, now, ARGV[index] })
  replies[#replies + 1] = reply
  if type(reply[1]) ~= "table" then
    break
  end
end
return replies
