--[[
  Returns when the locks of stalled jobs expired, and records when the locks of the active jobs will expire.

  An expired lock no longer exists, so its expiry must be recorded beforehand. A stalled check adds all active jobs to the
  stalled set, and a renewal removes the job from it. A job that is still in the set at the next check, without a lock,
  is stalled: its lock has not been renewed since the previous check. Therefore, each check records when the locks of
  the jobs in the set will expire; for a job without a lock, it records the time of the check. With more than a thousand
  jobs, nothing is recorded, because that would block Redis.

  KEYS[1]  expiry times of locks by job id (bulltask's own hash, which expires)
  KEYS[2]  stalled set
  KEYS[3]  stalled check
  ARGV[1]  key prefix of the queue, with the trailing colon
  ARGV[2]  the time that was passed to the check; nothing is recorded if another check has filled the stalled set
  ARGV[3]  how long the record is kept, in milliseconds
  ARGV[4…] ids of the stalled jobs
  returns  for each of them epoch milliseconds, or nil if nothing was recorded
]]
local expiries = {}
for i = 4, #ARGV do
  expiries[#expiries + 1] = redis.call("HGET", KEYS[1], ARGV[i])
end
if redis.call("GET", KEYS[3]) ~= ARGV[2] then
  return expiries
end
redis.call("DEL", KEYS[1])
if redis.call("SCARD", KEYS[2]) > 1000 then
  return expiries
end
local now, record = tonumber(ARGV[2]), {}
for _, id in ipairs(redis.call("SMEMBERS", KEYS[2])) do
  record[#record + 1] = id
  record[#record + 1] = string.format("%.0f", now + math.max(0, redis.call("PTTL", ARGV[1] .. id .. ":lock")))
end
for i = 1, #record, 4000 do
  redis.call("HSET", KEYS[1], unpack(record, i, math.min(i + 3999, #record)))
end
redis.call("PEXPIRE", KEYS[1], ARGV[3])
return expiries
