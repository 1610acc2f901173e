--[[
  Starts a job of a rate-limited task, or throttles it: delays it until its turn.

  Starts are spread evenly: after each start, the next one is possible after the interval. If a start is late, later
  ones may catch up by at most the tolerance. The task's throttled jobs in this queue form a list, ordered by
  priority and then by arrival. A throttled job is in `delayed`, due when it is expected to start. If it is acquired
  before a start is possible, because other starts were late, it is delayed again and keeps its place. When a job
  starts, the first job in the list becomes due at the next possible start if it was due later, because jobs before it
  were removed or the limit was raised.

  If the job is throttled, the jobs of the same task that are next in `wait` are throttled, too, without being acquired.

  The score in the list is also stored in the job's hash, so that jobs that are promoted together keep their order
  (`promotionGuard`).

  The source of BullMQ's moveToDelayed is inserted before this one, as the function `delay(KEYS, ARGV)`
  (bulltask.lua.wrappers.with_delay).

  KEYS[1]  when the next start is possible, in milliseconds
  KEYS[2]  the throttled jobs, a sorted set of job ids
  KEYS[3]  wait
  KEYS[4…] the keys of moveToDelayed
  ARGV[1]  interval between two starts in milliseconds
  ARGV[2]  tolerance in milliseconds
  ARGV[3]  "1": the job goes before all throttled jobs
  ARGV[4]  the task's name
  ARGV[5]  key prefix of the queue
  ARGV[6]  now in milliseconds
  ARGV[7]  job id
  ARGV[8]  token of its lock
  returns  0 if the job may start; the milliseconds until it is due if it is throttled; or moveToDelayed's error code
  event    delayed for each job that is throttled or becomes due earlier; before, released for the acquired job
]]
local call = redis.call
local start_key, list, wait, delay_keys = KEYS[1], KEYS[2], KEYS[3], { unpack(KEYS, 4) }
local marker, delayed, job, events, meta = delay_keys[1], delay_keys[4], delay_keys[5], delay_keys[6], delay_keys[7]
local interval, tolerance, goes_first, task = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == "1", ARGV[4]
local prefix, now, id, token = ARGV[5], tonumber(ARGV[6]), ARGV[7], ARGV[8]
-- SCORES: the width of one priority's range of scores in the prioritized set
local THROTTLED, SCORES, BATCH, KEEP_S = "bulltask:throttled", 0x100000000, 100, 7 * 86400

if call("EXISTS", job) == 0 then
  return -1
end
local holder = call("GET", job .. ":lock")
if holder ~= token then
  return holder and -6 or -2
end

-- The first job in the list. Jobs that were removed, or that Node.js has run, leave the list here.
local function first_throttled()
  for _ = 1, 1000 do
    local first = call("ZRANGE", list, 0, 0)[1]
    if not first then
      return nil
    end
    local fields = redis.pcall("HMGET", prefix .. first, THROTTLED, "finishedOn")
    if not fields.err and fields[1] and not fields[2] then
      return first
    end
    call("ZREM", list, first)
  end
end

local function throttle(member, priority, before)
  priority = tonumber(priority) or 0
  if priority ~= priority or priority < 0 then
    priority = 0
  end
  local low, high = priority * SCORES, string.format("(%.0f", (priority + 1) * SCORES)
  local score = low + SCORES / 2
  if before then
    local first = call("ZRANGEBYSCORE", list, string.format("%.0f", low), high, "WITHSCORES", "LIMIT", 0, 1)[2]
    score = first and tonumber(first) - 1 or score
  else
    local last = call("ZREVRANGEBYSCORE", list, high, string.format("%.0f", low), "WITHSCORES", "LIMIT", 0, 1)[2]
    score = last and tonumber(last) + 1 or score
  end
  call("ZADD", list, string.format("%.0f", score), member)
  return score
end

