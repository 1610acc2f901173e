--[[
  Adds jobs of a write unless that write has added them before, whatever became of them since.

  BullMQ's add scripts find a job again by its hash. A job that has run and was removed has none, so a write that is
  done again after a crash would run it twice. This script remembers the ids of a write in a set beside the queue.

  It is the end of a script, not a whole one: in front of it the text of an official add script stands as the function
  `add(KEYS, ARGV)` (bulltask.lua.wrappers.fenced), so that asking, adding and remembering are one step. Each job is
  handed to that function with the keys and arguments that it was written for, one job after the other.

  KEYS[1]   ids that the write has added: a set of ours
  KEYS[2…]  those of the add script
  ARGV[1]   how long the set is kept after the last job, in milliseconds
  ARGV[2…]  five for each job: its id, the full key of its hash, and the three arguments of the add script
  returns   for each job what the add script returns, and what happened: "added"; "known": that job is there already, or
            one that counts as the same (deduplication); "fenced": the write has added it before. A negative number of
            the add script stands there as it is, and the jobs behind it are added
  event     those of the add script; none when fenced
]]
local call, ids, places, replies, kept = redis.call, KEYS[1], { unpack(KEYS, 2) }, {}, false
for at = 2, #ARGV, 5 do
  local id = ARGV[at]
  local reply
  if call("SISMEMBER", ids, id) == 1 then
    reply = { id, "fenced" }
  else
    local known = call("EXISTS", ARGV[at + 1]) == 1
    reply = add(places, { ARGV[at + 2], ARGV[at + 3], ARGV[at + 4] })
    if type(reply) ~= "number" or reply >= 0 then
      -- Behind the add, and for each job: where that refuses one, or fails, it is not remembered, but those before it.
      call("SADD", ids, id)
      if not kept then
        call("PEXPIRE", ids, ARGV[1])
        kept = true
      end
      reply = { reply, (known or tostring(reply) ~= id) and "known" or "added" }
    end
  end
  replies[#replies + 1] = reply
end
return replies
