"""Makes what a replica hosts of a model that chats."""

import torch

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.chat_model import ChatModel
from trimtab_model_servers.chat.config import ChatComponents
from trimtab_model_servers.chat.embedding_client import EmbeddingClient
from trimtab_model_servers.chat.encoder_model import EncoderModel
from trimtab_model_servers.device import idle_gpu
from trimtab_model_servers.families.registry import build_chat
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_protocol.http_client import Tls

DEVICE = "device"
"""What families that know a GPU tell of where they compute."""


def load_chat(spec: ModelSpec, worker: BatchWorker, tls: Tls = lambda: None) -> ChatModel | EncoderModel:
    """Build, load and try out a model on the calling thread, with the threads of its core allocation.

    ``tls`` is what it pulls embeddings from other replicas with.

    Raises:
        ModelError: naming what is wrong with its family, its weights or its stage's tensors; or it asks for a GPU and
            would leave it idle.
    """
    torch.set_num_threads(spec.threads)
    built: ChatComponents = build_chat(spec)
    if spec.gpus and (DEVICE not in built.facts or (built.facts[DEVICE] == "cpu" and torch.cuda.is_available())):
        raise idle_gpu(spec)
    hosted = _hosted(spec, built, worker, tls)
    hosted.warm_up()
    return hosted


def _hosted(spec: ModelSpec, built: ChatComponents, worker: BatchWorker, tls: Tls) -> ChatModel | EncoderModel:
    if built.writing is not None and built.network is not None:
        return ChatModel(spec, built, (built.writing, built.network), worker, EmbeddingClient(tls))
    if built.seeing is None:
        raise RuntimeError(f"family {spec.family!r} built neither what writes nor what encodes")
    return EncoderModel(spec, built, built.seeing, worker)
