"""Lua scripts of `work_queue`. KEYS[1] is the prefix and hash tag of all keys.

Keys below `evalspan:{evaluation}:`
  meta      hash    epoch (set: the queue is filled), filling (token of a fill in progress),
                    own (set: a lane runs its own shards alone, without stealing or copies),
                    predicted and took (seconds of all done shards; their ratio corrects predictions)
  info      hash    shard -> lane, rank, seconds (of every shard that was named, claimed or not)
  where     hash    queued shard -> its lane
  lane:L    zset    shard by rank (lower first)
  lanes     set     every lane that has had a shard
  load      zset    lane by predicted seconds still queued in it; only lanes with a shard
  claims    hash    shard -> trial and time of the claim
  held      hash    trial -> its claims
  withdrawn set     shards that must not return to the queue
  ends      zset    claimed shard without a copy, by the time at which its claim should end
  copies    hash    claimed shard -> trial that runs it a second time; '': one of the two is done
  copying   hash    trial -> the shard that it was the last to run a second time
  trials    hash    trial -> progress (JSON)
  gone      set     dismissed trials: they claim nothing more, and their heartbeats register nothing

Invariant: a shard is in `where`, in `claims` or in neither; never in both.

Stealing, in `steal` alone: the head of the lane with the most predicted seconds left. Lanes are
longest first, so the freed trial takes the longest shard of the lane that would end last.

Copying, in `copy` alone: with no shard left to claim, a freed trial runs a copy of another trial's
shard. The condition: the other still needs over 1.5 times the seconds of a fresh run here; of the
16 claims that should have ended first, the one with most to gain. A shard is copied once; the first
to finish counts.
"""

_COMMON = """
local P = KEYS[1]
local function key(name) return P .. name end

local function now()
  local t = redis.call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1000000
end

local function stamp(t) return string.format('%.6f', t) end

local function held(trial)
  local text = redis.call('HGET', key('held'), trial)
  return text and cjson.decode(text) or {}
end

local function keep_held(trial, shards)
  if #shards == 0 then redis.call('HDEL', key('held'), trial)
  else redis.call('HSET', key('held'), trial, cjson.encode(shards)) end
end

local function owner(shard)
  local text = redis.call('HGET', key('claims'), shard)
  if not text then return nil end
  return cjson.decode(text)[1]
end

local function info(shard)
  local text = redis.call('HGET', key('info'), shard)
  if text then return cjson.decode(text) end
  return {'', '0', '0'}
end

-- seconds that a run takes where one was predicted to take 1: by the shards done; nil before the first
local function pace()
  local meta = redis.call('HMGET', key('meta'), 'predicted', 'took')
  local predicted = tonumber(meta[1] or 0)
  return predicted and predicted > 0 and tonumber(meta[2] or 0) / predicted or nil
end

local function expect(shard, since)
  if redis.call('SISMEMBER', key('withdrawn'), shard) == 1 then return end
  redis.call('ZADD', key('ends'), stamp(since + tonumber(info(shard)[3]) * (pace() or 1)), shard)
end

local function gone(trial) return redis.call('SISMEMBER', key('gone'), trial) == 1 end

local function claim(trial, shard)
  local since = now()
  redis.call('HSET', key('claims'), shard, cjson.encode({trial, stamp(since)}))
  expect(shard, since)
  local mine = held(trial)
  mine[#mine + 1] = shard
  keep_held(trial, mine)
end

local function unclaim(shard)
  local trial = owner(shard)
  if not trial then return end
  redis.call('HDEL', key('claims'), shard)
  redis.call('ZREM', key('ends'), shard)
  local rest = {}
  for _, s in ipairs(held(trial)) do if s ~= shard then rest[#rest + 1] = s end end
  keep_held(trial, rest)
end

-- takes a shard out of its lane and its seconds out of the load
local function unqueue(shard)
  local lane = redis.call('HGET', key('where'), shard)
  if not lane then return false end
  redis.call('HDEL', key('where'), shard)
  redis.call('ZREM', key('lane:' .. lane), shard)
  if redis.call('ZCARD', key('lane:' .. lane)) == 0 then redis.call('ZREM', key('load'), lane)
  else redis.call('ZINCRBY', key('load'), '-' .. info(shard)[3], lane) end
  return true
end

local function enqueue(shard)
  local known = info(shard)
  redis.call('HSET', key('where'), shard, known[1])
  redis.call('ZADD', key('lane:' .. known[1]), known[2], shard)
  redis.call('ZINCRBY', key('load'), known[3], known[1])
  redis.call('SADD', key('lanes'), known[1])
end

-- returns a claimed shard to its planned lane
local function give_back(shard)
  unclaim(shard)
  if redis.call('SISMEMBER', key('withdrawn'), shard) == 0 and not redis.call('HGET', key('where'), shard) then
    enqueue(shard)
  end
end

local function copier(shard) return redis.call('HGET', key('copies'), shard) or nil end

-- the shard that this trial copies
local function copied(trial)
  local shard = redis.call('HGET', key('copying'), trial)
  return shard and copier(shard) == trial and shard or nil
end

local function end_copy(trial, shard)
  if not shard or copied(trial) ~= shard then return end
  redis.call('HDEL', key('copies'), shard)
  local text = redis.call('HGET', key('claims'), shard)
  if text then expect(shard, tonumber(cjson.decode(text)[2])) end
end

local function note(trial, changes)
  local text = redis.call('HGET', key('trials'), trial)
  local progress = text and cjson.decode(text) or {}
  local moved = text == false
  for name, value in pairs(changes) do
    if progress[name] ~= value then progress[name] = value; moved = true end
  end
  progress['beat_at'] = stamp(now())
  if moved then progress['progress_at'] = progress['beat_at'] end
  redis.call('HSET', key('trials'), trial, cjson.encode(progress))
end
"""


