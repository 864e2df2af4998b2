"""Trimtab in a real cluster: installed by helm, a pipeline that adapts behind TLS and keys, chats and modalities.

The tests follow each other: the load of one leaves its traces in Prometheus for the next.
"""

import asyncio
import base64
import json
import math
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
import yaml

from tests.charts.expressions import all_expressions, evaluate
from tests.e2e import clients
from tests.e2e.conftest import LOAD, NAMESPACE, ROOT, SYSTEM, TOOLS, Installation, chart_values, pipeline_document, run
from tests.e2e.digits_av_jobs import MIN_RIGHT_SHARE, run_jobs
from tests.e2e.intruder import access_from_elsewhere
from tests.e2e.load import free_cores, load_within, send
from tests.e2e.observed import READY_SECONDS, ObservedPipeline, count_changes, observed, served, until
from tests.figures import Figures
from tests.local_run import charts_of
from trimtab.local.load_process import LoadOptions
from trimtab_loadtester.clients import RestClient
from trimtab_model_servers.families.registry import build
from trimtab_model_servers.families.vision_transformer import ServedTransformer
from trimtab_model_servers.transformer.task_registry import save_task
from trimtab_model_servers.transformer.tasks import PLAIN, Head
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.kubernetes_names import ADMIN_KEYS_SECRET, ROUTER_ADMIN_PORT, router_admin_name
from trimtab_pipelines.model_spec import model_spec
from trimtab_pipelines.plan import PipelinePlanSpec
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import TASKS_PATH
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.tasks import TaskRecord
from trimtab_training.lmm_digits.questions import Chat, ChatSource

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(3600)]

