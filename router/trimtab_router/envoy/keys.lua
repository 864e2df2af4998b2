-- Authenticates requests by API key, and passes tokens on to the filter that verifies them.
-- The route's filter context holds "sha256:DIGITS" = "+client" (may call) or "-client" (may not), and "keys" and
-- "tokens" = true if each is accepted. Keys are compared by their SHA-256 only. The messages of refusals are in Envoy's
-- local replies. If the context accepts neither, every request is refused: this filter exists only with authentication.
local bit = require("bit")
local band, bnot, bxor, ror, rshift, tobit = bit.band, bit.bnot, bit.bxor, bit.ror, bit.rshift, bit.tobit

-- The first 32 bits of the fractional parts of the square and cube roots of the first primes (FIPS 180-4, 4.2.2, 5.3.3).
local function fraction_bits(root, prime)
  return tobit(math.floor((prime ^ root % 1) * 4294967296))
end
local initial, constants, prime = {}, {}, 2
while #constants < 64 do
  local is_prime = true
  for divisor = 2, math.floor(math.sqrt(prime)) do
    if prime % divisor == 0 then is_prime = false break end
  end
  if is_prime then
    if #initial < 8 then initial[#initial + 1] = fraction_bits(1 / 2, prime) end
    constants[#constants + 1] = fraction_bits(1 / 3, prime)
  end
  prime = prime + 1
end

local function compress(state, block, at)
  local w = {}
  for i = 1, 16 do
    local a, b, c, d = string.byte(block, at + 4 * (i - 1), at + 4 * i - 1)
    w[i] = tobit(((a * 256 + b) * 256 + c) * 256 + d)
  end
  for i = 17, 64 do
    local x, y = w[i - 15], w[i - 2]
    local s0 = bxor(ror(x, 7), ror(x, 18), rshift(x, 3))
    local s1 = bxor(ror(y, 17), ror(y, 19), rshift(y, 10))
    w[i] = tobit(w[i - 16] + s0 + w[i - 7] + s1)
  end
  local a, b, c, d, e, f, g, h = unpack(state)
  for i = 1, 64 do
    local s1 = bxor(ror(e, 6), ror(e, 11), ror(e, 25))
    local t1 = h + s1 + bxor(band(e, f), band(bnot(e), g)) + constants[i] + w[i]
    local s0 = bxor(ror(a, 2), ror(a, 13), ror(a, 22))
    local t2 = s0 + bxor(band(a, b), band(a, c), band(b, c))
    h, g, f, e, d, c, b, a = g, f, e, tobit(d + t1), c, b, a, tobit(t1 + t2)
  end
  local old = {a, b, c, d, e, f, g, h}
  for i = 1, 8 do state[i] = tobit(state[i] + old[i]) end
end

local function sha256(text)
  local length = #text
  local padded = text .. "\128" .. string.rep("\0", (55 - length) % 64) .. "\0\0\0\0" ..
    string.char(band(rshift(length, 21), 255), band(rshift(length, 13), 255), band(rshift(length, 5), 255), band(length * 8, 255))
  local state = {unpack(initial)}
  for at = 1, #padded, 64 do compress(state, padded, at) end
  local words = {}
  for i = 1, 8 do words[i] = bit.tohex(state[i]) end
  return table.concat(words)
end

function envoy_on_request(handle)
  local context, headers = handle:filterContext(), handle:headers()
  headers:remove("x-trimtab-client")
  local key, authorization = headers:get("x-api-key"), headers:get("authorization")
  local scheme, bearer = (authorization or ""):match("^(%a+) +(%S+)$")
  if not scheme or scheme:lower() ~= "bearer" then bearer = nil end
  local is_token = bearer and select(2, bearer:gsub("%.", "")) == 2
  if is_token and not key and context:get("tokens") then
    headers:replace("authorization", "Bearer " .. bearer)
    return
  end
  if not key and bearer and not is_token then
    key = bearer
    headers:remove("authorization")
  end
  local entry = key and #key <= 256 and context:get("keys") and context:get("sha256:" .. sha256(key))
  if not entry then
    handle:respond({[":status"] = "401", ["www-authenticate"] = "Bearer"}, "unknown")
    return
  end
  headers:remove("x-api-key")
  if entry:sub(1, 1) ~= "+" then
    handle:respond({[":status"] = "403"}, "forbidden")
    return
  end
  headers:add("x-trimtab-client", "key:" .. entry:sub(2))
end
