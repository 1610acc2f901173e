--[[
  Retries failed jobs, except for those that were revoked.

  This is the end of a script. The text of BullMQ's moveJobsToWait precedes it, as the function `retry(KEYS, ARGV)`
  (bulltask.lua.wrappers.retrying). That function takes all jobs of a sorted set, so it is called with a temporary one
  that has the jobs to retry; they are removed from `failed` when it has succeeded.

  KEYS[1]  the temporary sorted set, which exists only while this script runs
  KEYS[2…] those of moveJobsToWait, for failed jobs
  ARGV[1]  the failedReason of revoked jobs
  ARGV[2]  id of the last job that the previous call has skipped; "" for the first call
  ARGV[3…] those of moveJobsToWait; the first of them is the number of jobs to check
  returns  { 1 if more jobs may be left, else 0; id of the last job that was skipped, for the next call }
  event    those of moveJobsToWait
]]
local call, chosen = redis.call, KEYS[1]
local places, args = { unpack(KEYS, 2) }, { unpack(ARGV, 3) }
local base, failed = places[1], places[3]
local count, before = tonumber(args[1]), tonumber(args[2])

-- If the last skipped job is gone by now, begin again: the others are skipped again.
local first = (call("ZRANK", failed, ARGV[2]) or -1) + 1
local page = call("ZRANGE", failed, first, first + count - 1, "WITHSCORES")
local more, last, ids = #page == 2 * count and 1 or 0, ARGV[2], {}
call("DEL", chosen)
for i = 1, #page, 2 do
  local id, ended_at = page[i], page[i + 1]
  if tonumber(ended_at) > before then
    more = 0
    break
  end
  if call("HGET", base .. id, "failedReason") == ARGV[1] then
    last = id
  else
    call("ZADD", chosen, ended_at, id)
    ids[#ids + 1] = id
  end
end
if #ids > 0 then
  places[3] = chosen
  retry(places, args)
  for _, id in ipairs(ids) do
    call("ZREM", failed, id)
  end
end
return { more, last }
