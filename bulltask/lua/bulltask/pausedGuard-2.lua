--[[
  Creates or updates a job scheduler; if it is paused, it stays paused.

  The source of BullMQ's addJobScheduler is inserted before this one, as the function `official(KEYS, ARGV)`
  (bulltask.lua.wrappers.with_guard).

  KEYS[1]  paused schedulers, by the times of the next jobs that they had
  KEYS[2]  the scheduler while it is paused (see pauseScheduler)
  KEYS[3…] the keys of addJobScheduler
  ARGV[1…] the arguments of addJobScheduler, of which this script uses
  ARGV[1]  the next time by the pattern
  ARGV[2]  msgpack: the schedule
  ARGV[3]  the scheduler's id
  ARGV[4]  data of its jobs
  ARGV[5]  msgpack: options of its jobs
  ARGV[7]  the time in milliseconds
  ARGV[10] the new token of the paused scheduler
  returns  the reply from BullMQ's script; {"paused", 0} if it is paused
  event    those of BullMQ's script
]]
local call, paused, own, keys, id = redis.call, KEYS[1], KEYS[2], { unpack(KEYS, 3) }, ARGV[3]
if call("ZSCORE", paused, id) and call("ZSCORE", keys[1], id) then
  -- A client that does not know pauses has added the scheduler again.
  call("ZREM", paused, id)
  call("DEL", own)
end
local time = call("ZSCORE", paused, id)
if not time then
  return official(keys, ARGV)
end

local rule, template, now = cmsgpack.unpack(ARGV[2]), cjson.encode(cmsgpack.unpack(ARGV[5])), tonumber(ARGV[7])
local fields = { "name", rule["name"], "token", ARGV[10] }
local function set(name, value)
  if value then
    fields[#fields + 1] = name
    fields[#fields + 1] = value
  end
end
for _, name in ipairs({ "tz", "limit", "pattern", "startDate", "endDate", "every" }) do
  set(name, rule[name])
end
for _, name in ipairs({ "ic", "pausedBy", "pausedAt", "removed" }) do
  set(name, call("HGET", own, name))
end
set("opts", template ~= "{}" and template)
set("data", ARGV[4] ~= "{}" and ARGV[4])
local offset = rule["offset"]
if rule["pattern"] then
  time = ARGV[1]
elseif tonumber(call("HGET", own, "every") or "") ~= rule["every"] then
  time = math.max(rule["startDate"] or now, now) -- a new interval starts now, as in BullMQ
else
  offset = offset or call("HGET", own, "offset")
end
set("offset", offset)
call("DEL", own)
call("HSET", own, unpack(fields))
call("ZADD", paused, time, id)
return { "paused", 0 }
