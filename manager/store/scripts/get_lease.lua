-- ARGV: sandbox id. Returns its row (common.lua) or nil.
return lease_row(ARGV[1], now_ms())
