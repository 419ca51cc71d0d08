-- KEYS: binding, slots. ARGV: token, claim_ms, who closes it. 1: the claim or closing goes on for so long from now.
local key, slots = KEYS[1], KEYS[2]
local old = fields_of(key)
if old.token ~= ARGV[1] then
  return 0
end
local now = now_ms()
if old.state == 'claiming' then
  redis.call('HSET', key, 'claimed_ms', whole(now))
  redis.call('ZADD', slots, whole(now + tonumber(ARGV[2])), old.sandbox_id)
  redis.call('ZADD', CLAIMS, whole(now + tonumber(ARGV[2])), old.sandbox_id)
  return 1
end
if old.state == 'closing' and redis.call('HGET', LEASE .. old.sandbox_id, 'closing') == ARGV[3] then
  set_until(old.sandbox_id, now + tonumber(ARGV[2]))
  return 1
end
return 0
