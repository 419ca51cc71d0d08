-- KEYS: binding, slots. ARGV: tenant, project, task_id, sandbox_id, token, profile, target, created_at ('' or 0: now),
-- claim_ms, limit (-1: none), terms (JSON or ''), cpu_milli, memory, the owner's limits of both (-1: none).
-- Returns {'ok', the binding's hash, flat}, {'unsettled'}, or {'quota', what, held, limit, ms until a slot may be free}.
local key, slots = KEYS[1], KEYS[2]
local token, claim_ms, limit = ARGV[5], tonumber(ARGV[9]), tonumber(ARGV[10])
local now = now_ms()
local old = fields_of(key)

-- A claim that nobody renews is not taken over here: its pod may be there yet (expired_claims.lua).
if old.state == 'bound' or old.state == 'closing' or old.state == 'claiming' then
  return {'ok', redis.call('HGETALL', key)}
end
if redis.call('EXISTS', SETTLED) == 0 then
  return {'unsettled'} -- an empty Redis knows of no pods: nothing may be counted before they were looked for
end

local id = old.sandbox_id or ARGV[4]
local over = over_limit(slots, id, limit, tonumber(ARGV[12]), tonumber(ARGV[13]), tonumber(ARGV[14]), tonumber(ARGV[15]))
if over then
  return {'quota', over[1], over[2], over[3], whole(soonest_ms(slots, now))}
end

local generation, previous, before = 1, '', ''
if old.state == 'ended' then
  generation, previous = tonumber(old.generation) + 1, old.ended
  before = cjson.encode(redis.call('HGETALL', key))
end
local created_at = ARGV[8]
if tonumber(created_at) == 0 then
  created_at = string.format('%.3f', wall_ms() / 1000)
end
redis.call('SET', SANDBOX .. id, key) -- the first write: see common.lua
redis.call('DEL', key)
redis.call('HSET', key, 'tenant', ARGV[1], 'project', ARGV[2], 'task_id', ARGV[3], 'sandbox_id', id,
  'state', 'claiming', 'token', token, 'profile', ARGV[6], 'target', ARGV[7], 'generation', whole(generation),
  'pod', '', 'address', '', 'created_at', created_at, 'previous', previous, 'ended', '', 'terms', ARGV[11],
  'cpu_milli', ARGV[12], 'memory', ARGV[13], 'claimed_ms', whole(now), 'before', before)
redis.call('ZADD', slots, whole(now + claim_ms), id)
redis.call('ZADD', CLAIMS, whole(now + claim_ms), id)
redis.call('SADD', LIVE, id)
return {'ok', redis.call('HGETALL', key)}
