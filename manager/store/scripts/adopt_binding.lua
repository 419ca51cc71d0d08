-- KEYS: binding, slots. ARGV: tenant, project, task_id, sandbox_id, token, profile, target, created_at, generation, pod,
-- address, previous, active_ms, idle_ms, max_ms, terms, cpu_milli, memory. 1: bound (or closing) by this token.
local key, slots, id, token = KEYS[1], KEYS[2], ARGV[4], ARGV[5]
local generation = tonumber(ARGV[9])
local old = fields_of(key)
local ours = old.token == token and old.sandbox_id == id
if old.state == 'bound' or old.state == 'claiming' or old.state == 'closing' then
  if not ours then
    return 0
  end
  if old.state == 'closing' then
    return 1
  end
elseif old.state == 'ended' and generation <= tonumber(old.generation) then
  return 0 -- a pod whose end is on record, or one that lost the claim: not to be used again
end
local created_at, previous = ARGV[8], ARGV[12]
if ours then
  created_at = old.created_at
end
if old.state == 'ended' then
  previous = old.ended
elseif ours and previous == '' then
  previous = old.previous
end
redis.call('SET', SANDBOX .. id, key) -- the first write: see common.lua
if old.sandbox_id and old.sandbox_id ~= id then
  redis.call('DEL', SANDBOX .. old.sandbox_id)
end
redis.call('DEL', key)
redis.call('HSET', key, 'tenant', ARGV[1], 'project', ARGV[2], 'task_id', ARGV[3], 'sandbox_id', id, 'state', 'bound',
  'token', token, 'profile', ARGV[6], 'target', ARGV[7], 'generation', whole(generation), 'pod', ARGV[10],
  'address', ARGV[11], 'created_at', created_at, 'previous', previous, 'ended', '',
  'terms', ARGV[16], 'cpu_milli', ARGV[17], 'memory', ARGV[18], 'claimed_ms', old.claimed_ms or '0', 'before', '')
redis.call('ZADD', slots, '+inf', id)
redis.call('ZREM', CLAIMS, id)
redis.call('SADD', LIVE, id)
if not (ours and redis.call('EXISTS', LEASE .. id) == 1) then
  local now, max_ms = now_ms(), tonumber(ARGV[15])
  local hard_ms = now + max_ms
  if tonumber(created_at) > 0 then
    -- The pod is older than its new record; what is left of its time is counted by the same clock as its creation.
    hard_ms = math.min(hard_ms, now - (wall_ms() - tonumber(created_at) * 1000) + max_ms)
  end
  make_lease(id, now, tonumber(ARGV[14]), hard_ms, ARGV[13], ARGV[14], ARGV[15])
end
return 1
