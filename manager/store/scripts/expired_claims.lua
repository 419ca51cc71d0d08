-- ARGV: how many at most. Returns the bindings, flat hashes, whose claim nobody has renewed in time.
local rows = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', CLAIMS, '-inf', whole(now_ms()), 'LIMIT', 0, ARGV[1])) do
  local key = redis.call('GET', SANDBOX .. id)
  if key and redis.call('HGET', key, 'state') == 'claiming' then
    rows[#rows + 1] = redis.call('HGETALL', key)
  else
    redis.call('ZREM', CLAIMS, id)
  end
end
return rows
