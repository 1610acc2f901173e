--[[
  Fails a job and adds its error callbacks atomically.

  The sources of BullMQ's moveToFinished and addStandardJob are inserted before this one, as the functions
  `finish(KEYS, ARGV)` and `add(KEYS, ARGV)` (bulltask.lua.wrappers.with_errbacks).

  KEYS     the keys of moveToFinished
  ARGV[1]  msgpack: a list of { the prefix of the queue's keys, and the three arguments of addStandardJob }
  ARGV[2…] the arguments of moveToFinished
  returns  the reply from moveToFinished; if that is an error code, no job is added
  event    those of moveToFinished; for each callback, added and waiting
]]
local reply = finish(KEYS, { unpack(ARGV, 2) })
if type(reply) ~= "number" or reply >= 0 then
  for _, job in ipairs(cmsgpack.unpack(ARGV[1])) do
    local keys = {}
    for i, name in ipairs({ "wait", "paused", "meta", "id", "completed", "delayed", "active", "events", "marker" }) do
      keys[i] = job[1] .. name
    end
    add(keys, { job[2], job[3], job[4] })
  end
end
return reply
