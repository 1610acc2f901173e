--[[
  Finishes a fan-out job and makes its dependents ready to run atomically. Dependents are jobs that wait for it
  although it is not their child job: in a canvas, several jobs may follow the same one.

  The source of BullMQ's moveToFinished is inserted before this one, as the function `finish(KEYS, ARGV)`
  (bulltask.lua.wrappers.with_finish). A dependent is treated as moveToFinished treats a parent with the option
  failParentOnFailure: it receives the result, and moves on when it waits for no other job; or it fails.

  KEYS     the keys of moveToFinished
  ARGV[1…] the arguments of moveToFinished
  ARGV[10] msgpack: { the fan-out job's key, true if it completed, its return value, time, { { queue's key, id }, ... } };
           it comes last, so that other scripts can call this one as they call moveToFinished
  returns  the reply from moveToFinished; if that is an error code, the dependents keep waiting
  event    those of moveToFinished; for each dependent, waiting or delayed
]]
local call = redis.call
local fan_out, completed, value, now_ms, dependents = unpack(cmsgpack.unpack(ARGV[10]))

local function push(queue, id)
  local meta = call("HMGET", queue .. ":meta", "paused", "concurrency")
  local is_blocked = meta[1] or (meta[2] and call("LLEN", queue .. ":active") >= tonumber(meta[2]))
  local priority = tonumber(call("HGET", queue .. ":" .. id, "priority")) or 0
  if priority > 0 then
    local count = call("INCR", queue .. ":pc")
    call("ZADD", queue .. ":prioritized", priority * 0x100000000 + count % 0x100000000, id)
  else
    call("RPUSH", queue .. (meta[1] and ":paused" or ":wait"), id)
  end
  if not is_blocked then
    call("ZADD", queue .. ":marker", 0, "0")
  end
  call("XADD", queue .. ":events", "*", "event", "waiting", "jobId", id, "prev", "waiting-children")
end

local function delay(queue, id, delay_ms)
  local due_ms = now_ms + delay_ms
  call("ZADD", queue .. ":delayed", due_ms * 0x1000, id)
  call("XADD", queue .. ":events", "*", "event", "delayed", "jobId", id, "delay", due_ms)
  local first = call("ZRANGE", queue .. ":delayed", 0, 0, "WITHSCORES")
  call("ZADD", queue .. ":marker", tonumber(first[2]) / 0x1000, "1")
end

local function make_ready(queue, id)
  local job = queue .. ":" .. id
  if call("SREM", job .. ":dependencies", fan_out) == 0 then
    return  -- removed, or ready already
  end
  if completed then
    call("HSET", job .. ":processed", fan_out, value)
  else
    call("ZADD", job .. ":unsuccessful", now_ms, fan_out)
    call("HSET", job, "defa", "child " .. fan_out .. " failed")
  end
  if completed and call("SCARD", job .. ":dependencies") > 0 then
    return
  end
  if call("ZREM", queue .. ":waiting-children", id) == 0 then
    return
  end
  local delay_ms = completed and tonumber(call("HGET", job, "delay")) or 0
  if delay_ms > 0 then
    delay(queue, id, delay_ms)
  else
    push(queue, id)
  end
end

local reply = finish(KEYS, ARGV)
if type(reply) ~= "number" or reply >= 0 then
  for _, dependent in ipairs(dependents) do
    make_ready(dependent[1], dependent[2])
  end
end
return reply
