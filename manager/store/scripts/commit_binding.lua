-- KEYS: binding, slots. ARGV: token, pod, address, profile, target, active_ms, idle_ms, max_ms. 1: bound by this token.
local key, slots = KEYS[1], KEYS[2]
local old = fields_of(key)
if old.token ~= ARGV[1] then
  return 0
end
if old.state == 'bound' then
  return 1 -- the same call again: its first answer was lost
end
if old.state ~= 'claiming' then
  return 0
end
redis.call('HSET', key, 'state', 'bound', 'pod', ARGV[2], 'address', ARGV[3], 'profile', ARGV[4], 'target', ARGV[5],
  'before', '')
redis.call('ZADD', slots, '+inf', old.sandbox_id)
redis.call('ZREM', CLAIMS, old.sandbox_id)
local now = now_ms()
make_lease(old.sandbox_id, now, tonumber(ARGV[6]), now + tonumber(ARGV[8]), ARGV[6], ARGV[7], ARGV[8])
return 1
