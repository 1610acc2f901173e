--[[
  Returns the next page of a list or sorted set, after the page that the caller has already read.

  With offsets, jobs would be skipped or returned twice when others are added or removed. Therefore, the caller passes
  the end of its last page: the score and the last member of a sorted set, or the ids of a list. The next page begins
  after the last of these that still exists.

  KEYS[1]  list or sorted set
  ARGV[1]  page size
  ARGV[2]  "1": start at the job that runs next (right end, lowest score); "0": start at the other end
  ARGV[3]  sorted set: score of the last member read, "" for the first page; list: its distance from the start, "0" for
           the first page
  ARGV[4] … sorted set: the last member read; list: the ids of the last page, last id first
  returns  sorted set: member, score …; list: distance of the first id from the start, ids …
]]
local key, size, ascending = KEYS[1], tonumber(ARGV[1]), ARGV[2] == "1"
local kind = redis.call("TYPE", key)["ok"]

local function range(first, last)
  if kind == "list" and ascending then
    local ids = redis.call("LRANGE", key, -last - 1, -first - 1)
    local reversed = {}
    for i = #ids, 1, -1 do
      reversed[#reversed + 1] = ids[i]
    end
    return reversed
  elseif kind == "list" then
    return redis.call("LRANGE", key, first, last)
  end
  return redis.call(ascending and "ZRANGE" or "ZREVRANGE", key, first, last, "WITHSCORES")
end

-- Redis orders members with the same score by their bytes; Lua's < operator depends on the server's locale.
local function is_at_or_before(member, seen)
  for i = 1, math.min(#member, #seen) do
    local byte, seen_byte = member:byte(i), seen:byte(i)
    if byte ~= seen_byte then
      return (byte < seen_byte) == ascending
    end
  end
  return #member == #seen or (#member < #seen) == ascending
end

-- The rank after (score, member), even if that member is gone.
local function rank_after(score, member)
  local now = redis.call("ZSCORE", key, member)
  if now and tonumber(now) == tonumber(score) then
    return redis.call(ascending and "ZRANK" or "ZREVRANK", key, member) + 1
  end
  local rank
  if ascending then
    rank = redis.call("ZCOUNT", key, "-inf", "(" .. score)
  else
    rank = redis.call("ZCOUNT", key, "(" .. score, "+inf")
  end
  local last = rank + redis.call("ZCOUNT", key, score, score)
  while rank < last do -- a million members may have this score
    local middle = math.floor((rank + last) / 2)
    if is_at_or_before(range(middle, middle)[1], member) then
      rank = middle + 1
    else
      last = middle
    end
  end
  return rank
end

if kind == "zset" then
  local first = ARGV[3] == "" and 0 or rank_after(ARGV[3], ARGV[4])
  return range(first, first + size - 1)
elseif kind ~= "list" then
  return {}
end

-- The last page moves when jobs are added or removed at the end, so its ids are searched for around its former
-- position. Farther away, only the first and the last id are searched for: one of them is the last job of the page that
-- is acquired. To search a million jobs for an id takes 11 ms, so the search ends 50,000 jobs after that position.
local order = {}
for i = 4, #ARGV do
  order[ARGV[i]] = order[ARGV[i]] or i
end

local function position_in(from, to)
  local best, position
  if to >= math.max(0, from) then
    for i, id in ipairs(range(math.max(0, from), to)) do
      if order[id] and (not best or order[id] < best) then
        best, position = order[id], math.max(0, from) + i
      end
    end
  end
  return position
end

local function position_after(expected)
  if expected > 0 and range(expected - 1, expected - 1)[1] == ARGV[4] then
    return expected
  end
  local width = math.max(2 * size, 1000)
  local position = position_in(expected - width, expected + width)
  local direction, searched = ascending and -1 or 1, string.format("%.0f", expected + 50000)
  for _, id in ipairs({ ARGV[4], ARGV[#ARGV] }) do
    local index = not position and redis.call("LPOS", key, id, "RANK", direction, "MAXLEN", searched)
    if index then
      index = ascending and redis.call("LLEN", key) - index - 1 or index
      position = position_in(index - width, index + width)
    end
  end
  -- Both ends of the page are gone: start at the beginning, because the position is lost.
  return position or 0
end

local first = #ARGV < 4 and tonumber(ARGV[3]) or position_after(tonumber(ARGV[3]))
local page = range(first, first + size - 1)
table.insert(page, 1, first)
return page
