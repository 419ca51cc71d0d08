-- KEYS: slots. ARGV: sandbox ids that were among them. Takes those away that have ended or are unknown; returns how many.
local wrong = 0
for _, id in ipairs(ARGV) do
  local key = redis.call('GET', SANDBOX .. id)
  local state = key and redis.call('HGET', key, 'state')
  if not state or state == 'ended' or redis.call('HGET', key, 'sandbox_id') ~= id then
    wrong = wrong + redis.call('ZREM', KEYS[1], id)
    redis.call('SREM', LIVE, id)
  end
end
return wrong
