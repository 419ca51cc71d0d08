-- ARGV: holder, how many sandboxes at most. Returns how many are left to do.
local holder = ARGV[1]
local now = now_ms()
for _, id in ipairs(redis.call('SPOP', HOLDING .. holder, ARGV[2])) do
  redis.call('HDEL', OPERATIONS .. id, holder)
  local lease = fields_of(LEASE .. id)
  if lease.until_ms and operations_of(id) == 0 then
    set_until(id, math.min(now + tonumber(lease.idle_ms), tonumber(lease.hard_ms)))
  end
end
local left = redis.call('SCARD', HOLDING .. holder)
if left == 0 then
  redis.call('DEL', HOLDER .. holder)
end
return left
