-- KEYS: binding, slots. ARGV: token.
local old = fields_of(KEYS[1])
if old.state == 'claiming' and old.token == ARGV[1] then
  take_back(KEYS[1], KEYS[2], old.sandbox_id)
end
return 1
