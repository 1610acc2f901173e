--[[
  Moves a finished job back to the waiting jobs and resets its counters of attempts atomically, as BullMQ 5.66 does.

  The source of BullMQ's reprocessJob, or of retryChild, is inserted before this one, as the function
  `retry(KEYS, ARGV)` (bulltask.lua.wrappers.with_reset).

  KEYS     those of that script; the first one is the job
  ARGV[1]  "1": reset the number of attempts made
  ARGV[2]  "1": reset the number of attempts started
  ARGV[3…] the arguments of that script
  returns  the reply from that script
  event    waiting
]]
local keys = KEYS
local reply = retry(keys, { unpack(ARGV, 3) })
if reply == 1 then
  for i, counter in ipairs({ "atm", "ats" }) do
    if ARGV[i] == "1" then
      redis.call("HDEL", keys[1], counter)
    end
  end
end
return reply
