--[[
  Adds a job of a write unless that write has added it before, whatever became of the job since.

  BullMQ's add scripts find a job again by its hash. A job that has run and was removed has none, so a write that is
  done again after a crash would run it twice. This script remembers the ids of a write in a set beside the queue.

  It is the end of a script, not a whole one: in front of it the text of an official add script stands as the function
  `add(KEYS, ARGV)` (bulltask.lua.loader.fenced), so that asking, adding and remembering are one step. What follows the
  keys and arguments below is handed to that function as its own.

  KEYS[1]   ids that the write has added: a set of ours
  ARGV[1]   how long the set is kept after the last job, in milliseconds
  ARGV[2]   id of the job
  ARGV[3]   full key of the job's hash
  returns   what the add script returns, and what happened: "added"; "known": that job is there already, or one that
            counts as the same (deduplication); "fenced": the write has added it before. A negative number of the add
            script is returned as it is
  event     those of the add script; none when fenced
]]
local ids, ttl, id, job = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
if redis.call("SISMEMBER", ids, id) == 1 then
  return { id, "fenced" }
end
local known = redis.call("EXISTS", job) == 1
local reply = add({ unpack(KEYS, 2) }, { unpack(ARGV, 4) })
if type(reply) == "number" and reply < 0 then
  return reply
end
-- Behind the add: where that refuses the job, or fails, nothing is remembered.
redis.call("SADD", ids, id)
redis.call("PEXPIRE", ids, ttl)
return { reply, (known or tostring(reply) ~= id) and "known" or "added" }
