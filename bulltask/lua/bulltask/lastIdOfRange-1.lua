--[[
  Returns the id of the last of a stream's next N entries, and their number.

  A reader that plans a batch of 200,000 entries needs the id at which the batch ends, not the entries, so only the last
  id and the number are sent. The entries are read in small pages, so that the script needs little memory.

  KEYS[1]  stream
  ARGV[1]  id before the first entry, "0-0" for the beginning
  ARGV[2]  maximum id, "+" for none; an id without a sequence number includes the whole millisecond
  ARGV[3]  maximum number of entries
  returns  id of the last entry, number of entries; "", 0 if there is none
]]
local last, count, max_count = "", 0, tonumber(ARGV[3])
local from = "(" .. ARGV[1]
while count < max_count do
  local size = math.min(500, max_count - count)
  local page = redis.call("XRANGE", KEYS[1], from, ARGV[2], "COUNT", size)
  if #page > 0 then
    last, count = page[#page][1], count + #page
  end
  if #page < size then
    break
  end
  from = "(" .. last
end
return { last, count }
