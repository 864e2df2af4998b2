"""Names shared by all components in a cluster: labels, annotations, ports and field managers."""

import hashlib

from trimtab_pipelines.resource import ADVISORY_SUFFIX, API_VERSION

GROUP, VERSION = API_VERSION.split("/")

OPERATOR_MANAGER = "trimtab-operator"
ADAPTER_MANAGER = "trimtab-adapter"
PROFILER_MANAGER = "trimtab-profiler"
ROUTER_MANAGER = "trimtab-router"

MANAGED_BY = "app.kubernetes.io/managed-by"
COMPONENT = "app.kubernetes.io/component"
PIPELINE_LABEL = f"{GROUP}/pipeline"
STAGE_LABEL = f"{GROUP}/stage"
FLAVOR_LABEL = f"{GROUP}/flavor"
FLAVORS_VARIABLE = "TRIMTAB_FLAVORS"
"""Environment variable of operator and adapter: the cluster's resource flavors as JSON."""
REPLICA_GROUP_LABEL = f"{GROUP}/replica-group"
VARIANT_LABEL_PREFIX = f"variant.{GROUP}/"
"""Prefix of one label per variant, with the value "true", on the Service of a replica group; Kubernetes copies it to
its EndpointSlices.
"""
PROFILE_ANNOTATION = f"{GROUP}/profile"
"""On an InferencePipeline: a new value requests new profiles."""
ADVISORY_LABEL = f"{GROUP}/advisory"
"""On a PipelinePlan of mode Advisory, which is not applied."""

CREDENTIALS_PREFIX = "TRIMTAB_SECRET_"
"""Prefix of every key of a Secret in a model server's environment."""

ADMIN_KEYS_SECRET = "trimtab-admin-keys"  # noqa: S105 - a name
"""Secret of the keys that may register tasks, one entry per client, in a pipeline's namespace."""

ROUTER_REST_PORT = 8080
ROUTER_GRPC_PORT = 8081
ROUTER_ADMIN_PORT = 8082
"""Metrics, arrivals, state and readiness; not reachable by clients."""
ADMIN_PORT_NAME = "admin"
DATA_PORT = 9000
HEALTH_PORT = 9001
"""Plain HTTP health endpoint of a model server whose data port requires client certificates."""
METRICS_PORT = 9002
"""Plain HTTP metrics of a model server of a generation or encoder stage."""
METRICS_PORT_NAME = "metrics"
TLS_SIDECAR_PORT = 9443
"""Port of the TLS sidecar of a user-provided container; the next port if that container uses this one."""
MLSERVER_HTTP_PORT = 8080
MLSERVER_GRPC_PORT = 8081

_MAX_NAME = 52  # a Deployment's pods add 11 characters and must stay a DNS label


def router_name(pipeline: str) -> str:
    """Name of a router's Deployment, Service, ConfigMap, ServiceAccount and RoleBinding."""
    return _fitting(f"{pipeline}-router", f"{pipeline}-router")


def router_admin_name(pipeline: str) -> str:
    return _fitting(f"{pipeline}-router-admin", f"{pipeline}-router-admin")


def replica_group_name(pipeline: str, stage: str, group: str) -> str:
    """Name of the Deployment and the Service of a replica group; unique for each triple."""
    return _fitting(f"{pipeline}-{stage}-{group}", f"{pipeline}/{stage}/{group}", always=True)


def tasks_name(pipeline: str, stage: str, variant: str) -> str:
    """Name of the ConfigMap with the tasks of a variant that are registered at run time."""
    return _fitting(f"{pipeline}-{stage}-{variant}-tasks", f"{pipeline}/{stage}/{variant}/tasks", always=True)


def profile_name(pipeline: str, stage: str, accelerator: str | None = None) -> str:
    written = f"{pipeline}-{stage}-{accelerator or 'cpu'}".lower().replace("_", "-").replace(" ", "-")
    return _fitting(written, f"{pipeline}/{stage}/{accelerator}", always=True)


def profiler_name(pipeline: str) -> str:
    """Name of the ServiceAccount and the RoleBinding of a pipeline's profile Jobs."""
    return _fitting(f"{pipeline}-profiler", f"{pipeline}-profiler")


def profile_job_name(pipeline: str, task: str, run: str) -> str:
    """Name of the Job of one profile task; each run has its own."""
    return _fitting(f"{pipeline}-profile-{task}", f"{pipeline}/{task}/{run}", always=True)


def advisory_name(pipeline: str) -> str:
    """Name of the PipelinePlan that the adapter writes in mode Advisory; reserved by InferencePipeline validation."""
    return _fitting(pipeline, pipeline, longest=_MAX_NAME - len(ADVISORY_SUFFIX)) + ADVISORY_SUFFIX


def _fitting(written: str, identity: str, *, always: bool = False, longest: int = _MAX_NAME) -> str:
    """Shorten a name to a maximum length; a hash keeps shortened names distinct."""
    if len(written) <= longest and not always:
        return written
    digits = hashlib.sha256(identity.encode()).hexdigest()[:5]
    return f"{written[: longest - 6].rstrip('-')}-{digits}"
