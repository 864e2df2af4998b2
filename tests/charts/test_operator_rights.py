"""Operator on a real API server with exactly the rights that the chart grants."""

import asyncio
from itertools import product
from pathlib import Path

from tests.builders import a_variant
from tests.charts.helm import RELEASE_NAMESPACE
from tests.charts.test_rbac import READ, VERBS, may
from tests.charts.test_rbac import account as account_name
from tests.control_plane import TOKEN
from tests.operator_.conftest import SETTINGS, Site
from tests.operator_.test_registered_tasks import tasked_document
from trimtab_kubernetes import Cluster
from trimtab_kubernetes.lease import Lease, leader_election
from trimtab_operator.controller import Controller
from trimtab_operator.metrics import Metrics
from trimtab_pipelines.kubernetes_names import OPERATOR_MANAGER, router_name, tasks_name


async def account(server: Cluster, name: str, installed: Path, folder: Path) -> str:
    """A kubeconfig with a token of a service account of the release."""
    path = f"/api/v1/namespaces/{RELEASE_NAMESPACE}/serviceaccounts/{name}/token"
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    answer = await server.call("POST", path, None, body)
    kubeconfig = folder / name
    kubeconfig.write_text(installed.read_text().replace(TOKEN, answer["status"]["token"]))  # noqa: ASYNC240
    return str(kubeconfig)


async def test_operator_role_suffices_for_its_work(server: Cluster, installed: Path, tmp_path: Path):
    """It may grant a router rights of its own: to the ConfigMaps of the pipeline's tasks, and to no others."""
    variants = [a_variant("small"), a_variant("large", accuracy=0.95)]
    site = Site(server, "team-a", tasked_document(variants=variants, variantPlacement="Dedicated"))
    async with await Cluster.connect(await account(server, "trimtab-operator", installed, tmp_path)) as itself:
        site.controller = Controller(itself, SETTINGS, Metrics(), site.now)
        await site.apply_pipeline()
        await site.settle()
        assert await site.names("Job")

        await site.apply_profiles()
        await site.apply_plan(1)
        await site.settle()
        assert (await site.conditions())["Ready"] == ("True", "Ready")
        assert {reason for reason, _ in await site.events()} >= {"Profiling", "PlanApplied"}

        user = account_name(router_name(site.name), "team-a")
        names = {variant: tasks_name(site.name, "first", variant) for variant in ("small", "large")}
        for name, verb in product((*names.values(), router_name(site.name)), VERBS):
            allowed = name in names.values() and verb in READ | {"patch"}
            assert await may(server, user, verb, "/configmaps", "team-a", name) == allowed, (name, verb)

        del site.document["spec"]["stages"][0]["variants"][0]
        await site.apply_profiled()
        await site.apply_plan(2)
        await site.settle()
        assert await site.replicas() == {"large": 1}
        assert await site.names("ConfigMap") & {*names.values()} == {names["large"]}

        began = asyncio.Event()

        async def work() -> None:
            began.set()
            await asyncio.Event().wait()

        async with (
            leader_election(Lease(itself, RELEASE_NAMESPACE, OPERATOR_MANAGER, "itself"), work),
            asyncio.timeout(60),
        ):
            await began.wait()
