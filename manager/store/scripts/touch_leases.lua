-- ARGV: holder, heartbeat_ms, holding_ms, then for each sandbox its id and the holder's operations under way.
local holder = ARGV[1]
local now = now_ms()
redis.call('SET', HOLDER .. holder, '1', 'PX', ARGV[2])
for i = 4, #ARGV, 2 do
  local id, count = ARGV[i], tonumber(ARGV[i + 1])
  local lease = fields_of(LEASE .. id)
  if lease.until_ms and not lease.closing then
    local until_ms, hard_ms = tonumber(lease.until_ms), tonumber(lease.hard_ms)
    if count > 0 then
      redis.call('HSET', OPERATIONS .. id, holder, count)
      redis.call('SADD', HOLDING .. holder, id)
      set_until(id, math.max(until_ms, math.min(now + tonumber(lease.active_ms), hard_ms)))
    else
      redis.call('HDEL', OPERATIONS .. id, holder)
      redis.call('SREM', HOLDING .. holder, id)
      if operations_of(id) == 0 then
        set_until(id, math.min(now + tonumber(lease.idle_ms), hard_ms))
      end
    end
  end
end
redis.call('PEXPIRE', HOLDING .. holder, ARGV[3])
return 1
