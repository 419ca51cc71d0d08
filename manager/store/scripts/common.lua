-- Stands in front of every script. The constants SANDBOX, LIVE, CLAIMS, LEASE, LEASES, OPERATIONS, HOLDER, HOLDING,
-- CLOCK and SETTLED come from keys.py: whole keys, or prefixes that an id is put behind.
--
-- Redis refuses a script for want of memory at its first write or not at all. So what takes memory begins with a write
-- that needs some (SET, HSET), and is refused whole; what gives memory back begins with one that frees (DEL, ZREM), and
-- is never refused.

local ENDED_KEPT_MS = 7 * 24 * 3600 * 1000

-- Redis TIME in ms.
local function wall_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Redis TIME without the steps that its clock made: the time of leases and claims.
local function now_ms()
  return wall_ms() - (tonumber(redis.call('GET', CLOCK)) or 0)
end

-- tostring() would write a time in ms in exponents.
local function whole(number)
  return string.format('%.0f', number)
end

-- A hash as a table; empty where there is none.
local function fields_of(key)
  local flat, fields = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do
    fields[flat[i]] = flat[i + 1]
  end
  return fields
end

local function set_until(id, until_ms)
  redis.call('HSET', LEASE .. id, 'until_ms', whole(until_ms))
  redis.call('ZADD', LEASES, whole(until_ms), id)
end

-- A new lease that begins now and lasts `first_ms`; operations of an earlier pod are forgotten.
local function make_lease(id, now, first_ms, hard_ms, active_ms, idle_ms, max_ms)
  redis.call('DEL', OPERATIONS .. id)
  redis.call('HDEL', LEASE .. id, 'closing')
  redis.call('HSET', LEASE .. id, 'hard_ms', whole(hard_ms), 'active_ms', active_ms, 'idle_ms', idle_ms,
    'max_ms', max_ms)
  set_until(id, math.min(now + first_ms, hard_ms))
end

local function drop_lease(id)
  redis.call('DEL', LEASE .. id, OPERATIONS .. id)
  redis.call('ZREM', LEASES, id)
end

-- How many operations are under way, by holders that still have a heartbeat; others are forgotten.
local function operations_of(id)
  local total = 0
  for holder, count in pairs(fields_of(OPERATIONS .. id)) do
    if redis.call('EXISTS', HOLDER .. holder) == 1 then
      total = total + tonumber(count)
    else
      redis.call('HDEL', OPERATIONS .. id, holder)
    end
  end
  return total
end

-- {id, until, hard, operations, now, active, idle, max}, all but the first as decimal text; false where there is none.
local function lease_row(id, now)
  local lease = fields_of(LEASE .. id)
  if not lease.until_ms then
    return false
  end
  return {id, lease.until_ms, lease.hard_ms, whole(operations_of(id)), whole(now), lease.active_ms, lease.idle_ms,
    lease.max_ms}
end

-- The binding at `key` was a claim that comes to nothing: what was there before is there again, the slot is free.
local function take_back(key, slots, id)
  local before = redis.call('HGET', key, 'before')
  redis.call('ZREM', slots, id)
  redis.call('SREM', LIVE, id)
  redis.call('ZREM', CLAIMS, id)
  redis.call('DEL', key)
  if before and before ~= '' then
    redis.call('HSET', key, unpack(cjson.decode(before)))
    redis.call('PEXPIRE', key, ENDED_KEPT_MS)
    redis.call('PEXPIRE', SANDBOX .. id, ENDED_KEPT_MS)
  else
    redis.call('DEL', SANDBOX .. id)
  end
end

-- {cpu in thousandths of a core, memory in bytes} that the sandbox may use; 0 where its profile does not say.
local function load_of(id)
  local key = redis.call('GET', SANDBOX .. id)
  local found = key and redis.call('HMGET', key, 'cpu_milli', 'memory') or {}
  return {tonumber(found[1] or '0') or 0, tonumber(found[2] or '0') or 0}
end

-- {what, held, limit} of the first limit of the owner that one more sandbox would pass; false where there is none.
local function over_limit(slots, id, limit, cpu, memory, cpu_limit, memory_limit)
  local mine = redis.call('ZSCORE', slots, id) and 1 or 0
  local held = redis.call('ZCARD', slots) - mine
  if limit >= 0 and held >= limit then
    return {'slots', whole(held), whole(limit)}
  end
  if cpu_limit < 0 and memory_limit < 0 then
    return false
  end
  local cpu_held, memory_held = 0, 0
  for _, other in ipairs(redis.call('ZRANGE', slots, 0, -1)) do
    if other ~= id then
      local load = load_of(other)
      cpu_held, memory_held = cpu_held + load[1], memory_held + load[2]
    end
  end
  if cpu_limit >= 0 and cpu_held + cpu > cpu_limit then
    return {'cpu', whole(cpu_held), whole(cpu_limit)}
  end
  if memory_limit >= 0 and memory_held + memory > memory_limit then
    return {'memory', whole(memory_held), whole(memory_limit)}
  end
  return false
end

-- How many ms from now the first of the owner's slots comes free by itself, as far as is known: a quiet lease's end, a
-- busy one's hard end, a claim's that nobody finishes. -1: none does.
local function soonest_ms(slots, now)
  local first = -1
  local rows = redis.call('ZRANGE', slots, 0, -1, 'WITHSCORES')
  for i = 1, #rows, 2 do
    local ends = rows[i + 1] ~= 'inf' and tonumber(rows[i + 1]) or nil
    local lease = fields_of(LEASE .. rows[i])
    if lease.until_ms then
      ends = tonumber(operations_of(rows[i]) > 0 and lease.hard_ms or lease.until_ms)
    end
    if ends and (first < 0 or ends - now < first) then
      first = math.max(0, ends - now)
    end
  end
  return first
end
