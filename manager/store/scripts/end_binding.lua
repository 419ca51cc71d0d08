-- KEYS: binding, slots. ARGV: token, ended (JSON). 1: this call ended it.
local key = KEYS[1]
local old = fields_of(key)
if old.token ~= ARGV[1] or old.state == 'ended' then
  return 0
end
local id = old.sandbox_id
redis.call('HSET', key, 'state', 'ended', 'ended', ARGV[2], 'before', '')
redis.call('PEXPIRE', key, ENDED_KEPT_MS)
redis.call('PEXPIRE', SANDBOX .. id, ENDED_KEPT_MS)
redis.call('ZREM', KEYS[2], id)
redis.call('SREM', LIVE, id)
drop_lease(id)
return 1
