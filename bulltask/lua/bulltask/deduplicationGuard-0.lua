--[[
  Adds a job that has a deduplication id, in two cases as newer versions of BullMQ do.

  BullMQ 5.65 drops a duplicate silently even if the job that owns the deduplication id no longer exists, for example
  because the queue was obliterated, or its keys were lost in a failover. An owner without a time to live loses the id
  when it finishes or is removed, so if its hash does not exist, this script deletes the key first.

  With `keepLastIfActive` (BullMQ 5.72), the last duplicate of an active job is not dropped: it is stored in a hash, and
  added after that job has finished (`addDeferred`, or the script of a newer BullMQ).

  The source of one of BullMQ's add scripts is inserted before this one, as the function `official(KEYS, ARGV)`
  (bulltask.lua.wrappers.with_guard).

  ARGV[1]  msgpack: key prefix of the queue, id, name, time, parent's key, parent's dependencies, parent, scheduler,
           key of the deduplication id
  ARGV[2]  the job's data
  ARGV[3]  msgpack: the job's options
  returns  the reply from BullMQ's script, or the id of the active job
  event    those of BullMQ's script; for a deferred duplicate, debounced and deduplicated
]]
local call = redis.call
local head, options = cmsgpack.unpack(ARGV[1]), cmsgpack.unpack(ARGV[3])
local base, id, deduplication = head[1], head[2], options["de"]
local owner_key = head[9]
local deferred = base .. "dn:" .. deduplication["id"]
local keeps_last = deduplication["keepLastIfActive"]
local owner = call("GET", owner_key)

if owner and call("PTTL", owner_key) == -1 and call("EXISTS", base .. owner) == 0 then
  call("DEL", owner_key, deferred)
  owner = nil
end

if keeps_last and owner and call("EXISTS", base .. id) == 0 and call("LPOS", base .. "active", owner) then
  local fields = { "name", head[3], "data", ARGV[2], "opts", cjson.encode(options), "jid", id }
  for i, name in pairs({ [5] = "pk", [6] = "pdk", [7] = "pd", [8] = "rjk" }) do
    if head[i] then
      fields[#fields + 1] = name
      fields[#fields + 1] = i == 7 and cjson.encode(head[i]) or head[i]
    end
  end
  call("DEL", deferred)
  call("HSET", deferred, unpack(fields))
  call("PERSIST", owner_key)
  call("INCR", base .. "id")
  local events, dedup_id = base .. "events", deduplication["id"]
  local max_events = call("HGET", base .. "meta", "opts.maxLenEvents") or 10000
  call("XTRIM", events, "MAXLEN", "~", max_events)
  call("XADD", events, "*", "event", "debounced", "jobId", owner, "debounceId", dedup_id)
  call("XADD", events, "*", "event", "deduplicated", "jobId", owner, "deduplicationId", dedup_id, "deduplicatedJobId", id)
  return owner
end

local reply = official(KEYS, ARGV)
if keeps_last and call("GET", owner_key) == id then
  -- A time to live would end the deduplication while the job is active.
  call("PERSIST", owner_key)
  if owner and owner ~= id then
    call("DEL", deferred) -- this job has replaced the owner
  end
end
return reply