DIGITS = ROOT / "pipelines" / "digits" / "pipeline.yaml"
VIT_TASKS = ROOT / "pipelines" / "vit-tasks" / "pipeline.yaml"
LOAD_SECONDS = 180.0
PLATEAU_SECONDS = 25
CALM_SHARE = 0.1
"""Of the load, before each time that certificate and key are replaced: at low load and at high load."""
REJECTED_SECONDS = 5.0
MIN_CHANGES, MAX_CHANGES, MIN_SLO_FRACTION = 1, 12, 0.98
MAX_ACCURACY_GAP = 0.02
PLAN_CHANGES, BETWEEN_SECONDS, LOOK_SECONDS = 40, 0.3, 0.001
PLAN_SECONDS = 120.0
IN_FORCE_SECONDS = 0.1
SMALL_SECONDS = 300.0
CHATS, SLOTS = 12, 8
LABEL = 1
MOUNTED_SECONDS = 180.0
"""The kubelet updates mounted ConfigMaps about once a minute."""
GENEROUS = {"latency": "60s", "timeToFirstToken": "30s"}
"""The tests of responses do not depend on their time."""
DOCS = ROOT / "docs" / "develop" / "bring-your-own-model.md"
OWN_IMAGE = "localhost/trimtab-own-model-server:e2e"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
MOUNT = ("-v", f"{CERTIFICATES}:{CERTIFICATES}:ro") if CERTIFICATES.exists() else ()
"""The builder downloads with this machine's certificates."""
FILE = re.compile(r"`([\w/.]+)`:\n```(?:python|toml|yaml|dockerfile)\n(.*?)```", re.DOTALL)
COUNT_FAMILIES = (
    "from importlib.metadata import entry_points; "
    "print(sum(bool(found.load()) for found in entry_points(group='trimtab.families')))"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def digits(installation: Installation) -> AsyncIterator[ObservedPipeline]:
    """The digits pipeline, applied and ready; its budget of cost, which has a dashboard's line, binds nothing."""
    document = pipeline_document(DIGITS)
    document["spec"]["budget"]["costPerHour"] = "100"
    async with observed(installation, load_pipeline(DIGITS).name) as pipeline:
        await installation.apply(document)
        await pipeline.wait_until_ready(READY_SECONDS)
        yield pipeline


async def test_api_server_accepts_every_manifest(installation: Installation) -> None:
    chart = ("trimtab", ROOT / "charts" / "trimtab", "-n", SYSTEM, "--kube-version", "1.34.0")
    rendered = await installation.helm("template", *chart, "--set", "trainer.enabled=true", *chart_values())

    apply = ("apply", "--dry-run=server", "--server-side", "--force-conflicts", "-f", "-")
    output = await installation.kubectl(*apply, stdin=rendered)

    assert len(output.splitlines()) == len([body for body in yaml.safe_load_all(rendered) if body])


async def test_pipeline_adapts_to_load(digits: ObservedPipeline, figures: Figures) -> None:
    """The load rises and falls for three minutes; certificate and key are replaced meanwhile."""
    cores = await free_cores(digits.installation)
    load = load_within(load_pipeline(DIGITS), await digits.profiles(), cores)
    figures.add(free_cores=cores, load_low_rps=load.low_rps, load_high_rps=load.high_rps)
    spec, access = load.spec(plateau_seconds=PLATEAU_SECONDS), digits.installation.credentials.access(LOAD)
    options = LoadOptions(spec, duration_seconds=LOAD_SECONDS, access=access)

    async with digits.sampled():
        results, replacements = await asyncio.gather(
            send(DIGITS, digits.address, options), clients.replace_credentials(digits, LOAD_SECONDS * CALM_SHARE)
        )

    summary, outcomes = results.summary(), {end.word: results.count(end) for end in RequestOutcome}
    measured = ("received", "slo_fraction", "latency_seconds_p99", "measured_accuracy", "expected_accuracy")
    figures.add(**outcomes, **{name: summary.get(name) for name in measured})
    visitor = replacements.visitor
    figures.add(failures=str(summary["failures"]), drops=str(summary["drops"]))
    figures.add(visitor_answered=visitor.answered, visitor_asked_to_retry=visitor.asked_to_retry)
    figures.require("failed requests", outcomes["failed"], "==", 0)
    figures.require("received requests without an outcome", summary["received"] - sum(outcomes.values()), "==", 0)
    assert visitor.failed == []
    seconds = max(replacements.certificate_seconds)
    figures.require("new certificate written to served, seconds", seconds, "<=", clients.CERTIFICATE_SECONDS)
    assert max(replacements.accepted_seconds) < math.inf
    figures.require("revoked key rejected, seconds", max(replacements.rejected_seconds), "<=", REJECTED_SECONDS)
    batches = count_changes(digits.samples, lambda sample: sample.batch_sizes)
    variants = count_changes(digits.samples, lambda sample: sample.variants)
    replicas = count_changes(digits.samples, lambda sample: sample.pods)
    # The router also changes variants, with each batch.
    figures.add(batch_changes=batches, variant_changes=variants, replica_changes=replicas)
    changes = batches + variants + replicas
    figures.require("changes of the plan", changes, "<=", MAX_CHANGES, depends_on_load=True)
    figures.require("least changes of the plan", changes, ">=", MIN_CHANGES, depends_on_load=True)
    figures.require("share within SLO", summary["slo_fraction"] or 0.0, ">=", MIN_SLO_FRACTION, depends_on_load=True)
    gap = abs((summary["measured_accuracy"] or 0.0) - (summary["expected_accuracy"] or 1.0))
    figures.require("|measured - expected| accuracy", gap, "<=", MAX_ACCURACY_GAP, depends_on_load=True)


async def test_pod_of_another_namespace_has_no_access(digits: ObservedPipeline, figures: Figures) -> None:
    access = await access_from_elsewhere(digits)
    figures.add(policies_enforced=int(access.are_policies_enforced))

    assert access.admitted == []
    if access.are_policies_enforced:
        assert access.reached == frozenset()


async def test_dashboards_show_data(digits: ObservedPipeline) -> None:
    address = await digits.installation.address("prometheus", 9090, SYSTEM)
    expressions = all_expressions(NAMESPACE, digits.name)

    empty = [e.title for e in expressions if not await asyncio.to_thread(evaluate, f"http://{address}", e.query)]

    assert empty == []


async def test_dashboard_command_shows_the_live_page(digits: ObservedPipeline) -> None:
    """The one command of a user outside of the cluster."""
    path = os.pathsep.join((str(TOOLS), os.environ.get("PATH", "")))
    page = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trimtab", "dashboard", digits.name, "--in-cluster", "--namespace", NAMESPACE),
        *("--page-port", "0"),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"KUBECONFIG": str(digits.installation.kubeconfig), "PATH": path, "PYTHONUNBUFFERED": "1"},
    )
    assert page.stdout is not None
    try:
        async with asyncio.timeout(30):
            while not (line := (await page.stdout.readline()).decode()).startswith("live page: "):
                assert line, "the command ended"

        async def charts() -> dict[str, Any]:
            async with digits.session.get(line.removeprefix("live page: ").strip()) as response:
                return charts_of(await response.text())

        await until(charts, "a chart", 30)
    finally:
        if page.returncode is None:
            page.terminate()
        await page.wait()


