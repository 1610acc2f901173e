--[[
  Makes jobs due that wait for a worker that can run them, if this worker has their tasks.

  The source of BullMQ's promote is inserted before this one, as the function `promote(KEYS, ARGV)`
  (bulltask.lua.wrappers.promote_incompatible).

  KEYS[1]  the queue's incompatible jobs: a sorted set of ids with the times when they are due
  KEYS[2…] the keys of promote; the first is `delayed`
  ARGV[1]  the prefix of the queue's keys
  ARGV[2]  how many jobs to skip: those that earlier calls have left
  ARGV[3]  how many jobs to check
  ARGV[4…] the names of the worker's tasks
  returns  how many jobs are due now, and how many the next call skips; -1 if all were checked
  event    those of promote
]]
local base, skipped, page = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local tasks, due = {}, 0
for index = 4, #ARGV do
  tasks[ARGV[index]] = true
end
local ids = redis.call("ZRANGE", KEYS[1], skipped, skipped + page - 1)
for _, id in ipairs(ids) do
  local name = redis.pcall("HGET", base .. id, "name")  -- a key of another type has no name
  if type(name) == "string" and not tasks[name] then
    skipped = skipped + 1
  else
    redis.call("ZREM", KEYS[1], id)
    if type(name) == "string" and promote({ unpack(KEYS, 2) }, { base, id }) == 0 then
      due = due + 1
    end
  end
end
return { due, #ids < page and -1 or skipped }
