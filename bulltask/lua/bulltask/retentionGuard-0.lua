--[[
  Bounds how many old jobs one call of moveToFinished removes.

  BullMQ's script removes all jobs of `completed` or `failed` that are older than `keepJobs.age`, and all beyond
  `keepJobs.count`, which blocks Redis for seconds if many have expired since a job last finished. If there are more
  than a hundred, this script passes a greater age or count to BullMQ's script, so that it removes only the oldest
  hundred. The next jobs that finish remove the others. (BullMQ 5.67 and newer remove a thousand; a child of bulltask may
  finish 32 jobs in one round trip, though.) The check is left out if the options keep all jobs, as most calls of a busy
  child do (bulltask.worker.child.settle).

  A failed job that a parent job still waits for is not removed: BullMQ's script would run the parent, without its
  result. It is moved to the end of `failed` instead, as if it had failed now.

  It also keeps a job from being lost when BullMQ's script fails with an error partway, such as when the ACL forbids the
  keys of the job's parent: the script has then released the lock, and removed the job from `active`. A job that is in no
  list is added to `active` again, with its lock, if it had one.

  The source of moveToFinished is inserted before this one, as the function `official(KEYS, ARGV)`
  (bulltask.lua.wrappers.with_guard).

  KEYS     those of moveToFinished; the eleventh is `completed` or `failed`
  ARGV     those of moveToFinished; ARGV[2] is the time in milliseconds, ARGV[5] `completed` or `failed`, ARGV[7] the
           prefix of the queue's keys, ARGV[8] the packed options
  returns  the reply from moveToFinished
  event    those of moveToFinished
]]
local max_removed = 100
local keep_all = "\168keepJobs\129\165count\255"  -- {"keepJobs": {"count": -1}} in msgpack
local args, official_keys = ARGV, KEYS
local finished = official_keys[11]
local options, is_changed = nil, false
if ARGV[5] == "failed" then
  options = cmsgpack.unpack(ARGV[8])
  local keep = options["keepJobs"]
  local function keep_if_a_parent_waits(ids)
    local kept = 0
    for _, id in ipairs(ids) do
      local job = ARGV[7] .. id
      local parent = redis.call("HGET", job, "parentKey")
      -- The parent may be in another slot of a cluster, or forbidden; BullMQ's script then fails, too.
      if parent and parent ~= "" and redis.pcall("SISMEMBER", parent .. ":dependencies", job) == 1 then
        redis.call("ZADD", finished, ARGV[2] + 1, id)
        kept = kept + 1
      end
    end
    return kept
  end
  if keep["age"] then
    local oldest = ARGV[2] - keep["age"] * 1000
    keep_if_a_parent_waits(redis.call("ZRANGEBYSCORE", finished, "-inf", oldest, "LIMIT", 0, max_removed))
  end
  if keep["count"] and keep["count"] > 0 then
    local beyond = math.min(redis.call("ZCARD", finished) + 1 - keep["count"], max_removed)
    local kept = beyond > 0 and keep_if_a_parent_waits(redis.call("ZRANGE", finished, 0, beyond - 1)) or 0
    if kept > 0 then
      keep["count"] = keep["count"] + kept  -- those that are kept for their parents must not replace the job itself
      is_changed = true
    end
  end
end
local last
if not string.find(ARGV[8], keep_all, 1, true) then
  last = redis.call("ZRANGE", finished, max_removed - 1, max_removed - 1, "WITHSCORES")[2]
end
if last then
  options = options or cmsgpack.unpack(ARGV[8])
  local keep = options["keepJobs"]
  local age, count = keep["age"], keep["count"]
  if age and tonumber(last) < ARGV[2] - age * 1000 then
    -- The half makes up for rounding: the jobs up to this one are removed.
    keep["age"] = (ARGV[2] - last - 0.5) / 1000
    is_changed = true
  end
  if count and count > 0 then
    local least = redis.call("ZCARD", finished) + 1 - max_removed
    if count < least then
      keep["count"] = least
      is_changed = true
    end
  end
end
if is_changed then
  args = { unpack(ARGV) }
  args[8] = cmsgpack.pack(options)
end
local done, reply = pcall(official, official_keys, args)
if done then
  return reply
end
local id, prefix, job = args[1], args[7], official_keys[12]
local is_lost = redis.call("EXISTS", job) == 1
for _, list in ipairs({ official_keys[1], official_keys[2], official_keys[8] }) do
  is_lost = is_lost and not redis.call("LPOS", list, id)
end
for _, state in ipairs({ "prioritized", "delayed", "waiting-children", "completed", "failed" }) do
  is_lost = is_lost and not redis.call("ZSCORE", prefix .. state, id)
end
if is_lost then
  local lock = cmsgpack.unpack(args[8])
  redis.call("LPUSH", official_keys[2], id)
  if lock["token"] ~= "0" then  -- "0": without a lock
    redis.call("SET", job .. ":lock", lock["token"], "PX", lock["lockDuration"])
  end
end
-- A string that begins with an error code would be prefixed with "ERR"; Redis 6.2 accepts only strings.
error(type(reply) == "string" and string.find(reply, "^%u+ ") and { err = reply } or reply, 0)
