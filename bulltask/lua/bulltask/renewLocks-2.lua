--[[
  Renews the locks of all jobs that one worker is running in a queue.

  BullMQ's extendLocks uses SET, which a Redis at maxmemory rejects, so every running job would lose its lock and run
  twice. This script uses PEXPIRE, which Redis still accepts. Apart from that, the effect on the keys is the same.

  An expired lock is reacquired if the job is still active, because in that case no other worker has the job. As a
  result, running jobs do not run twice after Redis was unavailable for longer than a lock lasts.

  KEYS[1]  stalled set
  KEYS[2]  active list
  ARGV[1]  key prefix of the queue, with the trailing colon
  ARGV[2]  lock duration in milliseconds
  ARGV[3…] token, job id, token, job id …
  returns  the ids whose lock is lost: held by another token, or the job is no longer active
]]
local function reacquire(lock, id, token)
  if not redis.call("LPOS", KEYS[2], id) then
    return false
  end
  -- SREM comes first, because Redis at maxmemory rejects SET unless the script has already written.
  redis.call("SREM", KEYS[1], id)
  redis.call("SET", lock, token, "PX", ARGV[2])
  return true
end
local lost = {}
local renewed = {}
for i = 3, #ARGV, 2 do
  local token, id = ARGV[i], ARGV[i + 1]
  local lock = ARGV[1] .. id .. ":lock"
  local holder = redis.pcall("GET", lock)  -- a lock that is not a string counts as lost
  if holder == token then
    redis.call("PEXPIRE", lock, ARGV[2])
    renewed[#renewed + 1] = id
  elseif holder or not reacquire(lock, id, token) then
    lost[#lost + 1] = id
  end
end
for i = 1, #renewed, 5000 do
  redis.call("SREM", KEYS[1], unpack(renewed, i, math.min(i + 4999, #renewed)))
end
return lost
