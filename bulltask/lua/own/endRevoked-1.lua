--[[
  Finishes a revoked job and removes its revocation mark in the same step: if the job is retried later, it runs.

  This is the end of a script. The text of BullMQ's moveToFinished precedes it, as the function `finish(KEYS, ARGV)`
  (bulltask.lua.wrappers.ending).

  KEYS[1]  marks of revoked jobs
  KEYS[2…] those of moveToFinished
  ARGV[1]  the job's id, which is the first argument of moveToFinished
  ARGV[2…] its other arguments
  returns  what moveToFinished returns; the mark stays if that is a negative number
  event    those of moveToFinished
]]
local reply = finish({ unpack(KEYS, 2) }, ARGV)
if type(reply) ~= "number" or reply >= 0 then
  redis.call("ZREM", KEYS[1], ARGV[1])
end
return reply
