--[[
  Finishes a revoked job and removes its revocation request atomically, so that the job runs if it is retried.

  The source of BullMQ's moveToFinished is inserted before this one, as the function `finish(KEYS, ARGV)`
  (bulltask.lua.wrappers.with_finish).

  KEYS[1]  revocation requests
  KEYS[2…] the keys of moveToFinished
  ARGV[1]  the job's id, which is the first argument of moveToFinished
  ARGV[2…] its other arguments
  returns  the reply from moveToFinished; if that is an error code, the request is kept
  event    those of moveToFinished
]]
local reply = finish({ unpack(KEYS, 2) }, ARGV)
if type(reply) ~= "number" or reply >= 0 then
  redis.call("ZREM", KEYS[1], ARGV[1])
end
return reply
