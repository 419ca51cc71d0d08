-- KEYS: mark. ARGV: JSON, keep_ms. Returns {1 where this call made it, the mark's JSON}.
local old = redis.call('GET', KEYS[1])
if old then
  return {0, old}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, ARGV[1]}
