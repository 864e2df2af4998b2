"""Makes what a replica hosts, whatever kind of model it is."""

from importlib import import_module

from trimtab_model_servers.families.registry import CHAT_FAMILIES
from trimtab_model_servers.hosting import Hosted
from trimtab_model_servers.model import load_model
from trimtab_model_servers.worker import BatchWorker
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_protocol.http import Tls


def load(spec: ModelSpec, worker: BatchWorker, tls: Tls = lambda: None) -> Hosted:
    """Build, load and warm up a model on the calling thread; ``worker`` will compute for it.

    ``tls`` is what connections to other replicas are secured with.

    Raises:
        ModelError: naming what is wrong with its family, its weights or its stage's tensors.
    """
    if spec.family not in CHAT_FAMILIES:
        return load_model(spec)
    hosted: Hosted = import_module("trimtab_model_servers.chat_loading").load_chat(
        spec, worker, tls
    )  # transformers, which others need not have
    return hosted
