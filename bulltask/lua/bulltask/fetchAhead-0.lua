--[[
  Acquires one job for each token, in a worker's usual order, unless the queue is limited: with global concurrency, or a
  global rate limit, a job that one worker has prefetched would keep another worker from running one.

  Each call of moveToActive promotes up to 1,000 delayed jobs that are due. If more than that are due, one job is
  acquired, so that Redis is not blocked for long.

  The source of BullMQ's moveToActive, with promotionGuard, is inserted before this one, as the function
  `fetch(KEYS, ARGV)` (bulltask.lua.wrappers.fetch_ahead).

  KEYS     those of moveToActive
  ARGV[1]  key prefix of the queue
  ARGV[2]  now in milliseconds
  ARGV[3…] packed options of moveToActive, one for each token
  returns  the replies from moveToActive that contain a job
  event    those of moveToActive
]]
local keys, prefix, now = KEYS, ARGV[1], ARGV[2]
local limits = redis.call("HMGET", keys[9], "concurrency", "max")
local replies = {}
if limits[1] or limits[2] then
  return replies
end
local due = redis.call("ZCOUNT", keys[7], 0, (now + 1) * 4096 - 1)
for index = 3, due > 1000 and 3 or #ARGV do
  local reply = fetch(keys, { prefix, now, ARGV[index] })
  if type(reply[1]) ~= "table" then
    break
  end
  replies[#replies + 1] = reply
end
return replies
