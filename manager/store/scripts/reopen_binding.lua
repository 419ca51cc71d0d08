-- KEYS: binding. ARGV: token, ms that the lease is to last at least, who closes it. 1: it is bound again.
local key = KEYS[1]
local old = fields_of(key)
if old.token ~= ARGV[1] or (old.state ~= 'closing' and old.state ~= 'bound') then
  return 0
end
if old.state == 'closing' and redis.call('HGET', LEASE .. old.sandbox_id, 'closing') ~= ARGV[3] then
  return 0
end
redis.call('HSET', key, 'state', 'bound')
redis.call('HDEL', LEASE .. old.sandbox_id, 'closing')
set_until(old.sandbox_id, now_ms() + tonumber(ARGV[2]))
return 1
