--[[
  Ends a revoked job and takes its mark away in one step: whoever lets it wait again afterwards has it run.

  It is the end of a script, not a whole one: in front of it the text of BullMQ's moveToFinished stands as the function
  `finish(KEYS, ARGV)` (bulltask.lua.wrappers.ending).

  KEYS[1]  marks of revoked jobs
  KEYS[2…] those of moveToFinished
  ARGV[1]  the job's id, which is the first argument of moveToFinished
  ARGV[2…] its others
  returns  what moveToFinished returns; the mark stays when that is a negative number
  event    those of moveToFinished
]]
local reply = finish({ unpack(KEYS, 2) }, ARGV)
if type(reply) ~= "number" or reply >= 0 then
  redis.call("ZREM", KEYS[1], ARGV[1])
end
return reply
