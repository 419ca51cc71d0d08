-- KEYS: key, the owner's keys, all keys. ARGV: id. 1: it was there.
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('SREM', KEYS[3], ARGV[1])
return redis.call('DEL', KEYS[1])
