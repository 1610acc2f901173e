--[[
  Delays a job that this worker cannot run, and notes it among those that wait for another worker, in one step.

  The source of moveToDelayed is inserted before this one, as the function `move(KEYS, ARGV)`
  (bulltask.lua.wrappers.delay_incompatible). That script checks the job's lock.

  KEYS[1]  the job's hash
  KEYS[2]  the queue's incompatible jobs: a sorted set of ids with the times when they are due
  KEYS[3…] the keys of moveToDelayed
  ARGV[1]  how long a job is delayed at most, in milliseconds
  ARGV[2]  n, the number of the following names and values
  ARGV[3…] n names and values of fields
  ARGV[n+3…] the arguments of moveToDelayed; the second is the time, the third the job's id, the fifth the delay
  returns  the reply from moveToDelayed; if that is an error code, nothing changes
  event    those of moveToDelayed
]]
local max_delay, count = tonumber(ARGV[1]), tonumber(ARGV[2])
local args = { unpack(ARGV, count + 3) }
local reply = move({ unpack(KEYS, 3) }, args)
if type(reply) == "number" and reply < 0 then
  return reply
end
redis.call("HSET", KEYS[1], unpack(ARGV, 3, count + 2))
-- Jobs that are already due need no worker to make them due.
redis.call("ZREMRANGEBYSCORE", KEYS[2], "-inf", args[2])
redis.call("ZADD", KEYS[2], string.format("%.0f", args[2] + args[5]), args[3])
redis.call("PEXPIRE", KEYS[2], 2 * max_delay)
return reply
