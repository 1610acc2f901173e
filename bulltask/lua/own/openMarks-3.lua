--[[
  Returns the jobs that are marked to be ended and have not ended, and takes away the marks that are of no use any more.

  Every worker of a queue asks this once a second. There are marks only while somebody has jobs ended that run.

  KEYS[1]  marks: ids by the time of the wish, in milliseconds
  KEYS[2]  completed
  KEYS[3]  failed
  ARGV[1]  key prefix of the queue, with the trailing colon
  ARGV[2]  marks that are older than this time are taken away
  ARGV[3]  how many marks are kept, the newest ones
  ARGV[4]  so many marks, from the oldest one on, are not looked at
  ARGV[5]  how many are
  returns  two lists of ids: jobs that somebody has a lock of, and the others; and ARGV[4] of the next call, which is 0
           when all were looked at; nothing where there are no marks
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
