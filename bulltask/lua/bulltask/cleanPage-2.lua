--[[
  Removes the jobs of one page of a state, except for the next iterations of job schedulers.

  BullMQ's cleanJobsInSet checks at most as many jobs as it may remove, always the same ones, so a small limit would
  never reach those behind jobs that stay. BullMQ's drain has no limit, and its effect on a list or sorted set is that of
  cleanJobsInSet without a time. Therefore, this script copies a page of a list, or of a sorted set of unfinished jobs,
  to a temporary key, and passes that key to BullMQ's script.

  The source of cleanJobsInSet is inserted before this one, as the function `official(KEYS, ARGV)`
  (bulltask.lua.wrappers.with_guard).

  KEYS[1]  the temporary key, which exists only while this script runs
  KEYS[2]  a temporary stream for the event of cleanJobsInSet: the caller adds one event for all pages
  KEYS[3…] the keys of cleanJobsInSet: the state's list or sorted set, events, repeat
  ARGV[1]  key prefix of the queue, with the trailing colon
  ARGV[2]  jobs that are newer than this time stay; "~": all jobs are old enough
  ARGV[3]  the state, as for cleanJobsInSet
  ARGV[4]  number of jobs to check
  ARGV[5]  where the page begins: "" for the first page, then the position from the previous reply
  returns  { ids of the removed jobs; number of jobs that were checked; position of the next page }
]]
local call, page, temporary_events = redis.call, KEYS[1], KEYS[2]
local source, _, schedulers = unpack(KEYS, 3)
local state, size, position = ARGV[3], tonumber(ARGV[4]), ARGV[5]

local function remove(key, limit)
  local removed = official({ key, temporary_events, schedulers }, { ARGV[1], ARGV[2], limit, state })
  call("DEL", temporary_events)
  return removed
end

local function set_of(ids)
  local set = {}
  for _, id in ipairs(ids) do
    set[id] = true
  end
  return set
end

-- The position is the id of the last job that was checked and stays. The oldest jobs are on the right.
local function clean_list()
  local index = position ~= "" and call("LPOS", source, position, "RANK", -1)
  local skipped = index and call("LLEN", source) - index or 0
  local ids = call("LRANGE", source, -skipped - size, -skipped - 1)
  if #ids == 0 then
    return { {}, 0, position }
  end
  call("RPUSH", page, unpack(ids))
  local removed = remove(page, 0)
  position = call("LINDEX", page, 0) or position
  call("DEL", page)
  local is_removed = set_of(removed)
  for i, id in ipairs(ids) do
    if is_removed[id] then
      call("LSET", source, i - #ids - skipped - 1, "")
    end
  end
  if #removed > 0 then
    call("LREM", source, -#removed, "")
  end
  return { removed, #ids, position }
end

-- The position is the score of the last job that was checked, and how many jobs with that score stay.
local function clean_sorted_set()
  local score, kept = string.match(position, "^(.-)/(%d+)$")
  score, kept = score or "-inf", tonumber(kept or 0)
  -- By rank: with LIMIT, Redis would walk over all jobs with this score that stay. There may be a million of them.
  local first = call("ZCOUNT", source, "-inf", "(" .. score) + kept
  local members = call("ZRANGE", source, first, first + size - 1, "WITHSCORES")
  if #members == 0 then
    return { {}, 0, position }
  end
  for i = 1, #members, 2 do
    call("ZADD", page, members[i + 1], members[i])
  end
  local removed = remove(page, 0)
  call("DEL", page)
  if #removed > 0 then
    call("ZREM", source, unpack(removed))
  end
  local last, is_removed = members[#members], set_of(removed)
  if last ~= score then
    kept = 0
  end
  for i = 1, #members, 2 do
    if members[i + 1] == last and not is_removed[members[i]] then
      kept = kept + 1
    end
  end
  return { removed, #members / 2, last .. "/" .. kept }
end

call("DEL", page)
if state == "completed" or state == "failed" then
  local removed = remove(source, size)
  return { removed, #removed, "" }
elseif state == "delayed" or state == "prioritized" then
  return clean_sorted_set()
end
return clean_list()
