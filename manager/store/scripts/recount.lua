-- KEYS: slots. Makes the owner's slots those of its sandboxes that have not ended. Returns how many were wrong.
local wrong = 0
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local key = redis.call('GET', SANDBOX .. id)
  local state = key and redis.call('HGET', key, 'state')
  if not state or state == 'ended' or redis.call('HGET', key, 'sandbox_id') ~= id then
    redis.call('ZREM', KEYS[1], id)
    redis.call('SREM', LIVE, id)
    wrong = wrong + 1
  end
end
return wrong
