--[[
  Removes the oldest orders to a worker, and returns them: each is returned at most once.

  An order that is too long is removed, too, but only its length is returned, because it must not fill the memory of the
  worker.

  KEYS[1]  orders
  ARGV[1]  maximum number of orders
  ARGV[2]  maximum length of an order in bytes
  returns  the orders; instead of those that are too long, their lengths
]]
local taken = redis.call("LRANGE", KEYS[1], 0, ARGV[1] - 1)
if #taken > 0 then
  redis.call("LTRIM", KEYS[1], #taken, -1)
end
for number, order in ipairs(taken) do
  if #order > tonumber(ARGV[2]) then
    taken[number] = #order
  end
end
return taken
