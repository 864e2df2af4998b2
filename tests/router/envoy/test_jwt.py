"""JWTs at a real Envoy: client, audience, expiry, pipelines and forged tokens."""

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.router.envoy.http_clients import PATH, a_fake_router, call, code, post
from tests.router.envoy.openssl import Signer, jwks, replace, unsigned
from tests.router.fakes import FakeReplica, a_pipeline, a_rig
from trimtab_pipelines.edge_settings import EdgeSettings, JwtIssuer
from trimtab_router.envoy.api_keys import HashedKey, format_entry, key_digest, new_key

PIPELINE = a_pipeline(1)
ISSUER = "https://issuer.example"


def claims(**changes: Any) -> dict[str, Any]:
    found = {"iss": ISSUER, "aud": "trimtab", "sub": "alice", "exp": time.time() + 600} | changes
    return {name: value for name, value in found.items() if value is not None}


def an_issuer(folder: Path, *signers: Signer, **changes: Any) -> JwtIssuer:
    file = folder / "jwks.json"
    file.write_text(jwks(*signers))
    return JwtIssuer(**{"issuer": ISSUER, "audiences": ["trimtab", "other"], "jwks": str(file)} | changes)


def bearer(token: str) -> tuple[str, str]:
    return "authorization", f"Bearer {token}"


@pytest.mark.parametrize("algorithm", ["RS256", "ES256"])
async def test_valid_token_passes_and_forged_one_is_refused(tmp_path, algorithm):
    signer, forger = Signer.make("good", algorithm), Signer.make("forged", algorithm)

    def signed(**changes: Any) -> str:
        return signer.token(tmp_path, claims(**changes))

    edge = EdgeSettings(jwt=(an_issuer(tmp_path, signer),))
    async with a_rig(edge=edge) as rig:
        good = signed()
        assert (await post(rig, bearer(good))).status == 200
        assert (await post(rig, ("Authorization", f"bearer {good}"))).status == 200
        assert (await post(rig, bearer(signed(aud=["another", "other"])))).status == 200
        assert await call(rig, bearer(good)) == "OK"
        for what, token in {
            "another issuer": signed(iss="https://elsewhere.example"),
            "no issuer": signed(iss=None),
            "without an end": signed(exp=None),
            "another's signature under a known name": forger.token(tmp_path, claims(), kid="good"),
            "unsigned": unsigned(claims()),
            "another algorithm": signer.token(tmp_path, claims(), alg="HS256"),
        }.items():
            refused = await post(rig, bearer(token))
            assert (refused.status, refused.headers["x-trimtab-reason"]) == (401, "Unauthenticated"), what
            assert await code(rig, bearer(token)) == "UNAUTHENTICATED", what
        for elsewhere in (signed(aud="another"), signed(aud=None), signed(aud=[])):
            assert (await post(rig, bearer(elsewhere))).status == 403
            assert await code(rig, bearer(elsewhere)) == "PERMISSION_DENIED"
        for headers, path in (
            ((), PATH),
            ((("x-api-key", good),), PATH),
            ((("authorization", good),), PATH),
            ((), f"{PATH}?access_token={good}"),
            ((bearer(good), bearer(good)), PATH),
            ((("cookie", f"access_token={good}"),), PATH),
            ((("x-trimtab-client", "token:alice"),), PATH),
        ):
            assert (await post(rig, *headers, path=path)).status == 401, headers


async def test_a_subject_that_could_be_more_than_a_name_is_none(tmp_path):
    signer = Signer.make("good")
    settings = EdgeSettings(jwt=(an_issuer(tmp_path, signer),))
    async with a_rig(edge=settings) as rig:
        for subject in ("alice\r\nx-evil: 1", "älice", "alice bob", "", "a" * 129, None, "\0", "alice,bob", "%0d%0a"):
            refused = await post(rig, bearer(signer.token(tmp_path, claims(sub=subject))))
            assert (refused.status, refused.headers["x-trimtab-reason"]) == (403, "Forbidden"), repr(subject)
        for no_name in (7, True, ["alice"], {"name": "alice"}):
            assert (await post(rig, bearer(signer.token(tmp_path, claims(sub=no_name))))).status == 401
        assert (await post(rig, bearer(signer.token(tmp_path, claims(sub="auth0|5f-a.b@c:d/e+f=_"))))).status == 200
        assert (await post(rig, bearer(signer.token(tmp_path, claims(sub="a" * 128))))).status == 200


