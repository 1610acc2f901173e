--[[
  Checks one page of the active jobs for stalled ones, so that a check never blocks Redis for long.

  BullMQ's moveStalledJobsToWait checks all active jobs in one call, and searches the list from end to end for each
  stalled one. With at most one page of active jobs, this script calls BullMQ's. Otherwise, each call takes a page from
  the right end of `active` and passes it to BullMQ's script in temporary keys; the jobs that stay active are added to
  the left end, so that they are in the same order again when the check is complete.

  The source of moveStalledJobsToWait, with stalledGuard, is inserted before this one, as the function
  `official(KEYS, ARGV)` (bulltask.lua.wrappers.with_guard).

  KEYS[1]  jobs that the previous check has marked, and this one has not checked yet
  KEYS[2]  temporary list of active jobs; it exists only while this script runs, like the next two
  KEYS[3]  temporary set of marked jobs
  KEYS[4]  temporary throttle
  KEYS[5…] the keys of moveStalledJobsToWait
  ARGV[1…] the arguments of moveStalledJobsToWait; ARGV[3] is the time, ARGV[4] the interval
  ARGV[5]  number of active jobs that this check has not examined; "" for the first call
  ARGV[6]  page size
  returns  { ids of the jobs that are waiting again; ARGV[5] of the next call, 0 if the check is complete }
  event    those of moveStalledJobsToWait
]]
local call, marked, page, page_marked, throttle = redis.call, KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local keys, args = { unpack(KEYS, 5) }, { unpack(ARGV, 1, 4) }
local stalled, active, check_key = keys[1], keys[3], keys[4]
local now, interval = ARGV[3], ARGV[4]
local left, size = tonumber(ARGV[5]), tonumber(ARGV[6])

if not left then
  -- The next check may begin after this client's interval, even if a client with a longer one has made the last check.
  local ttl = call("PTTL", check_key)
  if ttl == -1 or ttl > tonumber(interval) then
    call("PEXPIRE", check_key, interval)
  end
  left = call("LLEN", active)
  if call("EXISTS", check_key) == 1 or (left <= size and call("SCARD", stalled) <= size) then
    return { official(keys, args), 0 }
  end
  call("UNLINK", marked)
  if call("EXISTS", stalled) == 1 then
    call("RENAME", stalled, marked)
  end
elseif (call("GET", check_key) or now) ~= now then
  return { {}, 0 } -- another client has begun the next check
end
-- Again in each call, because a check may take longer than the interval.
call("SET", check_key, now, "PX", interval)
call("PEXPIRE", marked, 2 * interval)

local ids, released = call("LRANGE", active, -math.min(size, left), -1), {}
if #ids > 0 then
  call("DEL", page, page_marked, throttle)
  call("LTRIM", active, 0, -#ids - 1)
  call("RPUSH", page, unpack(ids))
  for _, id in ipairs(ids) do
    if call("SISMEMBER", marked, id) == 1 then
      call("SADD", page_marked, id)
    end
  end
  keys[1], keys[3], keys[4] = page_marked, page, throttle
  released = official(keys, args)
  local kept = call("LRANGE", page, 0, -1)
  for i = #kept, 1, -1 do
    call("LPUSH", active, kept[i])
    call("SADD", stalled, kept[i])
  end
  call("DEL", page, page_marked, throttle)
end
left = left - #ids
if left <= 0 or #ids == 0 then
  call("UNLINK", marked)
  left = 0
end
return { released, left }
