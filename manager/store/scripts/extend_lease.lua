-- ARGV: sandbox id, ms from now.
local id = ARGV[1]
local lease = fields_of(LEASE .. id)
if lease.until_ms and not lease.closing then
  local wanted = math.min(now_ms() + tonumber(ARGV[2]), tonumber(lease.hard_ms))
  if wanted > tonumber(lease.until_ms) then
    set_until(id, wanted)
  end
end
return 1
