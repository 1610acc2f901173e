--[[
  Adds the jobs of a write, except for those that the write has added before, even if they have been removed since.

  BullMQ's add scripts recognize a job by its hash. A job that has run and was removed has no hash, so retrying a write
  after a crash would run it twice. This script stores the ids that a write has added in a set.

  The source of one of BullMQ's add scripts is inserted before this one, as the function `add(KEYS, ARGV)`
  (bulltask.lua.wrappers.add_once), so that checking, adding and recording a job are one step.

  KEYS[1]   ids that the write has added (bulltask's own set)
  KEYS[2…]  the keys of the add script
  ARGV[1]   how long the set is kept after the last job, in milliseconds
  ARGV[2…]  five for each job: its id, the full key of its hash, and the three arguments of the add script
  returns   for each job the id of the stored job, and "added"; or "duplicate" if that job, or one with the same
            deduplication id, exists, or if the write has added it before. An error code of the add script is returned
            unchanged, and the following jobs are added
  event     those of the add script; none for a job that the write has added before
]]
local call, ids, add_keys, replies, has_expiry = redis.call, KEYS[1], { unpack(KEYS, 2) }, {}, false
for at = 2, #ARGV, 5 do
  local id = ARGV[at]
  local reply
  if call("SISMEMBER", ids, id) == 1 then
    reply = { id, "duplicate" }
  else
    local exists = call("EXISTS", ARGV[at + 1]) == 1
    reply = add(add_keys, { ARGV[at + 2], ARGV[at + 3], ARGV[at + 4] })
    if type(reply) ~= "number" or reply >= 0 then
      -- Recorded after each add: if adding a job fails, that job must not be recorded, but earlier jobs must.
      call("SADD", ids, id)
      if not has_expiry then
        call("PEXPIRE", ids, ARGV[1])
        has_expiry = true
      end
      reply = { reply, (exists or tostring(reply) ~= id) and "duplicate" or "added" }
    end
  end
  replies[#replies + 1] = reply
end
return replies
