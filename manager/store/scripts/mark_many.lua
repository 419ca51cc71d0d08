-- KEYS: marks. ARGV: keep_ms, then each mark's JSON. Returns {1 where this call made it, the mark's JSON} of each, flat.
local found = {}
for i, key in ipairs(KEYS) do
  local old = redis.call('GET', key)
  if not old then
    redis.call('SET', key, ARGV[i + 1], 'PX', ARGV[1])
  end
  found[#found + 1] = old and 0 or 1
  found[#found + 1] = old or ARGV[i + 1]
end
return found
