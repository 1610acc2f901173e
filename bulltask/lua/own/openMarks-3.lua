--[[
  Returns the jobs that are marked as revoked and have not finished, and removes the marks that are obsolete.

  Every worker of a queue calls this once a second. Marks exist only while running jobs are being revoked.

  KEYS[1]  marks: ids by the time of revocation, in milliseconds
  KEYS[2]  completed
  KEYS[3]  failed
  ARGV[1]  key prefix of the queue, with the trailing colon
  ARGV[2]  marks older than this time are removed
  ARGV[3]  maximum number of marks; the oldest ones are removed
  ARGV[4]  number of marks to skip, from the oldest one on
  ARGV[5]  number of marks to check
  returns  two lists of ids: jobs with a lock, and the others; then ARGV[4] of the next call, 0 when all were checked.
           Nothing if there are no marks
]]
local call, marks, held, free, ended = redis.call, KEYS[1], {}, {}, {}
if call("EXISTS", marks) == 0 then
  return false
end
call("ZREMRANGEBYSCORE", marks, "-inf", "(" .. ARGV[2])
call("ZREMRANGEBYRANK", marks, 0, -ARGV[3] - 1)
local ids = call("ZRANGE", marks, ARGV[4], ARGV[4] + ARGV[5] - 1)
for _, id in ipairs(ids) do
  local job = ARGV[1] .. id
  if call("EXISTS", job) == 0 or call("ZSCORE", KEYS[2], id) or call("ZSCORE", KEYS[3], id) then
    ended[#ended + 1] = id
  elseif call("EXISTS", job .. ":lock") == 1 then
    held[#held + 1] = id
  else
    free[#free + 1] = id
  end
end
if #ended > 0 then
  call("ZREM", marks, unpack(ended))
end
return { held, free, #ids < tonumber(ARGV[5]) and 0 or ARGV[4] + #ids - #ended }
