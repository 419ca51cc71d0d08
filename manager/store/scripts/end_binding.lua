-- KEYS: binding, slots. ARGV: token, ended (JSON), 1 for only where the lease has passed, and where it
-- is not '' who must be closing it. 1: this call ended it.
local key = KEYS[1]
local old = fields_of(key)
if old.token ~= ARGV[1] or old.state == 'ended' then
  return 0
end
local id = old.sandbox_id
if ARGV[3] == '1' then
  local until_ms = redis.call('HGET', LEASE .. id, 'until_ms')
  if old.state ~= 'bound' or (until_ms and tonumber(until_ms) > now_ms()) then
    return 0
  end
end
if ARGV[4] ~= '' and (old.state ~= 'closing' or redis.call('HGET', LEASE .. id, 'closing') ~= ARGV[4]) then
  return 0
end
redis.call('ZREM', KEYS[2], id) -- the first write: see common.lua
redis.call('HSET', key, 'state', 'ended', 'ended', ARGV[2], 'before', '')
redis.call('PEXPIRE', key, ENDED_KEPT_MS)
redis.call('PEXPIRE', SANDBOX .. id, ENDED_KEPT_MS)
redis.call('SREM', LIVE, id)
redis.call('ZREM', CLAIMS, id)
drop_lease(id)
return 1
