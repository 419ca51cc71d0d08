-- KEYS: managers. ARGV: holder, ms (0: it goes). Returns all that are there; the holder counts for so long from now.
local now = now_ms()
redis.call('ZADD', KEYS[1], whole(now + tonumber(ARGV[2])), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', whole(now))
return redis.call('ZRANGE', KEYS[1], 0, -1)
