--[[
  Retries failed jobs, except for those that were revoked.

  The source of BullMQ's moveJobsToWait is inserted before this one, as the function `retry(KEYS, ARGV)`
  (bulltask.lua.wrappers.retry_failed). That function moves all jobs of a sorted set, so it is called with a temporary
  set of the jobs to retry; they are removed from `failed` after it has succeeded.

  KEYS[1]  the temporary sorted set, which exists only while this script runs
  KEYS[2…] the keys of moveJobsToWait, for failed jobs
  ARGV[1]  the failedReason of revoked jobs
  ARGV[2]  id of the last job that the previous call skipped; "" for the first call
  ARGV[3…] the arguments of moveJobsToWait; the first is the number of jobs to check
  returns  { 1 if more jobs may be left, else 0; id of the last job that was skipped, for the next call }
  event    those of moveJobsToWait
]]
local call, selected = redis.call, KEYS[1]
local retry_keys, retry_args = { unpack(KEYS, 2) }, { unpack(ARGV, 3) }
local base, failed = retry_keys[1], retry_keys[3]
local count, before = tonumber(retry_args[1]), tonumber(retry_args[2])

-- If the last skipped job is gone by now, start at the beginning: revoked jobs are skipped again.
local first = (call("ZRANK", failed, ARGV[2]) or -1) + 1
local page = call("ZRANGE", failed, first, first + count - 1, "WITHSCORES")
local more, last, ids = #page == 2 * count and 1 or 0, ARGV[2], {}
call("DEL", selected)
for i = 1, #page, 2 do
  local id, finished_at = page[i], page[i + 1]
  if tonumber(finished_at) > before then
    more = 0
    break
  end
  if call("HGET", base .. id, "failedReason") == ARGV[1] then
    last = id
  else
    call("ZADD", selected, finished_at, id)
    ids[#ids + 1] = id
  end
end
if #ids > 0 then
  retry_keys[3] = selected
  retry(retry_keys, retry_args)
  for _, id in ipairs(ids) do
    call("ZREM", failed, id)
  end
end
return { more, last }
