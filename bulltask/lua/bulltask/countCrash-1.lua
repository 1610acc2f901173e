--[[
  Counts a crash of a job: the death of a child that was running it.

  The count and the last tokens are in the job's hash, so that they are gone with the job, whoever removes it. A crash
  is counted once, although the call is repeated if its reply was lost.

  KEYS[1]  the job's hash
  ARGV[1]  the token of the dead child's slot
  ARGV[2]  how many tokens to keep
  returns  the number of crashes; 0 if there is no such job
]]
if redis.call("TYPE", KEYS[1]).ok ~= "hash" then
  return 0
end
local stored = redis.call("HMGET", KEYS[1], "bulltask:crashes", "bulltask:crashTokens")
local crashes, tokens = tonumber(stored[1]) or 0, {}
for token in string.gmatch(stored[2] or "", "%S+") do
  if token == ARGV[1] then
    return crashes
  end
  tokens[#tokens + 1] = token
end
tokens[#tokens + 1] = ARGV[1]
local first = math.max(1, #tokens - ARGV[2] + 1)
local kept = table.concat(tokens, " ", first)
redis.call("HSET", KEYS[1], "bulltask:crashes", crashes + 1, "bulltask:crashTokens", kept)
return crashes + 1
