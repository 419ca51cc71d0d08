-- ARGV: the offset that was seen, ms to add to it. Nothing happens where another manager was first.
local offset = redis.call('GET', CLOCK) or '0'
if offset == ARGV[1] then
  redis.call('SET', CLOCK, whole(tonumber(offset) + tonumber(ARGV[2])))
end
return 1
