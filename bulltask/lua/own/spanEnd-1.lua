--[[
  Finds where a number of entries of a stream ends.

  A reader that plans to read 200,000 entries needs to know where they end, not what they contain: only the last id and
  the number are sent. The entries are read in small pages, so that a large number costs no memory.

  KEYS[1]  stream
  ARGV[1]  id after which to begin, "0-0" for the first entry
  ARGV[2]  id of the last entry that may count, "+" for no bound; without its second half a whole millisecond counts
  ARGV[3]  how many entries at most
  returns  id of the last one, how many there are; "", 0 when there is none
]]
local last, count, most = "", 0, tonumber(ARGV[3])
local from = "(" .. ARGV[1]
while count < most do
  local size = math.min(500, most - count)
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
