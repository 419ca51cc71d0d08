-- ARGV: sandbox ids. Returns one flat hash each, empty where there is none.
local rows = {}
for i, id in ipairs(ARGV) do
  local key = redis.call('GET', SANDBOX .. id)
  rows[i] = key and redis.call('HGETALL', key) or {}
end
return rows
