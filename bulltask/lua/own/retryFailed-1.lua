--[[
  Lets failed jobs wait again, but leaves those that were revoked.

  It is the end of a script, not a whole one: in front of it the text of BullMQ's moveJobsToWait stands as the function
  `retry(KEYS, ARGV)` (bulltask.lua.wrappers.retrying). That function takes all jobs of a sorted set, so it is given one
  of ours that has the jobs to be retried; they are taken out of `failed` when it has succeeded.

  KEYS[1]  a sorted set of ours, there only while this script runs
  KEYS[2…] those of moveJobsToWait, for failed jobs
  ARGV[1]  the failedReason of revoked jobs
  ARGV[2]  the id of the last job that the call before has left; "" for the first call
  ARGV[3…] those of moveJobsToWait; the first of them says how many jobs are looked at
  returns  { 1 when more jobs may be there, else 0; the id of the last job that was left, for the next call }
  event    those of moveJobsToWait
]]
local call, chosen = redis.call, KEYS[1]
local places, args = { unpack(KEYS, 2) }, { unpack(ARGV, 3) }
local base, failed = places[1], places[3]
local count, before = tonumber(args[1]), tonumber(args[2])

-- A job that was left and is gone meanwhile: from the start again, jobs that were left are left again.
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
