--[[
  Acquires the next job at the server's time. A worker sends this call after BZPOPMIN on the same connection, so Redis
  runs it when the marker appears, which the worker cannot know in advance.

  The source of BullMQ's moveToActive, with promotionGuard, is inserted before this one, as the function
  `fetch(KEYS, ARGV)` (bulltask.lua.wrappers.fetch_now).

  KEYS     those of moveToActive
  ARGV[1]  key prefix of the queue
  ARGV[2]  packed options of moveToActive
  returns  the reply from moveToActive
  event    those of moveToActive
]]
local time = redis.call("TIME")
local now = string.format("%.0f", time[1] * 1000 + math.floor(time[2] / 1000))
return fetch(KEYS, { ARGV[1], now, ARGV[2] })
