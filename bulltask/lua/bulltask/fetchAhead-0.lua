--[[
  Acquires one job for each token, in a worker's usual order, unless the queue is limited: with global concurrency, or a
  global rate limit, a job that one worker has prefetched would keep another worker from running one.

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
for index = 3, #ARGV do
  local reply = fetch(keys, { prefix, now, ARGV[index] })
  if type(reply[1]) ~= "table" then
    break
  end
  replies[#replies + 1] = reply
end
return replies
