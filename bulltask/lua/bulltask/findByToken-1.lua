--[[
  Finds the active jobs that are locked with one of the given tokens.

  If a child dies after its fetch was executed, but before it has read the reply, no process knows the job's id.
  However, the child's slot contains the lock's token.

  KEYS[1]  active list
  ARGV[1]  key prefix of the queue, with the trailing colon
  ARGV[2…] tokens
  returns  token, job id, token, job id …
]]
local is_wanted = {}
for i = 2, #ARGV do
  is_wanted[ARGV[i]] = true
end
local found = {}
for _, id in ipairs(redis.call("LRANGE", KEYS[1], 0, -1)) do
  -- pcall: if a lock is not a string, the search continues. (The error is a table, which is never a token.)
  local token = redis.pcall("GET", ARGV[1] .. id .. ":lock")
  if token and is_wanted[token] then
    found[#found + 1] = token
    found[#found + 1] = id
  end
end
return found
