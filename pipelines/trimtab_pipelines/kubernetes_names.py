"""What all parts agree on in a cluster: names, labels, ports and field managers. Each stands here and nowhere else."""

import hashlib

from trimtab_pipelines.resource import ADVISORY_SUFFIX, API_VERSION

GROUP, VERSION = API_VERSION.split("/")

OPERATOR_MANAGER = "trimtab-operator"
ADAPTER_MANAGER = "trimtab-adapter"
PROFILER_MANAGER = "trimtab-profiler"

MANAGED_BY = "app.kubernetes.io/managed-by"
COMPONENT = "app.kubernetes.io/component"
PIPELINE_LABEL = f"{GROUP}/pipeline"
STAGE_LABEL = f"{GROUP}/stage"
REPLICA_GROUP_LABEL = f"{GROUP}/replica-group"
VARIANT_LABEL_PREFIX = f"variant.{GROUP}/"
"""One label a variant, value "true", on the Service of a hosting set; the cluster copies it to its EndpointSlices."""
PROFILE_ANNOTATION = f"{GROUP}/profile"
"""On an InferencePipeline: any new value asks for new profiles."""
ADVISORY_LABEL = f"{GROUP}/advisory"
"""On a PipelinePlan that nothing acts on."""

CREDENTIALS_PREFIX = "TRIMTAB_SECRET_"
"""Before every key of a Secret in the environment of our own servers, which take from it what they know and no more."""

ROUTER_REST_PORT = 8080
ROUTER_GRPC_PORT = 8081
ROUTER_ADMIN_PORT = 8082
"""Metrics, load, state and readiness: out of callers' reach."""
ADMIN_PORT_NAME = "admin"
DATA_PORT = 9000
HEALTH_PORT = 9001
"""Of a model server that asks for certificates at its data port: plain HTTP, whether it is alive and ready, no more."""
METRICS_PORT = 9002
"""Of a model server of a stage that writes or encodes: plain HTTP, what its chats hold and have done, no more."""
METRICS_PORT_NAME = "metrics"
TLS_SIDECAR_PORT = 9443
"""Of who asks for certificates in the place of a server not of ours; the next one where that server has it."""
MLSERVER_HTTP_PORT = 8080
MLSERVER_GRPC_PORT = 8081

_MAX_NAME = 52  # a Deployment's pods add 11 characters and must stay a DNS label


def router_name(pipeline: str) -> str:
    """Name of a router's Deployment, Service, ConfigMap, ServiceAccount and RoleBinding."""
    return _fitting(f"{pipeline}-router", f"{pipeline}-router")


def router_admin_name(pipeline: str) -> str:
    """Name of the Service of the routers' administrative ports, apart from the one that callers use."""
    return _fitting(f"{pipeline}-router-admin", f"{pipeline}-router-admin")


def replica_group_name(pipeline: str, stage: str, hosting_group: str) -> str:
    """Name of the Deployment and the Service of one hosting group; no two triples share one."""
    return _fitting(f"{pipeline}-{stage}-{hosting_group}", f"{pipeline}/{stage}/{hosting_group}", always=True)


def profile_name(pipeline: str, stage: str, accelerator: str | None = None) -> str:
    """Name of the ModelProfile of a stage on one kind of hardware."""
    written = f"{pipeline}-{stage}-{accelerator or 'cpu'}".lower().replace("_", "-").replace(" ", "-")
    return _fitting(written, f"{pipeline}/{stage}/{accelerator}", always=True)


def profiler_name(pipeline: str) -> str:
    """Name of the ServiceAccount and the RoleBinding of a pipeline's profile Jobs."""
    return _fitting(f"{pipeline}-profiler", f"{pipeline}-profiler")


def profile_job_name(pipeline: str, task: str, run: str) -> str:
    """Name of the Job of one profile task; another for every run of it."""
    return _fitting(f"{pipeline}-profile-{task}", f"{pipeline}/{task}/{run}", always=True)


def advisory_name(pipeline: str) -> str:
    """Name of the PipelinePlan the adapter writes in Advisory mode; no pipeline, and so no other plan, may have it."""
    return _fitting(pipeline, pipeline, longest=_MAX_NAME - len(ADVISORY_SUFFIX)) + ADVISORY_SUFFIX


def _fitting(written: str, identity: str, *, always: bool = False, longest: int = _MAX_NAME) -> str:
    """Shorten what is too long; a few digits of a hash keep apart what would else read the same."""
    if len(written) <= longest and not always:
        return written
    digits = hashlib.sha256(identity.encode()).hexdigest()[:5]
    return f"{written[: longest - 6].rstrip('-')}-{digits}"
