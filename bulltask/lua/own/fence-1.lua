--[[
  Adds jobs of a write unless that write has added them before, whatever happened to them since.

  BullMQ's add scripts recognise a job by its hash. A job that has run and was removed has none, so a write that is
  repeated after a crash would run it twice. This script keeps the ids of a write in a set beside the queue.

  This is the end of a script. The text of an official add script precedes it, as the function `add(KEYS, ARGV)`
  (bulltask.lua.wrappers.fenced), so that checking, adding and remembering are one step. The function is called for each
  job with the keys and arguments that it was written for.

  KEYS[1]   ids that the write has added, in a set of bulltask's
  KEYS[2…]  those of the add script
  ARGV[1]   how long the set is kept after the last job, in milliseconds
  ARGV[2…]  five for each job: its id, the full key of its hash, and the three arguments of the add script
  returns   for each job what the add script returns, and "added"; "known" if that job, or one that counts as the same
            (deduplication), exists; "fenced" if the write has added it before. A negative number of the add script is
            returned as it is, and the jobs after it are added
  event     those of the add script; none if fenced
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
      -- After the add, and for each job: one that is refused, or fails, must not be remembered; those before it must.
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
