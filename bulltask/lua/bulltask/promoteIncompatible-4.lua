--[[
  Makes jobs due that wait for a worker that can run them, if this worker has their tasks.

  BullMQ's promote is not used, because it needs a command that workers do not need otherwise. The next fetch moves jobs
  that are due to the waiting ones.

  KEYS[1]  the queue's incompatible jobs: a sorted set of ids with the times when they are due
  KEYS[2]  delayed
  KEYS[3]  marker
  KEYS[4]  meta
  ARGV[1]  the prefix of the queue's keys
  ARGV[2]  the time in milliseconds
  ARGV[3]  how many jobs to skip: those that earlier calls have left
  ARGV[4]  how many jobs to check
  ARGV[5…] the names of the worker's tasks
  returns  how many jobs are due now, and how many the next call skips; -1 if all were checked
  event    none
]]
local base, now, skipped, page = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local tasks, due = {}, 0
for index = 5, #ARGV do
  tasks[ARGV[index]] = true
end
local ids = redis.call("ZRANGE", KEYS[1], skipped, skipped + page - 1)
for _, id in ipairs(ids) do
  local name = redis.pcall("HGET", base .. id, "name")  -- a key of another type has no name
  if type(name) == "string" and not tasks[name] then
    skipped = skipped + 1
  else
    redis.call("ZREM", KEYS[1], id)
    local score = redis.call("ZSCORE", KEYS[2], id)
    if score and tonumber(score) > now * 4096 then
      redis.call("ZADD", KEYS[2], string.format("%.0f", now * 4096), id)
      due = due + 1
    end
  end
end
if due > 0 and not redis.call("HGET", KEYS[4], "paused") then
  redis.call("ZADD", KEYS[3], 0, "0")
end
return { due, #ids < page and -1 or skipped }
