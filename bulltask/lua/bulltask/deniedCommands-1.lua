--[[
  Returns those of some commands that the user of this connection may not run on a key.

  Redis checks a script's commands one by one, as it runs them. Therefore, a script that a user may not complete would
  stop in the middle, and a job could stay in no list, or in the wrong one. Nothing is known before Redis 7.0.

  KEYS[1]  a key of the queue
  ARGV[1…] commands
  returns  the denied ones
]]
local may_run, key, denied = redis.acl_check_cmd, KEYS[1], {}
if may_run then
  for _, name in ipairs(ARGV) do
    if not may_run(name, key, key, key) then
      denied[#denied + 1] = name
    end
  end
end
return denied
