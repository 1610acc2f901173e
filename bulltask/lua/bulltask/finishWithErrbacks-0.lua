--[[
  Fails a job and adds its error callbacks atomically.

  The sources of BullMQ's moveToFinished and of its scripts that add a job are inserted before this one, as the functions
  `finish`, `add_standard`, `add_delayed` and `add_prioritized`, each with the parameters `(KEYS, ARGV)`
  (bulltask.lua.wrappers.with_errbacks).

  KEYS     the keys of moveToFinished
  ARGV[1]  msgpack: a list of { the prefix of the queue's keys, "standard", "delayed" or "prioritized", and the three
           arguments of the script that adds the job }
  ARGV[2…] the arguments of moveToFinished
  returns  the reply from moveToFinished; if that is an error code, no job is added
  event    those of moveToFinished; for each callback, added, and waiting or delayed
]]
local scripts = {
  standard = { add_standard, { "wait", "paused", "meta", "id", "completed", "delayed", "active", "events", "marker" } },
  delayed = { add_delayed, { "marker", "meta", "id", "delayed", "completed", "events" } },
  prioritized = {
    add_prioritized,
    { "marker", "meta", "id", "prioritized", "delayed", "completed", "active", "events", "pc" },
  },
}
local reply = finish(KEYS, { unpack(ARGV, 2) })
if type(reply) ~= "number" or reply >= 0 then
  for _, job in ipairs(cmsgpack.unpack(ARGV[1])) do
    local add, names = unpack(scripts[job[2]])
    local keys = {}
    for i, name in ipairs(names) do
      keys[i] = job[1] .. name
    end
    add(keys, { job[3], job[4], job[5] })
  end
end
return reply
