--[[
  Returns the unfinished jobs that have a revocation request, and removes obsolete requests.

  Every worker of a queue calls this once a second. Requests exist only while running jobs are being revoked.

  KEYS[1]  revocation requests: ids by time, in milliseconds
  KEYS[2]  completed
  KEYS[3]  failed
  ARGV[1]  key prefix of the queue, with the trailing colon
  ARGV[2]  requests older than this time are removed
  ARGV[3]  maximum number of requests; the oldest ones are removed
  ARGV[4]  number of requests to skip, oldest first
  ARGV[5]  number of requests to check
  returns  ids of the jobs with a lock; ids of the jobs without a lock; ARGV[4] of the next call, 0 when all requests
           were checked. False if there are no requests
]]
local call, requests, locked, unlocked, finished = redis.call, KEYS[1], {}, {}, {}
if call("EXISTS", requests) == 0 then
  return false
end
-- Limited, because removing a million at once would block Redis for half a second.
local obsolete = math.max(call("ZCOUNT", requests, "-inf", "(" .. ARGV[2]), call("ZCARD", requests) - ARGV[3])
if obsolete > 0 then
  call("ZREMRANGEBYRANK", requests, 0, math.min(obsolete, 10000) - 1)
end
local ids = call("ZRANGE", requests, ARGV[4], ARGV[4] + ARGV[5] - 1)
for _, id in ipairs(ids) do
  local job = ARGV[1] .. id
  if call("EXISTS", job) == 0 or call("ZSCORE", KEYS[2], id) or call("ZSCORE", KEYS[3], id) then
    finished[#finished + 1] = id
  elseif call("EXISTS", job .. ":lock") == 1 then
    locked[#locked + 1] = id
  else
    unlocked[#unlocked + 1] = id
  end
end
if #finished > 0 then
  call("ZREM", requests, unpack(finished))
end
return { locked, unlocked, #ids < tonumber(ARGV[5]) and 0 or ARGV[4] + #ids - #finished }