def _with_common(body: str) -> str:
    return _COMMON + body


# takes token
BEGIN_FILL = _with_common("""
redis.call('HDEL', key('meta'), 'epoch')
redis.call('HSET', key('meta'), 'filling', ARGV[1])
for _, lane in ipairs(redis.call('SMEMBERS', key('lanes'))) do redis.call('UNLINK', key('lane:' .. lane)) end
redis.call('UNLINK', key('lanes'), key('load'), key('where'), key('info'), key('withdrawn'))
return 1
""")

# takes token, lane, then shard, rank, seconds. Earlier calls of this fill may have queued
# shards.
FILL = _with_common("""
if redis.call('HGET', key('meta'), 'filling') ~= ARGV[1] then return -1 end
local lane, load, queued = ARGV[2], 0, false
for i = 3, #ARGV, 3 do
  local shard = ARGV[i]
  redis.call('HSET', key('info'), shard, cjson.encode({lane, ARGV[i + 1], ARGV[i + 2]}))
  if redis.call('HEXISTS', key('claims'), shard) == 0 then
    redis.call('HSET', key('where'), shard, lane)
    redis.call('ZADD', key('lane:' .. lane), ARGV[i + 1], shard)
    load = load + tonumber(ARGV[i + 2])
    queued = true
  end
end
if queued then
  redis.call('ZINCRBY', key('load'), string.format('%.17g', load), lane)
  redis.call('SADD', key('lanes'), lane)
end
return 1
""")

# takes lane, then shard, rank, seconds
ADD = _with_common("""
for i = 2, #ARGV, 3 do
  local shard = ARGV[i]
  unqueue(shard)
  unclaim(shard)
  redis.call('HSET', key('info'), shard, cjson.encode({ARGV[1], ARGV[i + 1], ARGV[i + 2]}))
  redis.call('SREM', key('withdrawn'), shard)
  redis.call('HDEL', key('copies'), shard)
  enqueue(shard)
end
return 1
""")

# takes token, epoch, and whether lanes steal (1 or 0)
END_FILL = _with_common("""
if redis.call('HGET', key('meta'), 'filling') ~= ARGV[1] then return -1 end
redis.call('HDEL', key('meta'), 'filling', 'own')
if ARGV[3] == '0' then redis.call('HSET', key('meta'), 'own', '1') end
redis.call('HSET', key('meta'), 'epoch', ARGV[2])
return 1
""")

# takes shards
WITHDRAW = _with_common("""
local out = 0
for _, shard in ipairs(ARGV) do
  if unqueue(shard) then out = out + 1 end
  redis.call('SADD', key('withdrawn'), shard)
  redis.call('ZREM', key('ends'), shard)
end
return out
""")

# takes trial
REQUEUE = _with_common("""
local mine = held(ARGV[1])
for _, shard in ipairs(mine) do give_back(shard) end
end_copy(ARGV[1], copied(ARGV[1]))
redis.call('HDEL', key('copying'), ARGV[1])
redis.call('HDEL', key('trials'), ARGV[1])
redis.call('SADD', key('gone'), ARGV[1])
return mine
""")

