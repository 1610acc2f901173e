--[[
  Moves a job from a Bull queue (Bull is BullMQ's predecessor) to another queue, in BullMQ's layout.

  The caller has read the job and passes the fields that differ in BullMQ's hash; this script copies all other fields,
  above all the data, unchanged. It first compares `opts` and `attemptsMade` with the values that the caller has read: a
  job that Bull has changed since must be read again. Every write that may fail comes before the first removal, so an
  error may leave the job in both queues, but always in at least one.

  KEYS[1]  Bull's list, sorted set or set that contains the job
  KEYS[2]  Bull's job
  KEYS[3]  its logs
  KEYS[4]  its lock
  KEYS[5]  Bull's sorted set of the priorities of waiting jobs
  KEYS[6]  the key of its debounce id (the job's own key if it has none)
  KEYS[7]  Bull's counter of ids
  KEYS[8]  wait
  KEYS[9]  paused
  KEYS[10] prioritized
  KEYS[11] delayed
  KEYS[12] completed
  KEYS[13] failed
  KEYS[14] active
  KEYS[15] pc
  KEYS[16] meta
  KEYS[17] id
  KEYS[18] marker
  KEYS[19] events
  KEYS[20] the new job
  KEYS[21] its logs
  KEYS[22] the key of its deduplication id (the job's own key if it has none)
  ARGV[1]  Bull's job id
  ARGV[2]  the new job id
  ARGV[3]  its new state: waiting, delayed, completed, failed, or recovered (it was active, but no worker has it)
  ARGV[4]  its field opts as the caller has read it, "" for none
  ARGV[5]  its field attemptsMade as the caller has read it, "" for none
  ARGV[6]  priority
  ARGV[7]  when it finished, for a job in one of Bull 1's sets, which have no scores
  ARGV[8]  its expected position in a list, counted from the right end, from 0
  ARGV[9]  number of fields that are not copied
  ARGV[10…] the names of these fields, then field, value, field, value …
  returns  1: moved; 0: the job is gone; -1: it has no hash; -2: it is locked; -3: it has changed; -4: the new id
           is taken
  events   added, then waiting or delayed; none for jobs that have finished
]]
local id, new_id, state = ARGV[1], ARGV[2], ARGV[3]
local job, new_job = KEYS[2], KEYS[20]

-- Check that the job exists, is unchanged since the caller read it, and may be moved.
local kind = redis.call("TYPE", KEYS[1])["ok"]
local score = ARGV[7]
if kind == "list" then
  local at_position = redis.call("LINDEX", KEYS[1], -tonumber(ARGV[8]) - 1) == id
  if not at_position and not redis.call("LPOS", KEYS[1], id, "RANK", -1) then
    return 0
  end
elseif kind == "zset" then
  score = redis.call("ZSCORE", KEYS[1], id)
  if not score then
    return 0
  end
elseif kind ~= "set" or redis.call("SISMEMBER", KEYS[1], id) == 0 then
  return 0
end
local pairs_read = redis.call("HGETALL", job)
if #pairs_read == 0 then
  return -1
elseif redis.call("EXISTS", KEYS[4]) == 1 then
  return -2
elseif redis.call("EXISTS", new_job) == 1 then
  return -4
end
local fields = {}
for i = 1, #pairs_read, 2 do
  fields[pairs_read[i]] = pairs_read[i + 1]
end
if (fields["opts"] or "") ~= ARGV[4] or (fields["attemptsMade"] or "") ~= ARGV[5] then
  return -3
end

-- The hash is written first, so that Redis at maxmemory rejects this write before anything has changed.
local last_dropped = 9 + tonumber(ARGV[9])
for i = 10, last_dropped do
  fields[ARGV[i]] = nil
end
for i = last_dropped + 1, #ARGV, 2 do
  fields[ARGV[i]] = ARGV[i + 1]
end
local new_pairs = {}
for name, value in pairs(fields) do
  new_pairs[#new_pairs + 1] = name
  new_pairs[#new_pairs + 1] = value
end
redis.call("HSET", new_job, unpack(new_pairs))

-- BullMQ's counter must not issue ids that Bull's counter has issued.
local counter = tonumber(redis.call("GET", KEYS[17]) or 0)
local highest = math.max(counter, tonumber(redis.call("GET", KEYS[7]) or 0))
if #new_id <= 15 and string.match(new_id, "^%d+$") then
  highest = math.max(highest, tonumber(new_id))
end
if highest > counter then
  redis.call("SET", KEYS[17], string.format("%.0f", highest))
end

local meta = redis.call("HMGET", KEYS[16], "paused", "concurrency", "opts.maxLenEvents")
local paused, concurrency, max_events = meta[1], meta[2], meta[3]
if not max_events then
  max_events = 10000
  redis.call("HSET", KEYS[16], "opts.maxLenEvents", max_events)
end

local function emit(...)
  redis.call("XADD", KEYS[19], "MAXLEN", "~", max_events, "*", "event", ...)
end

local function wake_worker()
  if not paused and not (concurrency and redis.call("LLEN", KEYS[14]) >= tonumber(concurrency)) then
    redis.call("ZADD", KEYS[18], 0, "0")
  end
end

local priority = tonumber(ARGV[6])
local wait = paused and KEYS[9] or KEYS[8]
if state == "delayed" then
  redis.call("ZADD", KEYS[11], score, new_id)
  emit("added", "jobId", new_id, "name", fields["name"])
  emit("delayed", "jobId", new_id, "delay", string.format("%.0f", math.floor(tonumber(score) / 4096)))
  local head = redis.call("ZRANGE", KEYS[11], 0, 0, "WITHSCORES")
  redis.call("ZADD", KEYS[18], string.format("%.0f", math.floor(tonumber(head[2]) / 4096)), "1")
elseif state == "completed" then
  redis.call("ZADD", KEYS[12], score, new_id)
elseif state == "failed" then
  redis.call("ZADD", KEYS[13], score, new_id)
else
  if state == "recovered" then
    redis.call("RPUSH", wait, new_id)
  elseif priority > 0 then
    local count = redis.call("INCR", KEYS[15])
    redis.call("ZADD", KEYS[10], string.format("%.0f", priority * 4294967296 + count % 4294967296), new_id)
  else
    redis.call("LPUSH", wait, new_id)
  end
  emit("added", "jobId", new_id, "name", fields["name"])
  emit("waiting", "jobId", new_id)
  wake_worker()
end

if KEYS[6] ~= job and redis.call("GET", KEYS[6]) == id then
  local ttl = redis.call("PTTL", KEYS[6])
  if ttl > 0 then
    redis.call("SET", KEYS[22], new_id, "NX", "PX", ttl)
  else
    redis.call("SET", KEYS[22], new_id, "NX")
  end
  redis.call("DEL", KEYS[6])
end
if redis.call("EXISTS", KEYS[3]) == 1 then
  redis.call("RENAME", KEYS[3], KEYS[21])
end

if kind == "list" then
  redis.call("LREM", KEYS[1], -1, id)
elseif kind == "zset" then
  redis.call("ZREM", KEYS[1], id)
else
  redis.call("SREM", KEYS[1], id)
end
redis.call("ZREM", KEYS[5], id)
redis.call("DEL", job)
return 1
