--[[
  Returns a queue's figures: the lengths of its states, since when its oldest job has been waiting, and how many jobs
  were added and have finished lately. It reads a bounded number of jobs and events.

  KEYS[1]  wait
  KEYS[2]  paused
  KEYS[3]  active
  KEYS[4]  prioritized
  KEYS[5]  delayed
  KEYS[6]  waiting-children
  KEYS[7]  completed
  KEYS[8]  failed
  KEYS[9]  meta
  KEYS[10] events
  KEYS[11] bulltask's workers of the queue
  KEYS[12] who has paused the queue
  KEYS[13] repeat
  ARGV[1]  key prefix of the queue's jobs
  ARGV[2]  now, in milliseconds
  ARGV[3]  period of the rates, in milliseconds; 0 for neither rates nor KEYS[12], and no event is read
  returns  the lengths of KEYS[1] to KEYS[8]; the number of due delayed jobs; since when the oldest job has been waiting,
           "" if none is or that is unknown; the number of jobs that were added, and that have finished, and in how many
           milliseconds, "" if that is unknown; KEYS[12] if it is paused; the ids of the workers; paused, concurrency, max,
           duration of KEYS[9]; when the first job scheduler's next job is due, "" if there is none
]]
local base, now, period = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local JOBS, EVENTS, WORKERS, PRIORITY, DELAYED = 10, 100, 1000, 4294967296, 4096
local figures, oldest = {}, nil

local function note(since)
  oldest = math.min(oldest or since, since)
end

-- A job that was acquired before was put back at an unknown time.
local function note_job(id)
  local timestamp, acquired, opts = unpack(redis.call("HMGET", base .. id, "timestamp", "processedOn", "opts"))
  if not tonumber(timestamp) or acquired or oldest and tonumber(timestamp) >= oldest then
    return
  end
  local is_object, options = pcall(cjson.decode, opts or "")
  local delay = is_object and type(options) == "table" and tonumber(options["delay"]) or 0
  note(math.min(tonumber(timestamp) + delay, now))
end

for i = 1, 3 do
  figures[i] = redis.call("LLEN", KEYS[i])
  local last = redis.call("LINDEX", KEYS[i], -1)
  if last and last:sub(1, 2) == "0:" then -- BullMQ 4's marker
    figures[i] = figures[i] - 1
  end
end
for i = 4, 8 do
  figures[i] = redis.call("ZCARD", KEYS[i])
end

-- The jobs that run next; of prioritized jobs also those with the lowest priority, which wait longest.
for i = 1, 2 do
  local ids = redis.call("LRANGE", KEYS[i], -JOBS, -1)
  for at = #ids, 1, -1 do -- the next one is first: then most of the others need no closer look
    note_job(ids[at])
  end
end
if figures[4] > 0 then
  local last = redis.call("ZREVRANGE", KEYS[4], 0, 0, "WITHSCORES")
  local lowest = math.floor(tonumber(last[2]) / PRIORITY) * PRIORITY
  for _, id in ipairs(redis.call("ZRANGEBYSCORE", KEYS[4], string.format("%.0f", lowest), "+inf", "LIMIT", 0, JOBS)) do
    note_job(id)
  end
  for _, id in ipairs(redis.call("ZRANGE", KEYS[4], 0, JOBS - 1)) do
    note_job(id)
  end
end
figures[9] = redis.call("ZCOUNT", KEYS[5], "-inf", string.format("%.0f", (now + 1) * DELAYED - 1))
if figures[9] > 0 then
  local first = redis.call("ZRANGE", KEYS[5], 0, 0, "WITHSCORES")
  note(math.min(math.floor(tonumber(first[2]) / DELAYED), now))
end
figures[10] = oldest and string.format("%.0f", oldest) or ""

local meta = redis.call("HMGET", KEYS[9], "paused", "concurrency", "max", "duration", "opts.maxLenEvents")
local length = period > 0 and redis.call("XLEN", KEYS[10]) or 0
local from = string.format("%.0f", now - period)
local events = length > 0 and redis.call("XREVRANGE", KEYS[10], "+", from, "COUNT", EVENTS) or {}
local added, finished, window = 0, 0, period
for _, event in ipairs(events) do
  local fields = event[2]
  for i = 1, #fields, 2 do
    if fields[i] == "event" then
      added = added + (fields[i + 1] == "added" and 1 or 0)
      finished = finished + ((fields[i + 1] == "completed" or fields[i + 1] == "failed") and 1 or 0)
    end
  end
end
local is_trimmed = length == #events and length >= (tonumber(meta[5]) or 10000)
if length == 0 then
  window = ""
elseif #events == EVENTS or is_trimmed then
  window = math.max(1, now - tonumber(events[#events][1]:match("^%d+")))
end
figures[11], figures[12], figures[13] = added, finished, window

-- Another client does not remove the note when it resumes the queue.
local note = meta[1] and period > 0 and redis.call("GET", KEYS[12]) or ""
local is_object, pause = pcall(cjson.decode, note)
if is_object and type(pause) == "table" and tonumber(pause["at_ms"]) then
  local after = string.format("%.0f", tonumber(pause["at_ms"]) + 1000)
  for _, event in ipairs(redis.call("XREVRANGE", KEYS[10], "+", after, "COUNT", EVENTS)) do
    if event[2][1] == "event" and event[2][2] == "resumed" then
      note = ""
    end
  end
end
figures[14] = note
figures[15] = redis.call("ZRANGEBYSCORE", KEYS[11], "(" .. ARGV[2], "+inf", "LIMIT", 0, WORKERS)
for i = 1, 4 do
  figures[15 + i] = meta[i] or ""
end
figures[20] = redis.call("ZRANGE", KEYS[13], 0, 0, "WITHSCORES")[2] or ""
return figures
