-- KEYS: binding, slots. ARGV: tenant, project, task_id, sandbox_id, token, profile, target, created_at ('' or 0: now),
-- claim_ms, limit (-1: none). Returns {'ok', the binding's hash, flat} or {'quota', held, limit}.
local key, slots = KEYS[1], KEYS[2]
local token, claim_ms, limit = ARGV[5], tonumber(ARGV[9]), tonumber(ARGV[10])
local now = now_ms()
local old = fields_of(key)

if old.state == 'bound' or (old.state == 'claiming' and
    (old.token == token or now - tonumber(old.claimed_ms) <= claim_ms)) then
  return {'ok', redis.call('HGETALL', key)}
end

local id = old.sandbox_id or ARGV[4]

local function held_by_others()
  local mine = redis.call('ZSCORE', slots, id) and 1 or 0
  return redis.call('ZCARD', slots) - mine
end

if limit >= 0 and held_by_others() >= limit then
  -- Claims that nobody finished in time hold no slot.
  for _, stale in ipairs(redis.call('ZRANGEBYSCORE', slots, '-inf', '(' .. whole(now), 'LIMIT', 0, 100)) do
    local where = redis.call('GET', SANDBOX .. stale)
    if stale ~= id and where then
      take_back(where, slots, stale)
    elseif stale ~= id then
      redis.call('ZREM', slots, stale)
    end
  end
  local held = held_by_others()
  if held >= limit then
    return {'quota', held, limit}
  end
end

local generation, previous, before = 1, '', ''
if old.state == 'ended' then
  generation, previous = tonumber(old.generation) + 1, old.ended
  before = cjson.encode(redis.call('HGETALL', key))
elseif old.state == 'claiming' then
  generation, previous, before = tonumber(old.generation), old.previous, old.before
end
local created_at = ARGV[8]
if tonumber(created_at) == 0 then
  created_at = string.format('%.3f', wall_ms() / 1000)
end
redis.call('SET', SANDBOX .. id, key) -- the first write: see common.lua
redis.call('DEL', key)
redis.call('HSET', key, 'tenant', ARGV[1], 'project', ARGV[2], 'task_id', ARGV[3], 'sandbox_id', id,
  'state', 'claiming', 'token', token, 'profile', ARGV[6], 'target', ARGV[7], 'generation', whole(generation),
  'pod', '', 'address', '', 'created_at', created_at, 'previous', previous, 'ended', '',
  'claimed_ms', whole(now), 'before', before)
redis.call('ZADD', slots, whole(now + claim_ms), id)
redis.call('SADD', LIVE, id)
return {'ok', redis.call('HGETALL', key)}
