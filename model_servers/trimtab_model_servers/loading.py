"""Makes what a replica hosts, whatever kind of model it is."""

from importlib import import_module

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.families.registry import CHAT_FAMILIES
from trimtab_model_servers.interfaces import ServedModel
from trimtab_model_servers.model import load_model
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_protocol.http_client import Tls


def load(spec: ModelSpec, worker: BatchWorker, tls: Tls = lambda: None) -> ServedModel:
    """Build, load and warm up a model on the calling thread; ``worker`` will compute for it.

    ``tls`` is what connections to other replicas are secured with.

    Raises:
        ModelError: naming what is wrong with its family, its weights or its stage's tensors.
    """
    if spec.family not in CHAT_FAMILIES:
        return load_model(spec)
    hosted: ServedModel = import_module("trimtab_model_servers.chat_loader").load_chat(
        spec, worker, tls
    )  # transformers, which others need not have
    return hosted
