"""Loads chat models: a generation model or an image encoder."""

import torch

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.chat_model import ChatModel
from trimtab_model_servers.chat.embedding_client import EmbeddingClient
from trimtab_model_servers.chat.encoder_model import EncoderModel
from trimtab_model_servers.chat.interfaces import ChatComponents
from trimtab_model_servers.families.registry import build_chat
from trimtab_model_servers.server.hosted_model import missing_gpu, unsupported_gpu
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_protocol.http_client import Tls

DEVICE = "device"
"""Metadata of families that can compute on a GPU."""


def load_chat(spec: ModelSpec, worker: BatchWorker, tls: Tls = lambda: None) -> ChatModel | EncoderModel:
    """Build, load and warm up a model; ``tls`` secures connections to other replicas; raises ModelError. Blocks."""
    torch.set_num_threads(spec.threads)
    components: ChatComponents = build_chat(spec)
    device = components.facts.get(DEVICE)
    if spec.gpus and device in {None, "cpu"}:
        raise unsupported_gpu(spec) if device is None or torch.cuda.is_available() else missing_gpu()
    model = _create(spec, components, worker, tls)
    model.warm_up()
    return model


def _create(spec: ModelSpec, components: ChatComponents, worker: BatchWorker, tls: Tls) -> ChatModel | EncoderModel:
    if components.tokenizer is not None and components.adapter is not None:
        generator = (components.tokenizer, components.adapter)
        return ChatModel(spec, components, generator, worker, EmbeddingClient(tls))
    if components.encoder is None:
        raise RuntimeError(f"family {spec.family!r} built neither a generator nor an encoder")
    return EncoderModel(spec, components, components.encoder, worker)
