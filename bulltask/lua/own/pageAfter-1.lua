--[[
  Returns the next page of a list or sorted set, after a position that the caller remembers.

  Offsets would skip jobs or return them twice when others are added or removed. So the caller names the last page it
  has seen: in a sorted set by score and member, in a list by ids. The next page begins after the last of these that
  still exists.

  KEYS[1]  list or sorted set
  ARGV[1]  page size
  ARGV[2]  "1": from the end that is next in turn (right end, lowest score); "0": from the other end
  ARGV[3]  sorted set: score of the last member seen, "" to begin; list: its distance from that end, "0" to begin
  ARGV[4] … sorted set: the last member seen; list: the ids of the last page, last one first
  returns  sorted set: member, score …; list: distance of the first id from that end, ids …
]]
local key, size, ascending = KEYS[1], tonumber(ARGV[1]), ARGV[2] == "1"
local kind = redis.call("TYPE", key)["ok"]

local function range(first, last)
  if kind == "list" and ascending then
    local ids = redis.call("LRANGE", key, -last - 1, -first - 1)
    local turned = {}
    for i = #ids, 1, -1 do
      turned[#turned + 1] = ids[i]
    end
    return turned
  elseif kind == "list" then
    return redis.call("LRANGE", key, first, last)
  end
  return redis.call(ascending and "ZRANGE" or "ZREVRANGE", key, first, last, "WITHSCORES")
end

-- Redis orders members of one score by their bytes; Lua's own comparison depends on the server's locale.
local function is_past(member, seen)
  for i = 1, math.min(#member, #seen) do
    local one, other = member:byte(i), seen:byte(i)
    if one ~= other then
      return (one < other) == ascending
    end
  end
  return #member == #seen or (#member < #seen) == ascending
end

-- The rank after (score, member), even if that member is gone.
local function rank_behind(score, member)
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
  while true do
    local part = range(rank, rank + 99)
    if #part == 0 then
      return rank
    end
    for i = 1, #part, 2 do
      if tonumber(part[i + 1]) ~= tonumber(score) or not is_past(part[i], member) then
        return rank
      end
      rank = rank + 1
    end
  end
end

if kind == "zset" then
  local first = ARGV[3] == "" and 0 or rank_behind(ARGV[3], ARGV[4])
  return range(first, first + size - 1)
elseif kind ~= "list" then
  return {}
end

-- The last page moves when jobs are added or removed at the end, so it is searched around its former position, in
-- growing distance.
local turn = {}
for i = 4, #ARGV do
  turn[ARGV[i]] = turn[ARGV[i]] or i
end

local function place_in(from, to)
  local best, place
  if to >= math.max(0, from) then
    for i, id in ipairs(range(math.max(0, from), to)) do
      if turn[id] and (not best or turn[id] < best) then
        best, place = turn[id], math.max(0, from) + i
      end
    end
  end
  return place
end

local function place_behind(expected)
  if expected > 0 and range(expected - 1, expected - 1)[1] == ARGV[4] then
    return expected
  end
  local length, width = redis.call("LLEN", key), math.max(2 * size, 1000)
  local place = place_in(expected - width, expected + width)
  local near, far = expected - width, expected + width
  while not place and (near > 0 or far < length) do
    place = place_in(near - width, near - 1) or place_in(far + 1, far + width)
    near, far = near - width, far + width
  end
  -- The whole page is gone: begin again, as the rest may be anywhere.
  return place or 0
end

local first = #ARGV < 4 and tonumber(ARGV[3]) or place_behind(tonumber(ARGV[3]))
local page = range(first, first + size - 1)
table.insert(page, 1, first)
return page
