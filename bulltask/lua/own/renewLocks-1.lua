--[[
  Renews the locks of all jobs that one worker holds in a queue.

  BullMQ's extendLocks uses SET, which a Redis at maxmemory refuses: every running job would lose its lock and run
  twice. PEXPIRE is allowed there. The effect on the keys is otherwise the same.

  KEYS[1]  stalled set
  ARGV[1]  key prefix of the queue, with the trailing colon
  ARGV[2]  lock duration in milliseconds
  ARGV[3…] token, job id, token, job id …
  returns  the ids whose lock is gone or held by another token
]]
local lost = {}
local renewed = {}
for i = 3, #ARGV, 2 do
  local token, id = ARGV[i], ARGV[i + 1]
  local lock = ARGV[1] .. id .. ":lock"
  if redis.call("GET", lock) == token then
    redis.call("PEXPIRE", lock, ARGV[2])
    renewed[#renewed + 1] = id
  else
    lost[#lost + 1] = id
  end
end
for i = 1, #renewed, 5000 do
  redis.call("SREM", KEYS[1], unpack(renewed, i, math.min(i + 4999, #renewed)))
end
return lost
