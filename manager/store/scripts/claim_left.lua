-- KEYS: binding, slots. ARGV: token. Returns the ms that its claim has left; 0: it is stale, or no claim of this token.
local old = fields_of(KEYS[1])
if old.token ~= ARGV[1] or old.state ~= 'claiming' then
  return 0
end
local until_ms = tonumber(redis.call('ZSCORE', KEYS[2], old.sandbox_id) or '0')
return math.max(0, math.floor(until_ms - now_ms()))