@asynccontextmanager
async def without_adapter(installation: Installation) -> AsyncIterator[None]:
    """Stop the adapter while the block runs."""
    scale = ("scale", "deployment/trimtab-adapter", "-n", SYSTEM)

    async def has_ended() -> bool:
        return not (await installation.cluster.list("Pod", SYSTEM, "app.kubernetes.io/component=adapter")).items

    await installation.kubectl(*scale, "--replicas=0")
    await until(has_ended, "the adapter's end", 60)
    try:
        yield
    finally:
        await installation.kubectl(*scale, "--replicas=1")
        await installation.rolled_out("trimtab-adapter", SYSTEM)


async def test_plans_written_by_hand_take_effect_soon(digits: ObservedPipeline, figures: Figures) -> None:
    stage = load_pipeline(DIGITS).spec.stages[-1]
    async with without_adapter(digits.installation):
        seconds = [
            await change_batch_size(digits, stage.name, stage.batch_sizes[1 + number % 2])
            for number in range(PLAN_CHANGES)
        ]
        current = (await digits.state()).stages[stage.name].variant
        others = [variant.name for variant in stage.variants if variant.name != current]
        shared = await change_variant(digits, stage.name, others[0])
        await separate_variants(digits)
        separate = await change_variant(digits, stage.name, others[1])

    p50, p99 = (float(np.quantile(seconds, quantile)) for quantile in (0.5, 0.99))
    figures.add(batch_in_force_seconds_p50=p50, shared_variant_seconds=shared, separate_variant_seconds=separate)
    figures.require(
        "plan written to batch size in force, p99 seconds", p99, "<=", IN_FORCE_SECONDS, depends_on_load=True
    )


async def change_batch_size(pipeline: ObservedPipeline, stage: str, size: int) -> float:
    """Change a stage's batch size; returns the seconds from the write until it is in force."""
    generation = await pipeline.write_plan(stage, batchSize=size)
    written = time.monotonic()

    async def is_in_force() -> bool:
        return (await pipeline.state()).plan_generation == generation

    await until(is_in_force, f"plan {generation}", PLAN_SECONDS, LOOK_SECONDS)
    seconds = time.monotonic() - written
    await asyncio.sleep(BETWEEN_SECONDS)
    return seconds


async def change_variant(pipeline: ObservedPipeline, stage: str, variant: str) -> float:
    """Change a stage's variant; returns the seconds until a ready replica serves it."""
    await pipeline.write_plan(stage, variant=variant)
    written = time.monotonic()

    async def serves() -> bool:
        state = (await pipeline.state()).stages[stage]
        return state.variant == variant and state.ready_replicas > 0

    await until(serves, f"{variant} of {stage}", PLAN_SECONDS, 0.02)
    return time.monotonic() - written


