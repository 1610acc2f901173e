--[[
  Stores the checkpoint of a running job, unless another worker has the job.

  The script also resets the counters of crashes and stalls, which limit how many times a job may run again without
  making progress: this job has made progress.

  KEYS[1]  the job's hash
  KEYS[2]  the job's lock
  ARGV[1]  token
  ARGV[2]  the checkpoint
  returns  1 if it was stored, 0 if the lock has expired; -1 if there is no such job, -6 if another worker has its lock
]]
if redis.call("EXISTS", KEYS[1]) == 0 then
  return -1
end
local holder = redis.call("GET", KEYS[2])
if not holder then
  return 0
end
if holder ~= ARGV[1] then
  return -6
end
-- HDEL comes first, because Redis at maxmemory rejects HSET unless the script has already written.
redis.call("HDEL", KEYS[1], "stc", "bulltask:crashes", "bulltask:crashTokens")
redis.call("HSET", KEYS[1], "bulltask:checkpoint", ARGV[2])
return 1
