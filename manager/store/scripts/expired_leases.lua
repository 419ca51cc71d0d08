-- ARGV: how many at most. Returns {now, the clock's offset, rows}, oldest first.
local now = now_ms()
local rows = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', whole(now), 'LIMIT', 0, ARGV[1])) do
  local row = lease_row(id, now)
  if row then
    rows[#rows + 1] = row
  else
    redis.call('ZREM', LEASES, id)
  end
end
return {whole(now), redis.call('GET', CLOCK) or '0', rows}
