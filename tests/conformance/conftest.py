"""Targets of third-party clients: an echo pipeline and a chat pipeline, in plain text, and with TLS and an API key."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.pipelines import echo_plan, write_echo_pipeline
from tests.conformance.target import PATIENCE_SECONDS, Target
from tests.local_run import chat_pipeline, chat_plan, up
from tests.router.envoy.openssl import Authority
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.edge_settings import EdgeSettings, EdgeTls
from trimtab_pipelines.plan import PipelinePlan
from trimtab_router.envoy.api_keys import HashedKey, format_entry, key_digest, new_key

secured_or_not = pytest.fixture(scope="session", params=[False, True], ids=["plain", "secured"])


@secured_or_not
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Two stages that add one each to a row of four numbers."""
    folder = tmp_path_factory.mktemp("echo")
    write_echo_pipeline(folder, slo={"latency": f"{PATIENCE_SECONDS:g}s"})
    with served(folder, echo_plan(), secured=request.param) as serving:
        yield serving


@secured_or_not
def chat_target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A small model with random weights, which generates the likeliest tokens."""
    folder, pipeline = tmp_path_factory.mktemp("chats"), chat_pipeline()
    write_json(folder / "pipeline.yaml", pipeline)
    with served(folder, chat_plan(pipeline), secured=request.param) as serving:
        yield serving


@contextmanager
def served(folder: Path, plan: PipelinePlan, *, secured: bool) -> Iterator[Target]:
    """Serve pipeline.yaml with `trimtab up`; secured, it answers only clients that have a key, over TLS."""
    write_json(folder / "plan.json", plan)
    arguments, ca, key = ["--plan", str(folder / "plan.json")], None, None
    if secured:
        key, authority = new_key(), Authority(folder).begin()
        write_edge_settings(folder, authority, key)
        arguments += ["--edge", str(folder / "edge.yaml")]
        ca = authority.file
    with up(folder, *arguments, pipeline=folder / "pipeline.yaml") as local:
        yield Target(f"127.0.0.1:{local.rest_port}", f"127.0.0.1:{local.grpc_port}", plan.spec.pipeline, ca, key)


def write_edge_settings(folder: Path, authority: Authority, key: str) -> None:
    certificate, certificate_key, keys = folder / "tls.crt", folder / "tls.key", folder / "keys"
    authority.issue("localhost", certificate, certificate_key)
    keys.write_text(f"client: {format_entry(HashedKey('client', key_digest(key)))}\n")
    tls = EdgeTls(certificate=str(certificate), key=str(certificate_key))
    write_json(folder / "edge.yaml", EdgeSettings(tls=tls, keys_file=str(keys)))
