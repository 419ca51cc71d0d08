-- KEYS: slots. Returns {slots, cpu_milli, memory} in use.
local slots, cpu, memory = 0, 0, 0
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local load = load_of(id)
  slots, cpu, memory = slots + 1, cpu + load[1], memory + load[2]
end
return {slots, whole(cpu), whole(memory)}
