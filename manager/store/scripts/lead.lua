-- KEYS: leader. ARGV: holder, ms (0: give it up). 1: the holder leads for so long from now.
local leader = redis.call('GET', KEYS[1])
if leader and leader ~= ARGV[1] then
  return 0
end
if tonumber(ARGV[2]) <= 0 then
  redis.call('DEL', KEYS[1])
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
