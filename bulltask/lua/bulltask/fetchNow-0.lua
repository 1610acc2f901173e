--[[
  Acquires the next job at the server's time. A worker sends this call after BZPOPMIN on the same connection, so Redis
  runs it when the marker appears, which the worker cannot know in advance.

  BullMQ's script adds a marker after each job that it acquires, so that another worker looks for the next one. If no
  job is left, this script removes that marker; otherwise, every job would wake two idle workers.

  The source of BullMQ's moveToActive, with promotionGuard, is inserted before this one, as the function
  `fetch(KEYS, ARGV)` (bulltask.lua.wrappers.fetch_now).

  KEYS     those of moveToActive
  ARGV[1]  key prefix of the queue
  ARGV[2]  packed options of moveToActive
  returns  the reply from moveToActive
  event    those of moveToActive
]]
local keys = KEYS
local wait, prioritized, marker = keys[1], keys[3], keys[11]
local time = redis.call("TIME")
local now = string.format("%.0f", time[1] * 1000 + math.floor(time[2] / 1000))
local reply = fetch(keys, { ARGV[1], now, ARGV[2] })
if type(reply[1]) == "table" and redis.call("EXISTS", wait, prioritized) == 0 then
  redis.call("ZREM", marker, "0")
end
return reply
