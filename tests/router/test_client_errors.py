"""Client errors and server errors are counted apart, with and without Envoy."""

import asyncio
import shutil
import time
from contextlib import suppress

import grpc
import pytest
from yarl import URL

from tests.router.fakes import FakeReplica, a_call, a_pipeline, a_request, a_rig, an_envoy
from trimtab.local.envoy_process import make_sockets
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.error_codes import ErrorCode
from trimtab_protocol import grpc_messages
from trimtab_router.refusal import Refusal


@pytest.mark.parametrize(
    ("status", "reason", "code", "callers"),
    [
        (400, "Malformed", "INVALID_ARGUMENT", True),
        (401, "Unauthenticated", "UNAUTHENTICATED", True),
        (403, "Forbidden", "PERMISSION_DENIED", True),
        (408, "RequestTimeout", "REQUEST_TIMEOUT", True),
        (413, "PayloadTooLarge", "PAYLOAD_TOO_LARGE", True),
        (429, "ClientRateLimited", "RESOURCE_EXHAUSTED", True),
        (431, "HeadersTooLarge", "INVALID_ARGUMENT", True),
        (429, "Overload", "RESOURCE_EXHAUSTED", False),
        (502, "RouterUnavailable", "UNAVAILABLE", False),
        (503, "RouterUnavailable", "UNAVAILABLE", False),
    ],
)
async def test_proxy_rejections_are_client_or_server_errors(status, reason, code, callers):
    async with a_rig(a_pipeline(1), {"stage-0": [FakeReplica()]}) as rig:
        rig.router.accounting.count_proxy_rejections({(status, reason): 3})

        assert await rig.metric("trimtab_refusals_total", code=code, reason=reason) == 3
        assert await rig.metric("trimtab_client_errors_total") == (3 if callers else 0)
        assert await rig.outcomes() == {"refused": 3}


async def test_missing_key_is_a_client_error(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("")
    settings = EdgeSettings(keys_file=str(keys))
    sockets = make_sockets()
    async with a_rig(a_pipeline(1), {"stage-0": [FakeReplica()]}) as rig:
        control = await rig.listeners.listen_behind_envoy(sockets, settings)
        control.use_keys(())
        async with an_envoy(rig.router.pipeline, sockets, settings) as ports:
            async with rig.session.post(f"http://127.0.0.1:{ports.rest_port}/v2/models/sample/infer") as answer:
                assert (answer.status, answer.headers["x-trimtab-reason"]) == (401, "Unauthenticated")
            hidden = URL(f"http://127.0.0.1:{ports.rest_port}/v2/models%2fsample/infer", encoded=True)
            async with rig.session.post(hidden) as answer:
                assert (answer.status, answer.headers["x-trimtab-reason"]) == (400, "Malformed")
            async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc_port}") as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(grpc_messages.method_path("ModelInfer"), None, None)(b"")
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            await rig.until(lambda: rig.value("trimtab_requests_received_total") == 3)

        assert await rig.metric("trimtab_refusals_total", code="UNAUTHENTICATED", reason="Unauthenticated") == 2
        assert await rig.metric("trimtab_client_errors_total") == 3
    shutil.rmtree(sockets.folder)


async def test_what_is_too_large_over_grpc_has_its_code_and_is_counted():
    sockets = make_sockets()
    async with a_rig(a_pipeline(1), {"stage-0": [FakeReplica()]}) as rig:
        await rig.listeners.listen_behind_envoy(sockets, EdgeSettings())
        async with (
            an_envoy(rig.router.pipeline, sockets, max_payload_bytes=1000) as ports,
            grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc_port}") as channel,
        ):
            call = channel.unary_unary(grpc_messages.method_path("ModelInfer"), None, None)
            with pytest.raises(grpc.aio.AioRpcError) as body:
                await call(b"x" * 2000)
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"", metadata=[("x-long", "y" * 20_000)])
            await rig.until(lambda: rig.value("trimtab_requests_received_total") == 2)

        assert body.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await rig.metric("trimtab_refusals_total", code="PAYLOAD_TOO_LARGE", reason="PayloadTooLarge") == 1
        assert await rig.metric("trimtab_refusals_total", reason="HeadersTooLarge") == 1
    shutil.rmtree(sockets.folder)


async def test_disconnect_before_the_slo_is_a_client_error():
    replica = FakeReplica()
    replica.gate.clear()
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}) as rig:
        caller = asyncio.create_task(rig.rest(a_request()))
        await replica.arrived.wait()
        assert await rig.metric("trimtab_requests_in_flight") == 1
        caller.cancel()
        await rig.until(lambda: rig.value("trimtab_requests_total", outcome="dropped") == 1)

        assert await rig.metric("trimtab_client_errors_total") == 1
        assert await rig.metric("trimtab_requests_in_flight") == 0


async def test_disconnect_after_the_slo_is_a_server_error():
    replica = FakeReplica()
    replica.gate.clear()
    async with a_rig(a_pipeline(1, slo={"latency": "60s"}), {"stage-0": [replica]}) as rig:
        request = a_request(parameters={"timeout": 600_000_000})
        waiting = asyncio.create_task(rig.router.infer(a_call(rig.router.pipeline, request, time.monotonic() - 61.0)))
        await replica.arrived.wait()
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting

        assert await rig.outcomes() == {"dropped": 1}
        assert await rig.metric("trimtab_client_errors_total") == 0


@pytest.mark.parametrize(
    ("parameters", "callers"), [({}, 0), ({"timeout": 200_000}, 0), ({"timeout": 199_999}, 20)], ids=str
)
async def test_drop_at_the_slo_is_a_server_error(parameters, callers):
    """How sums of seconds are rounded depends on the power of two below them: a clock that runs long sees many."""
    now, pipeline = time.monotonic(), a_pipeline(1, slo={"latency": "200ms"})
    async with a_rig(pipeline, {"stage-0": [FakeReplica()]}) as rig:
        for n in range(20):
            with pytest.raises(Refusal) as caught:
                await rig.router.infer(a_call(pipeline, a_request(parameters=parameters), (now - 1.0) / 2**n))
            assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED

        assert await rig.metric("trimtab_client_errors_total") == callers
        assert await rig.outcomes() == {"dropped": 20}


async def test_proxy_logs_rejections_only_if_configured():
    sockets = make_sockets()
    async with a_rig(a_pipeline(1), {"stage-0": [FakeReplica()]}) as rig:
        await rig.listeners.listen_behind_envoy(sockets, EdgeSettings())
        async with an_envoy(rig.router.pipeline, sockets, max_payload_bytes=1000) as ports:
            url = f"http://127.0.0.1:{ports.rest_port}/v2/models/sample/infer?their=words"
            async with rig.session.post(url, data=b"x" * 2000) as answer:
                assert answer.status == 413
        log = (sockets.folder / "envoy.log").read_text()
    shutil.rmtree(sockets.folder)

    assert "their" not in log
