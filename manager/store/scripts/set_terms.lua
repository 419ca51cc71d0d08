-- KEYS: binding. ARGV: token, terms (JSON), active_ms, idle_ms, max_ms. 1: the lease has these terms from now on.
-- The hard end is counted from the pod's claim, and an idle lease is idle for the new length.
local key = KEYS[1]
local old = fields_of(key)
if old.token ~= ARGV[1] or (old.state ~= 'bound' and old.state ~= 'closing') then
  return 0
end
local id, now = old.sandbox_id, now_ms()
redis.call('HSET', key, 'terms', ARGV[2])
local lease = fields_of(LEASE .. id)
if not lease.until_ms then
  return 1
end
local hard_ms = now - (wall_ms() - tonumber(old.created_at) * 1000) + tonumber(ARGV[5])
redis.call('HSET', LEASE .. id, 'hard_ms', whole(hard_ms), 'active_ms', ARGV[3], 'idle_ms', ARGV[4], 'max_ms', ARGV[5])
if not lease.closing then
  local until_ms = tonumber(lease.until_ms)
  if operations_of(id) == 0 then
    until_ms = now + tonumber(ARGV[4])
  end
  set_until(id, math.min(until_ms, hard_ms))
end
return 1