local max_events
local function set_due(member, due, ...)
  call("ZADD", delayed, string.format("%.0f", due * 0x1000), member)
  call("HSET", prefix .. member, "delay", string.format("%.0f", due - now), ...)
  max_events = max_events or call("HGET", meta, "opts.maxLenEvents") or 10000
  local due_text = string.format("%.0f", due)
  call("XADD", events, "MAXLEN", "~", max_events, "*", "event", "delayed", "jobId", member, "delay", due_text)
end

local function update_marker()
  local earliest = call("ZRANGE", delayed, 0, 0, "WITHSCORES")[2]
  if earliest then
    call("ZADD", marker, tonumber(earliest) / 0x1000, "1")
  end
end

local function advance_first(start)
  local first, due = first_throttled(), math.ceil(math.max(now, start))
  local score = first and call("ZSCORE", delayed, first)
  if score and math.floor(tonumber(score) / 0x1000) > due then
    set_due(first, due)
    update_marker()
  end
end

local function store(start)
  local keep_ms = math.ceil(math.max(0, start - now) + tolerance) + 1000
  call("SET", start_key, string.format("%.3f", start), "PX", string.format("%.0f", keep_ms))
end

local next_start = tonumber(call("GET", start_key)) or 0
if next_start > now + interval then  -- the limit was lower, or the clock was set back
  next_start = now + interval
  store(next_start)
end
local was_throttled = call("ZSCORE", list, id)

if now >= next_start and (was_throttled or goes_first or not first_throttled()) then
  next_start = math.max(next_start, now - tolerance) + interval
  store(next_start)
  call("ZREM", list, id)
  call("HDEL", job, THROTTLED)
  advance_first(next_start)
  return 0
end

local place = was_throttled or string.format("%.0f", throttle(id, call("HGET", job, "priority"), goes_first))
local base = math.max(now, next_start)
local due = math.ceil(base + call("ZRANK", list, id) * interval)
local delay_ms = string.format("%.0f", due - now)
if call("LPOS", delay_keys[2], id) then
  call("XADD", events, "*", "event", "released", "jobId", id)
end
local code = delay(delay_keys, { prefix, ARGV[6], id, token, delay_ms, "1", "" })
if code ~= 0 then
  call("ZREM", list, id)
  return code
end
call("HSET", job, THROTTLED, place)
call("HINCRBY", job, "ats", -1)  -- the attempt has not started

-- Also throttle the next jobs in `wait`, up to the first that a worker must acquire as usual: a job of another task,
-- one that has started before, one of a job scheduler (its next iteration is added first), one that fails, or one that
-- does not belong at the end of the list (it has a priority or is lifo).
local next_ids, throttled, score, rank = call("LRANGE", wait, -BATCH, -1), 0, nil, nil
for i = #next_ids, 1, -1 do
  local other = next_ids[i]
  local fields = redis.pcall("HMGET", prefix .. other, "name", "ats", "rjk", "defa", "opts", "priority", THROTTLED)
  local is_same = not fields.err and fields[1] == task and (tonumber(fields[2]) or 0) == 0
  local joins_at_end = (tonumber(fields[6]) or 0) == 0 and not string.find(fields[5] or "", '"lifo":true', 1, true)
  if not is_same or fields[3] or fields[4] or not joins_at_end then
    break
  end
  local old_rank = fields[7] and call("ZRANK", list, other)
  if old_rank then
    set_due(other, math.ceil(base + old_rank * interval))
  else
    if score then
      score, rank = score + 1, rank + 1
      call("ZADD", list, string.format("%.0f", score), other)
    else
      score = throttle(other, 0, false)
      rank = call("ZRANK", list, other)
    end
    set_due(other, math.ceil(base + rank * interval), THROTTLED, string.format("%.0f", score))
  end
  throttled = throttled + 1
end
if throttled > 0 then
  call("LTRIM", wait, 0, -throttled - 1)
end
call("EXPIRE", list, KEEP_S)
advance_first(base)
update_marker()
return math.max(1, due - now)
