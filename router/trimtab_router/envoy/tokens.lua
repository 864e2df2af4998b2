-- Refuses every request without a client name, even if an earlier filter let it pass.
-- Sets the client name of a verified token, if the token names this pipeline or its issuer restricts no pipelines.
-- The route's filter context holds "issuer:ISS" = {client = CLAIM, prefix = prefix of its client names}, and, if its
-- tokens restrict pipelines, pipelines = CLAIM and named = {NAME = true} for all names that mean this pipeline.
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