@pytest.mark.parametrize("bare", [False, True])
async def test_the_client_and_the_pipelines_are_what_the_claims_say(tmp_path, bare):
    signer, clients = Signer.make("good"), []

    async def answer(request: web.BaseRequest) -> web.Response:
        clients.append(request.headers.getall("x-trimtab-client"))
        assert "authorization" not in request.headers
        return web.Response(text="{}")

    own = {"client_claim": "client_id", "pipelines_claim": "pipelines", "unprefixed_pipelines": bare}
    issuer = an_issuer(tmp_path, signer, **own)
    async with a_fake_router(answer, EdgeSettings(jwt=(issuer,))) as ports, aiohttp.ClientSession() as session:

        async def ask(**changes: Any) -> int:
            token = signer.token(tmp_path, claims(client_id="batch-7", **changes))
            url = f"http://127.0.0.1:{ports.rest_port}/v2"
            headers = [bearer(token), ("x-trimtab-client", "key:mallory")]
            async with session.get(url, headers=headers) as answered:
                return answered.status

        for right in (["another", "default/sample"], ["default/*"], ["*"]):
            assert await ask(pipelines=right) == 200, right
        whole = "default/sample"
        for wrong in (["default/another"], [], whole, None, {whole: True}, ["default/"], [[whole]], 1):
            assert await ask(pipelines=wrong) == 403, wrong
        for elsewhere in (["other/sample"], ["other/*"], ["default"]):
            assert await ask(pipelines=elsewhere) == 403, elsewhere
        assert await ask(pipelines=["default/", "sample"]) == (200 if bare else 403), "as every tenant may have one"
    assert clients == [[f"token:{hashlib.sha256(ISSUER.encode()).hexdigest()[:8]}:batch-7"]] * (4 if bare else 3)


@pytest.mark.parametrize("differ_in", ["issuer", "end of a long name"])
async def test_clients_that_differ_in_part_are_two(tmp_path, differ_in):
    names, hosts = ("a" * 127 + "b", "a" * 127 + "c"), ("one.example", "one.example")
    if differ_in == "issuer":
        names, hosts = ("alice", "alice"), ("one.example", "two.example")
    issuers, tokens, replica = {}, [], FakeReplica()
    for host, name in zip(hosts, names, strict=True):
        folder, signer = tmp_path / host, Signer.make(host)
        folder.mkdir(exist_ok=True)
        issuers[host] = an_issuer(folder, signer, issuer=f"https://{host}")
        tokens.append(bearer(signer.token(folder, claims(iss=f"https://{host}", sub=name))))
    edge = EdgeSettings.model_validate({"jwt": tuple(issuers.values()), "clients": {"concurrency": 1}})
    async with a_rig(PIPELINE, {"stage-0": [replica]}, edge=edge) as rig:
        replica.gate.clear()
        asking = [asyncio.create_task(post(rig, tokens[0]))]
        await replica.arrived.wait()
        assert (await post(rig, tokens[0])).headers["x-trimtab-reason"] == "ClientConcurrencyLimited"
        asking.append(asyncio.create_task(post(rig, tokens[1])))
        await rig.until(lambda: rig.router.admission.memory.requests == 2)
        replica.gate.set()

        assert [(await one).status for one in asking] == [200, 200]


async def test_keys_and_tokens_are_taken_beside_each_other(tmp_path):
    signer, key, keys = Signer.make("good"), new_key(), tmp_path / "keys"
    keys.write_text(f"bob: {format_entry(HashedKey('bob', key_digest(key)))}\n")
    settings = EdgeSettings(jwt=(an_issuer(tmp_path, signer),), keys_file=str(keys))
    good, bad = signer.token(tmp_path, claims()), signer.token(tmp_path, claims(aud="another"))
    async with a_rig(edge=settings) as rig:
        for headers, status in (
            ((), 401),
            ((bearer(good),), 200),
            ((("x-api-key", key),), 200),
            ((bearer(key),), 200),
            ((("x-api-key", key), bearer(good)), 200),
            ((("x-api-key", new_key()), bearer(good)), 401),
            ((("x-api-key", key), bearer(bad)), 403),
            ((bearer(bad),), 403),
        ):
            assert (await post(rig, *headers)).status == status, headers
    async with a_rig(edge=EdgeSettings(keys_file=str(keys))) as rig:
        assert (await post(rig, bearer(good))).status == 401
        assert (await post(rig, ("x-api-key", key))).status == 200


async def test_rotated_issuer_keys_replace_the_old(tmp_path):
    old, new = Signer.make("old"), Signer.make("new")
    settings = EdgeSettings(jwt=(an_issuer(tmp_path, old),))
    first, second = bearer(old.token(tmp_path, claims())), bearer(new.token(tmp_path, claims()))
    async with a_rig(edge=settings) as rig:

        async def until_both_are(first_status: int, second_status: int) -> float:
            began = asyncio.get_running_loop().time()
            async with asyncio.timeout(40):
                while [(await post(rig, one)).status for one in (first, second)] != [first_status, second_status]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            return asyncio.get_running_loop().time() - began

        await until_both_are(200, 401)
        file = Path(settings.jwt[0].jwks)
        replace(file, "{ this is no key set")
        replace(file, jwks(old, new))
        assert await until_both_are(200, 200) < 15
        replace(file, jwks(new))
        assert await until_both_are(401, 200) < 15
