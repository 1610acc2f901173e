--[[
  Wakes a worker when a job leaves `active` in a queue with a global concurrency.

  While as many jobs are active as that allows, a worker that asks for one is refused and waits for a marker. BullMQ adds
  none when a job leaves, because the worker that finishes a job asks for the next one in the same step. Callers that do
  not ask add a marker instead.

  This is the end of a script. The text of another script, BullMQ's or one that wraps it, precedes it as the function
  `move(KEYS, ARGV)` (bulltask.lua.wrappers.waking), so that both are one step.

  KEYS[1]  meta
  KEYS[2]  marker
  KEYS[3…] those of that script
  ARGV     those of that script
  returns  what it returns; there is no marker when that is a negative number
  event    those of that script
]]
local reply = move({ unpack(KEYS, 3) }, ARGV)
if type(reply) ~= "number" or reply >= 0 then
  local meta = redis.call("HMGET", KEYS[1], "concurrency", "paused")
  if meta[1] and not meta[2] then
    redis.call("ZADD", KEYS[2], 0, "0")
  end
end
return reply
