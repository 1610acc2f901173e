--[[
  Changes fields of a job's hash, such as its checkpoint, in the same step that moves the job out of `active` without an
  outcome.

  The source of BullMQ's script that moves the job is inserted before this one, as the function `move(KEYS, ARGV)`
  (bulltask.lua.wrappers.with_fields). That script checks the job's lock.

  KEYS[1]  the job's hash
  KEYS[2…] the keys of the script that moves the job
  ARGV[1]  n, the number of the following names and values
  ARGV[2…] n names and values of fields
  ARGV[n+2…] the arguments of that script
  returns  the reply from that script; if that is an error code, the fields do not change
  event    those of that script
]]
local count = tonumber(ARGV[1])
local reply = move({ unpack(KEYS, 2) }, { unpack(ARGV, count + 2) })
if type(reply) ~= "number" or reply >= 0 then
  redis.call("HSET", KEYS[1], unpack(ARGV, 2, count + 1))
end
return reply
