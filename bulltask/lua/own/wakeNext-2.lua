--[[
  Wakes a worker when a job leaves `active` in a queue with a global maximum (concurrency).

  While as many jobs are active as may be, whoever asks for one is refused and waits for a marker. BullMQ sets none when a
  job leaves: whoever ends a job asks for the next one in the same step. Those who do not ask leave a marker instead.

  It is the end of a script, not a whole one: in front of it stands the text of another script, BullMQ's or one that we
  have made around it, as the function `move(KEYS, ARGV)` (bulltask.lua.wrappers.waking), so that both are one step.

  KEYS[1]  meta
  KEYS[2]  marker
  KEYS[3…] those of that script
  ARGV     those of that script
  returns  what it returns; there is no marker when that is a negative number
  event    those of that script
]]
local reply = move({ unpack(KEYS, 3) }, ARGV)
if type(reply) ~= "number" or reply >= 0 then
  local said = redis.call("HMGET", KEYS[1], "concurrency", "paused")
  if said[1] and not said[2] then
    redis.call("ZADD", KEYS[2], 0, "0")
  end
end
return reply
