--[[
  Wakes a worker when a job leaves `active` in a queue with global concurrency.

  While that limit is reached, a worker that fetches receives no job and waits for a marker. BullMQ adds no marker
  when a job leaves `active`, because its workers fetch the next job in the same step. A caller that does not fetch uses
  this script to add a marker.

  The source of the script that moves the job is inserted before this one, as the function `move(KEYS, ARGV)`
  (bulltask.lua.wrappers.with_wakeup), so that both are one step.

  KEYS[1]  meta
  KEYS[2]  marker
  KEYS[3…] the keys of the script that moves the job
  ARGV     the arguments of that script
  returns  the reply from that script; if that is an error code, no marker is added
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
