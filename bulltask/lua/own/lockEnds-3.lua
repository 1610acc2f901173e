--[[
  Says when the locks of stalled jobs ran out, and notes when those of the active ones will.

  A lock that has run out is gone. But a stalled job was marked by the check before, and not renewed since, or the mark
  would be gone. So each check notes when the locks of the jobs end that it has marked. Where a lock was gone by then,
  it is the time of that check.

  KEYS[1]  ours: the ends of the locks by job id, a hash with an expiry
  KEYS[2]  stalled set
  KEYS[3]  stalled check
  ARGV[1]  key prefix of the queue, with the trailing colon
  ARGV[2]  the time that the check was given: nothing is noted if it was another one that marked the jobs
  ARGV[3]  how long the notes are kept, in milliseconds
  ARGV[4…] ids of the jobs that the check has found stalled
  returns  for each of them epoch milliseconds, or nil where nothing was noted
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
