-- KEYS: stream, how many found no room. ARGV: most entries, JSON of each event. How many found no room this time.
local room = tonumber(ARGV[1]) - redis.call('XLEN', KEYS[1])
local lost = tonumber(redis.call('GET', KEYS[2]) or 0)
if lost > 0 and room > 1 then
  redis.call('XADD', KEYS[1], '*', 'gap', whole(lost))
  redis.call('DEL', KEYS[2])
  room = room - 1
end
lost = 0
for place = 2, #ARGV do
  if room > 0 then
    redis.call('XADD', KEYS[1], '*', 'event', ARGV[place])
    room = room - 1
  else
    lost = lost + 1
  end
end
if lost > 0 then
  redis.call('INCRBY', KEYS[2], lost)
end
return lost
