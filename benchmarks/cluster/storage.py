"""A pipeline whose weights lie in a real MinIO in the cluster, and what happens when that goes away."""

import asyncio
import hashlib
from pathlib import Path

from minio import Minio

from benchmarks.cluster.observing import Watched, is_ready, until
from benchmarks.cluster.setting import ROOT, Setting, pipeline_document
from trimtab_kubernetes.objects import Object

WEIGHTS = ROOT / "pipelines" / "digits" / "weights"
NAME, BUCKET, SECRET = "stored", "models", "minio"
AWAY_SECONDS = 10.0
READY_SECONDS = 600.0
PATIENCE_SECONDS = 180.0
ACCESS_KEY, SECRET_KEY = "trimtab", "trimtab-benchmark"  # of manifests/minio.yaml, which lives as long as the run


async def stored_pipeline(setting: Setting, pipeline_file: Path) -> None:
    """Bring up MinIO, put the lightest variants' weights there, and serve them from it."""
    await setting.apply_file("minio.yaml", setting.namespace)
    await setting.rolled_out("minio", setting.namespace)
    document = pipeline_document(pipeline_file, setting.namespace)
    document["metadata"]["name"] = NAME
    document["spec"]["budget"] = {"cores": "200m"}
    files = [pipeline_file.parent / stage["variants"][0]["storageUri"] for stage in document["spec"]["stages"]]
    await _put(setting, files)
    for stage in document["spec"]["stages"]:
        variant = stage["variants"][0]
        weights = pipeline_file.parent / variant["storageUri"]
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()
        stage["variants"] = [
            variant
            | {"storageUri": f"s3://{BUCKET}/{weights.name}", "digest": f"sha256:{digest}", "secretName": SECRET}
            | {"resources": {"cpu": "100m", "memory": "256Mi"}}
        ]
    await setting.apply(document)
    async with asyncio.timeout(READY_SECONDS):
        await setting.kubectl("wait", f"ipl/{NAME}", "-n", setting.namespace, "--for=condition=Ready", "--timeout=600s")


async def _put(setting: Setting, files: list[Path]) -> None:
    """Make the bucket and put files there."""
    client = Minio(await setting.address(setting.namespace, "minio", 9000), ACCESS_KEY, SECRET_KEY, secure=False)
    await asyncio.to_thread(client.make_bucket, BUCKET)
    for file in files:
        await asyncio.to_thread(client.fput_object, BUCKET, file.name, str(file))


async def drop_minio(watched: Watched) -> None:
    """Take MinIO away and a pod that needs it too; both come back, the pod once MinIO has."""
    setting = watched.setting
    stored = Watched(setting, NAME, watched.client)
    await setting.kubectl("scale", "deployment/minio", "-n", setting.namespace, "--replicas=0")
    victim = (await stored.pods())[0]
    await setting.kubectl("delete", "pod", victim["metadata"]["name"], "-n", setting.namespace, "--wait=false")
    await asyncio.sleep(AWAY_SECONDS)
    await setting.kubectl("scale", "deployment/minio", "-n", setting.namespace, "--replicas=1")
    await setting.rolled_out("minio", setting.namespace)
    stages = ((await stored.object()) or {})["spec"]["stages"]
    names = [stage["variants"][0]["storageUri"].rpartition("/")[2] for stage in stages]
    await _put(setting, [WEIGHTS / name for name in names])  # its disk went with its pod

    async def back() -> bool:
        pods: list[Object] = await stored.pods()
        return bool(pods) and all(is_ready(pod) for pod in pods)

    await until(back, "the pipeline that reads from MinIO", PATIENCE_SECONDS)
