--[[
  Records that a worker runs a version of its app's schedule, and returns the version that is in effect.

  A version is the hash of all entries. Versions are numbered in the order in which workers first run them, and of the
  versions that live workers run, the one with the highest number is in effect. During a deployment, this is the new
  one, even if a worker with the old code restarts. When its last worker has left, the version that still runs is in
  effect, for example after the deployment was rolled back.

  Versions without a worker keep their number for a day if it is lower than that of the version in effect. A higher one
  is forgotten, so that it counts as new if it is deployed again.

  KEYS[1]  hash of the app: `worker:ID` -> "TIME VERSION", `version:VERSION` -> "TIME NUMBER", `checked` -> TIME
  ARGV[1]  the worker's id
  ARGV[2]  its version
  ARGV[3]  the number of this version when the worker last ran this script, 0 for none: Redis may have lost it
  ARGV[4]  the time in milliseconds
  ARGV[5]  how long after its last call a worker counts as live
  ARGV[6]  how often the schedule is checked
  returns  the number of the worker's version, 1 if this worker must check the schedule now, the version in effect, and
           the ids of the workers that run it
]]
local call, key, worker, version = redis.call, KEYS[1], ARGV[1], ARGV[2]
local now, live_ms, day_ms = tonumber(ARGV[4]), tonumber(ARGV[5]), 86400000
local numbers, seen, workers, highest = {}, {}, {}, 0

local function parse(value)
  local time, rest = string.match(value, "^(%d+) (.*)$")
  return tonumber(time) or 0, rest or ""
end

call("HSET", key, "worker:" .. worker, ARGV[4] .. " " .. version)
local fields = call("HGETALL", key)
for i = 1, #fields, 2 do
  local kind, name = string.match(fields[i], "^(%l+):(.*)$")
  local time, rest = parse(fields[i + 1])
  if kind == "version" then
    numbers[name], seen[name] = tonumber(rest) or 0, time
    highest = math.max(highest, numbers[name])
  elseif kind == "worker" and math.abs(now - time) > live_ms then
    call("HDEL", key, fields[i])
  elseif kind == "worker" then
    workers[rest] = workers[rest] or {}
    table.insert(workers[rest], name)
  end
end

local known = tonumber(ARGV[3])
numbers[version] = numbers[version] or (known > 0 and known) or highest + 1
local newest = version
for name in pairs(workers) do
  local number = numbers[name] or 0
  -- Two have the same number if one of them has been forgotten.
  if number > numbers[newest] or (number == numbers[newest] and name > newest) then
    newest = name
  end
end
for name, number in pairs(numbers) do
  if workers[name] then
    call("HSET", key, "version:" .. name, ARGV[4] .. " " .. number)
  elseif number > numbers[newest] or now - seen[name] > day_ms then
    call("HDEL", key, "version:" .. name)
  end
end
call("PEXPIRE", key, 7 * day_ms)

local due = 0
local checked = tonumber(call("HGET", key, "checked")) or 0
if newest == version and math.abs(now - checked) >= tonumber(ARGV[6]) then
  call("HSET", key, "checked", ARGV[4])
  due = 1
end
return { numbers[version], due, newest, workers[newest] }