# takes trial, lane
CLAIM = _with_common("""
local trial, lane = ARGV[1], ARGV[2]
if gone(trial) then return {'drained'} end

local function steal()
  local richest = redis.call('ZREVRANGE', key('load'), 0, 0)[1]
  if not richest then return nil end
  return redis.call('ZRANGE', key('lane:' .. richest), 0, 0)[1]
end

-- seconds that the shard's trial still needs at its rate; without a batch done, as long as it is late
local function left(shard, holder, elapsed, anew)
  local text = redis.call('HGET', key('trials'), holder)
  local progress = text and cjson.decode(text) or {}
  local done, all = progress['batches_done'] or 0, progress['batches'] or 0
  if progress['shard'] == shard and done > 0 then return elapsed * (all - done) / done end
  return elapsed > anew and elapsed or anew - elapsed
end

local function copy()
  local times = pace()
  if not times then return nil end -- no shard is done, so predictions cannot be corrected
  local best, most = nil, 0
  for _, shard in ipairs(redis.call('ZRANGE', key('ends'), 0, 15)) do
    local holder = cjson.decode(redis.call('HGET', key('claims'), shard))
    local anew = tonumber(info(shard)[3]) * times
    local gain = left(shard, holder[1], now() - tonumber(holder[2]), anew) - 1.5 * anew - 1
    if gain > most and not copier(shard) then best, most = shard, gain end
  end
  if best then
    redis.call('HSET', key('copies'), best, trial)
    redis.call('HSET', key('copying'), trial, best)
    redis.call('ZREM', key('ends'), best)
  end
  return best
end

for _, shard in ipairs(held(trial)) do return {'shard', shard} end -- the answer to an earlier call was lost
if copied(trial) then return {'shard', copied(trial)} end
if not redis.call('HGET', key('meta'), 'epoch') then return {'wait'} end
local own = redis.call('HEXISTS', key('meta'), 'own') == 1
local shard = redis.call('ZRANGE', key('lane:' .. lane), 0, 0)[1] or (not own and steal()) or nil
if not shard then
  shard = not own and copy() or nil
  if shard then return {'shard', shard} end
  return {'drained'}
end
unqueue(shard)
claim(trial, shard)
return {'shard', shard}
""")

# takes trial, shard, response bytes
DONE = _with_common("""
local trial, shard = ARGV[1], ARGV[2]
local mine = owner(shard) == trial
local claimed = redis.call('HGET', key('claims'), shard)
if mine and claimed then
  redis.call('HINCRBYFLOAT', key('meta'), 'predicted', info(shard)[3])
  redis.call('HINCRBYFLOAT', key('meta'), 'took', stamp(now() - tonumber(cjson.decode(claimed)[2])))
end
if copier(shard) then redis.call('HSET', key('copies'), shard, '') end
if mine or copier(shard) == '' then unclaim(shard) end
unqueue(shard) -- it may have been queued again meanwhile
local text = redis.call('HGET', key('trials'), trial)
local before = text and cjson.decode(text) or {}
local count = before['shards_done'] or 0
if before['last_done'] ~= shard then count = count + 1 end -- else this call is a repeat
note(trial, {shards_done = count, response_bytes = tonumber(ARGV[3]), last_done = shard})
return mine and 1 or 0
""")

# takes trial, shard
GIVE_BACK = _with_common("""
end_copy(ARGV[1], ARGV[2])
if owner(ARGV[2]) ~= ARGV[1] then return 0 end
give_back(ARGV[2])
return 1
""")

# takes trial, its current shard or "", progress (JSON object)
HEARTBEAT = _with_common("""
local trial, shard = ARGV[1], ARGV[2]
if gone(trial) then return 0 end
note(trial, cjson.decode(ARGV[3]))
if shard == '' then return 1 end
if redis.call('SISMEMBER', key('withdrawn'), shard) == 1 then -- its task is over
  if owner(shard) == trial then unclaim(shard) end
  end_copy(trial, shard)
  return 0
end
if cjson.decode(redis.call('HGET', key('trials'), trial))['last_done'] == shard and owner(shard) ~= trial then
  return 0 -- `done` has overtaken this beat
end
local by = owner(shard)
if copier(shard) == '' then return 0 end -- the other of its two trials is done
if by and copier(shard) == trial then return 1 end
if by == trial then return 1 end
if by then return 0 end
unqueue(shard) -- Redis came back empty, or the shard was queued again while this trial was silent
claim(trial, shard)
return 1
""")

REMOVE = _with_common("""
for _, lane in ipairs(redis.call('SMEMBERS', key('lanes'))) do redis.call('UNLINK', key('lane:' .. lane)) end
return redis.call('UNLINK', key('meta'), key('info'), key('where'), key('lanes'), key('load'), key('claims'),
  key('held'), key('withdrawn'), key('ends'), key('copies'), key('copying'), key('trials'), key('gone'))
""")
