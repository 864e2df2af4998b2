-- The second lock: whatever the filters before it overlook, a request without a client's name goes no further.
-- Names the client of a verified token, and lets it pass where the token names this pipeline or its issuer names none.
-- The route's filter context holds "issuer:ISS" = {client = CLAIM, prefix = of its clients' names}, and where its
-- tokens say what they may call, pipelines = CLAIM and named = {NAME = true} of all names that mean this pipeline.
local function lists(claim, named)
  if type(claim) ~= "table" then return false end
  for _, name in pairs(claim) do
    if type(name) == "string" and named[name] then return true end
  end
  return false
end

function envoy_on_request(handle)
  local context, headers = handle:filterContext(), handle:headers()
  if headers:get("x-trimtab-client") then return end
  local verified = handle:streamInfo():dynamicMetadata():get("envoy.filters.http.jwt_authn")
  local claims = verified and verified["claims"]
  local issuer = claims and context:get("issuer:" .. tostring(claims["iss"]))
  if not issuer then
    handle:respond({[":status"] = "401", ["www-authenticate"] = "Bearer"}, "unknown")
    return
  end
  local client = claims[issuer["client"]]
  local known = type(client) == "string" and #client <= 128 and client:match("^[%w%-_.@:|/+=]+$")
  if not known or (issuer["pipelines"] and not lists(claims[issuer["pipelines"]], issuer["named"])) then
    handle:respond({[":status"] = "403"}, "forbidden")
    return
  end
  headers:add("x-trimtab-client", issuer["prefix"] .. client)
end
