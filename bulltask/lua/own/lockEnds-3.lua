--[[
  Returns when the locks of stalled jobs expired, and records when those of the active jobs will.

  An expired lock is gone. But a stalled job was marked by the previous check, and its lock not renewed since, or the
  mark would be gone. So each check records when the locks of the jobs end that it has marked. If a lock was gone by
  then, the time of that check is recorded.

  KEYS[1]  the ends of the locks by job id: a hash of bulltask's, with an expiry
  KEYS[2]  stalled set
  KEYS[3]  stalled check
  ARGV[1]  key prefix of the queue, with the trailing colon
  ARGV[2]  the time that was passed to the check; nothing is recorded if another check marked the jobs
  ARGV[3]  how long the record is kept, in milliseconds
  ARGV[4…] ids of the jobs that the check found stalled
  returns  for each of them epoch milliseconds, or nil if nothing was recorded
]]
local ends = {}
for i = 4, #ARGV do
  ends[#ends + 1] = redis.call("HGET", KEYS[1], ARGV[i])
end
if redis.call("GET", KEYS[3]) ~= ARGV[2] then
  return ends
end
redis.call("DEL", KEYS[1])
local now, noted = tonumber(ARGV[2]), {}
for _, id in ipairs(redis.call("SMEMBERS", KEYS[2])) do
  noted[#noted + 1] = id
  noted[#noted + 1] = string.format("%.0f", now + math.max(0, redis.call("PTTL", ARGV[1] .. id .. ":lock")))
end
for i = 1, #noted, 4000 do
  redis.call("HSET", KEYS[1], unpack(noted, i, math.min(i + 3999, #noted)))
end
redis.call("PEXPIRE", KEYS[1], ARGV[3])
return ends
