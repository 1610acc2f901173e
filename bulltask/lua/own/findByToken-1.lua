--[[
  Finds the active jobs that are locked with one of the given tokens.

  When a child dies between asking for a job and receiving the reply, no process knows the job's id. The child's slot
  has the token, and the token leads to the job.

  KEYS[1]  active list
  ARGV[1]  key prefix of the queue, with the trailing colon
  ARGV[2…] tokens
  returns  token, job id, token, job id …
]]
local wanted = {}
for i = 2, #ARGV do
  wanted[ARGV[i]] = true
end
local found = {}
for _, id in ipairs(redis.call("LRANGE", KEYS[1], 0, -1)) do
  -- pcall: if the lock of another job is not a string, the search goes on. (An error is a table, and no token.)
  local token = redis.pcall("GET", ARGV[1] .. id .. ":lock")
  if token and wanted[token] then
    found[#found + 1] = token
    found[#found + 1] = id
  end
end
return found
