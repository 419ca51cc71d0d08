-- KEYS: binding. ARGV: token, claim_ms, 1 for only where the lease has passed, who closes it. 1: this call closes it now.
--
-- A lease that is closing expires when whoever closes it has fallen silent: then another may go on with it.
local key = KEYS[1]
local old = fields_of(key)
if old.token ~= ARGV[1] or (old.state ~= 'bound' and old.state ~= 'closing') then
  return 0
end
local id, now = old.sandbox_id, now_ms()
local until_ms = tonumber(redis.call('HGET', LEASE .. id, 'until_ms') or '0')
if (old.state == 'closing' or ARGV[3] == '1') and until_ms > now then
  return 0
end
redis.call('HSET', key, 'state', 'closing')
redis.call('HSET', LEASE .. id, 'closing', ARGV[4])
set_until(id, now + tonumber(ARGV[2]))
return 1
