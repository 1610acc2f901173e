--[[
  Fails a job that BullMQ's scripts cannot acquire or finish because its hash is malformed.

  Such a script aborts partway through with an error, and the job stays in `active`, or is no longer in a list. This
  script removes the fields on which BullMQ's script would fail, and then fails the job like any other job, with its
  events, parent and metrics. If BullMQ's script still fails, or the job's key is not a hash, this script fails the job
  as far as possible.

  The source of BullMQ's moveToFinished is inserted before this one, as the function `finish(KEYS, ARGV)`
  (bulltask.lua.wrappers.with_finish).

  KEYS[1]  completed
  KEYS[2]  waiting-children
  KEYS[3…] the keys of moveToFinished, for a job that fails
  ARGV[1]  token of the lock that the caller has, or had
  ARGV[2]  "1": only a job whose hash is malformed; "": any
  ARGV[3]  the job's id, which is the first argument of moveToFinished
  ARGV[4…] its other arguments, with the same token
  returns  0: done; 1: the job's hash is valid; or an error code of moveToFinished (-6: another worker has the job,
           -3: it is waiting or has finished, -1: there is no such job)
  event    those of moveToFinished; only `failed` if moveToFinished fails with an error
]]
local call, token, id = redis.call, ARGV[1], ARGV[3]
local finish_keys, finish_args = { unpack(KEYS, 3) }, { unpack(ARGV, 3) }
local active, events, stalled, failed, job =
  finish_keys[2], finish_keys[4], finish_keys[5], finish_keys[11], finish_keys[12]
local lock, now, reason = job .. ":lock", finish_args[2], finish_args[4]

local function is_in_another_state()
  for _, set in ipairs({ failed, KEYS[1], KEYS[2], finish_keys[7], finish_keys[3] }) do
    if call("ZSCORE", set, id) then
      return true
    end
  end
  return call("LPOS", finish_keys[1], id) or call("LPOS", finish_keys[8], id)
end

-- Only HINCRBY itself can test exactly which values it accepts.
local function is_counter(field)
  local reply = redis.pcall("HINCRBY", job, field, 1)
  if type(reply) == "table" and reply.err then
    return false
  end
  call("HINCRBY", job, field, -1)
  return true
end

local function is_map(field)
  local text = call("HGET", job, field)
  if not text then
    return true
  end
  local decoded, value = pcall(cjson.decode, text)
  return decoded and type(value) == "table", value
end

local function is_parent_valid()
  local valid, parent = is_map("parent")
  local key = call("HGET", job, "parentKey")
  if key and not string.find(key, ":", 1, true) then
    return false
  end
  local id_type = valid and parent and type(parent.id)
  return valid and (not parent or ((id_type == "string" or id_type == "number") and type(parent.queueKey) == "string"))
end

local function remove_from_active()
  call("LREM", active, 0, id)
  call("SREM", stalled, id)
  call("DEL", lock)
end

local holder = call("GET", lock)
if holder and holder ~= token then
  return -6
end
local kind = call("TYPE", job)["ok"]
if not call("LPOS", active, id) then
  if kind == "none" then
    return -1
  elseif is_in_another_state() then
    return -3
  end
end

-- This write comes first, so that a Redis that is out of memory or read-only rejects it before anything has changed.
call("SET", lock, token, "PX", 30000)
if kind == "none" then
  remove_from_active()
  return -1
elseif kind ~= "hash" then
  remove_from_active()
  call("XADD", events, "*", "event", "failed", "jobId", id, "failedReason", reason, "prev", "active")
  return 0
end
local valid_attempts, valid_parent = is_counter("atm"), is_parent_valid()
if ARGV[2] == "1" and valid_attempts and valid_parent and is_counter("ats") and is_map("opts") then
  return 1
end
if not call("LPOS", active, id) then
  call("RPUSH", active, id)
end
if not valid_attempts then
  call("HDEL", job, "atm")
end
if not valid_parent then
  call("HDEL", job, "parent", "parentKey")
end
local done, reply = pcall(finish, finish_keys, finish_args)
if done then
  return reply
end
local finished = call("ZSCORE", failed, id)
remove_from_active()
if call("EXISTS", job) == 1 and not finished then
  call("ZADD", failed, now, id)
  call("HSET", job, "failedReason", reason, "finishedOn", now)
  call("HDEL", job, "defa")
  call("XADD", events, "*", "event", "failed", "jobId", id, "failedReason", reason, "prev", "active")
end
return 0