async def separate_variants(pipeline: ObservedPipeline) -> None:
    """Give every variant a Deployment of its own, after one replica a stage has made room for it."""
    stages = [stage["name"] for stage in (await pipeline.document())["spec"]["stages"]]
    for stage in stages:
        await pipeline.write_plan(stage, replicas=1)

    async def is_small() -> bool:
        return len(await pipeline.pods()) == len(stages)

    await until(is_small, "one replica a stage", PLAN_SECONDS)
    patch = [
        {"op": "add", "path": f"/spec/stages/{n}/variantPlacement", "value": "Dedicated"} for n in range(len(stages))
    ]
    arguments = ("patch", "ipl", pipeline.name, "-n", NAMESPACE, "--type=json", f"-p={json.dumps(patch)}")
    await pipeline.installation.kubectl(*arguments)

    async def is_applied() -> bool:
        generation = (await pipeline.document())["metadata"]["generation"]
        applied = await pipeline.condition("PlanApplied")
        return applied.get("status") == "True" and applied.get("observedGeneration") == generation

    await until(is_applied, "one variant a Deployment", PLAN_SECONDS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def no_digits(installation: Installation, digits: ObservedPipeline) -> None:
    """The digits pipeline is deleted, which makes room for others."""
    await installation.cluster.delete("InferencePipeline", NAMESPACE, digits.name)


@pytest.mark.usefixtures("no_digits")
@pytest.mark.parametrize("file", ["pipeline.yaml", "disaggregated.yaml"])
async def test_chats_are_answered_rightly(installation: Installation, file: str) -> None:
    """Complete and streamed, with a colocated encoder and with a disaggregated one."""
    document = pipeline_document(ROOT / "pipelines" / "lmm-digits" / file)
    for stage in document["spec"]["stages"]:
        stage |= {"variants": stage["variants"][:1], "batchSizes": [SLOTS]}
        stage["variants"][0]["resources"] |= {"cpu": "500m"}
    document["spec"] |= {"slo": GENEROUS, "budget": {"cores": "1"}}
    chats = [ChatSource().chat(number) for number in range(CHATS)]
    async with served(installation, document, SMALL_SECONDS) as pipeline:
        answers = [await ask(pipeline, chat) for chat in chats]

        async def all_counted() -> bool:
            counters = await pipeline.counters()
            return counters.received == counters.outcomes["ok"] == 2 * CHATS

        await until(all_counted, "the outcomes of all chats", 10)

    assert answers == [(chat.answer, chat.answer) for chat in chats]


async def ask(pipeline: ObservedPipeline, chat: Chat) -> tuple[str, str]:
    """The complete answer to a chat, and the streamed one."""
    messages, images = json.loads(chat.messages), iter(chat.images)
    for part in (part for message in messages for part in message["content"] if part["type"] == "image"):
        url = "data:image/png;base64," + base64.b64encode(next(images)).decode()
        part |= {"type": "image_url", "image_url": {"url": url}}
    body = {"model": pipeline.name, "messages": messages}
    headers = {"authorization": f"Bearer {pipeline.installation.credentials.keys[LOAD]}"}
    url = f"https://{pipeline.address}/v1/chat/completions"
    async with clients.connection(pipeline) as session:
        async with session.post(url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            complete = (await response.json())["choices"][0]["message"]["content"]
        async with session.post(url, json=body | {"stream": True}, headers=headers) as response:
            text = await response.text()
            assert response.status == 200, text
    *events, end = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert end == "[DONE]"
    return complete, "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)


@pytest.mark.usefixtures("no_digits")
async def test_jobs_with_missing_modalities_are_served(installation: Installation, figures: Figures) -> None:
    document = pipeline_document(ROOT / "pipelines" / "digits-av" / "pipeline.yaml")
    document["spec"]["stages"][0]["variants"][0]["resources"] |= {"cpu": "500m"}
    document["spec"] |= {"slo": {"latency": "30s"}, "budget": {"cores": "1"}}
    stage = InferencePipeline.model_validate(document).spec.stages[0]
    async with served(installation, document, SMALL_SECONDS) as pipeline:
        plan = PipelinePlanSpec.model_validate((await pipeline.plan())["spec"])
        async with RestClient(pipeline.address, pipeline.name, installation.credentials.access()) as client:
            results = await run_jobs(client, stage, [point.name for point in plan.stages[0].points])
    figures.add(points_served=", ".join(sorted(results.points)))

    assert results.faults == []
    figures.require("rows answered rightly, share", results.right / results.rows, ">=", MIN_RIGHT_SHARE)


@pytest.mark.usefixtures("no_digits")
async def test_registered_task_is_served_until_deleted(
    installation: Installation, tmp_path: Path, figures: Figures
) -> None:
    """Its file reaches the replicas through a ConfigMap; clients select it through Envoy."""
    document = pipeline_document(VIT_TASKS)
    stage = document["spec"]["stages"][0]
    stage |= {"variants": stage["variants"][:1], "batchSizes": [1]}
    stage["variants"][0]["operatingPoints"] = stage["variants"][0]["operatingPoints"][:1]
    document["spec"] |= {"slo": {"latency": "30s"}, "budget": {"cores": "1"}}
    admin_keys = installation.credentials.hashed(NAMESPACE)
    admin_keys["metadata"]["name"] = ADMIN_KEYS_SECRET
    await installation.apply(admin_keys)
    key = {"authorization": f"Bearer {installation.credentials.keys[LOAD]}"}
    image = {"name": "image", "datatype": "UINT8", "shape": [1, 1, 32, 32], "data": [0] * 32 * 32}
    body = {"inputs": [image], "parameters": {"trimtab.task": "late"}}
    task = await asyncio.to_thread(constant_task, tmp_path / "late.safetensors", document, LABEL)
    async with served(installation, document, SMALL_SECONDS) as pipeline, clients.connection(pipeline) as session:

        async def ask() -> tuple[int, dict[str, Any]]:
            async with session.post(f"{clients.metadata_url(pipeline)}/infer", json=body, headers=key) as response:
                return response.status, await response.json()

        async def answer() -> dict[str, Any] | None:
            status, content = await ask()
            assert status in {200, 503}, content
            return content if status == 200 else None

        async def put_without_key() -> int:
            async with session.put(url, data=task) as response:
                return response.status

        address = await installation.address(router_admin_name(pipeline.name), ROUTER_ADMIN_PORT)
        url = f"http://{address}{TASKS_PATH}/{stage['name']}/{stage['variants'][0]['name']}/late"
        unknown, _ = await ask()
        without_key = await until(put_without_key, "the admin Service", MOUNTED_SECONDS)
        async with session.put(url, data=task, headers=key) as response:
            registered = response.status, await response.json()
        began = time.monotonic()
        outputs = (await until(answer, "the registered task", MOUNTED_SECONDS))["outputs"]
        figures.add(registered_to_served_seconds=round(time.monotonic() - began, 1))
        async with session.delete(url, headers=key) as response:
            deleted = response.status, await response.json()
        gone, _ = await ask()

    assert (unknown, without_key, gone) == (400, 401, 400)
    assert registered[0] in {201, 202}, registered
    assert next(output["data"] for output in outputs if output["name"] == "label") == [LABEL]
    assert deleted[0] in {200, 202}, deleted
    assert deleted[1]["number"] == registered[1]["number"]


def constant_task(path: Path, document: dict[str, Any], label: int) -> bytes:
    """A task of a pipeline's first variant that classifies every image alike."""
    pipeline = InferencePipeline.model_validate(document)
    stage = pipeline.spec.stages[0]
    spec = model_spec(pipeline, VIT_TASKS.parent, stage, stage.variants[0], 1.0)
    network = build(spec.replace(tasks_folder=str(path.parent))).network
    assert isinstance(network, ServedTransformer)
    bias = torch.nn.functional.one_hot(torch.tensor(label), 2) * 9.0
    head = Head(torch.zeros(2, network.transformer.shape.width), bias)
    record = TaskRecord(classes=("no", "yes"), transformer=network.task_registry.fingerprint)
    save_task(path, record, {PLAIN: head})
    return path.read_bytes()


@pytest.fixture
def own_image_folder(tmp_path: Path) -> Path:
    """The files of docs/develop/bring-your-own-model.md as they stand."""
    for name, text in FILE.findall(DOCS.read_text()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "acme" / "acme" / "__init__.py").touch()
    return tmp_path


async def test_image_with_a_users_family_is_built(installation: Installation, own_image_folder: Path) -> None:
    if not installation.is_own_node:
        pytest.skip("the node's images are not on this machine")
    build = ("bud", "--isolation", "chroot", "--network", "host", *MOUNT, "-t", OWN_IMAGE, own_image_folder)
    await run("buildah", *build)
    container = (await run("buildah", "from", "--pull=never", OWN_IMAGE)).strip()
    command = ("--isolation", "chroot", container, "--", "python", "-c", COUNT_FAMILIES)
    try:
        assert int(await run("buildah", "run", *command)) >= 1
    finally:
        await run("buildah", "rm", container)
        await run("buildah", "rmi", OWN_IMAGE)
