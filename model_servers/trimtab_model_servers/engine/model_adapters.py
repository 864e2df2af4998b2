"""Model adapters: the two ways in which transformers' models take images, over their classes' public members.

``ModelAdapter``: image tokens are part of the prompt (LLaVA, LLaVA-OneVision, InternVL, SmolVLM, text models).
``CrossAttentionAdapter``: some layers attend to image tokens outside the prompt (Mllama).
"""

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from trimtab_model_servers.engine.attention import ATTENTION_NAME, StepContext
from trimtab_model_servers.engine.kv_cache import HeadLayout
from trimtab_model_servers.engine.request import RequestError

DECODER_NAMES: Final = ("language_model", "text_model")
"""Names of the decoder within transformers' multimodal models."""


class ModelAdapter:
    """A model as the engine runs it; its image tokens are part of the prompt."""

    cross_attention: bool = False

    def __init__(self, model: Any) -> None:
        decoder = _decoder(model)
        config = decoder.config
        _require_supported(config)
        decoder.set_attn_implementation(ATTENTION_NAME)
        self._decoder = decoder
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self.width = int(config.hidden_size)
        self.vocabulary_size: int = int(self._head.weight.shape[0])
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = int(config.num_key_value_heads or config.num_attention_heads)
        self.heads: HeadLayout = HeadLayout(kv_heads, int(size), int(config.num_attention_heads) // kv_heads)
        self.cross_attention_layers: tuple[int, ...] = tuple(getattr(config, "cross_attention_layers", ()))
        self.self_attention_layers: tuple[int, ...] = tuple(
            layer for layer in range(config.num_hidden_layers) if layer not in self.cross_attention_layers
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Map ids [tokens] to [tokens, width]."""
        embedded: Tensor = self._embedding(tokens.to(self._embedding.weight.device))
        return embedded

    def validate_embeddings(self, image: Tensor, tokens: int) -> Tensor:
        """An image's embeddings as [tokens, width] like the model; RequestError for another shape, or NaN."""
        if image.shape[-1:] != (self.width,) or image.numel() != tokens * self.width:
            raise RequestError(f"an image's embeddings are {list(image.shape)}; should be [{tokens}, {self.width}]")
        embeddings = image.reshape(tokens, self.width).to(self._embedding.weight)
        if not bool(embeddings.isfinite().all()):
            raise RequestError("an image's embeddings hold numbers that are not finite")
        return embeddings

    def cross_attention_kv(self, image: Tensor) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Keys and values of image tokens [tokens, width] by cross-attention layer, [tokens, heads, size] each."""
        del image
        return {}

    def forward(self, embedded: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Run one packed row [tokens, width] at ``positions`` [tokens]; returns [tokens, width]."""
        return self._run(embedded, positions, step_context=context)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [n, width] to [n, vocabulary]."""
        logits: Tensor = self._head(hidden)
        return logits

    def _run(self, embedded: Tensor, positions: Tensor, **options: Any) -> Tensor:
        output = self._decoder(inputs_embeds=embedded[None], position_ids=positions[None], use_cache=False, **options)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


class CrossAttentionAdapter(ModelAdapter):
    """Mllama. A step without images skips the cross-attention layers exactly."""

    cross_attention: bool = True

    def cross_attention_kv(self, image: Tensor) -> Mapping[int, tuple[Tensor, Tensor]]:
        layers = {}
        for layer in self.cross_attention_layers:
            attention = self._decoder.layers[layer].cross_attn
            shape = (len(image), self.heads.kv_heads, self.heads.head_size)
            layers[layer] = (attention.k_norm(attention.k_proj(image).view(shape)), attention.v_proj(image).view(shape))
        return layers

    def forward(self, embedded: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Run one packed row. A single zero image token enables the layers; the KV cache holds the real ones."""
        if context.cross_attention is None:
            return self._run(embedded, positions, step_context=context)
        after_image = context.after_image
        return self._run(
            embedded,
            positions,
            step_context=context,
            cross_attention_states=embedded.new_zeros(1, 1, self.width),
            full_text_row_masked_out_mask=None if after_image is None else after_image[None, None],
        )


def adapt_model(model: Any) -> ModelAdapter:
    """Set slot attention in a transformers model, in place; ValueError names an unsupported kind of attention."""
    return (
        CrossAttentionAdapter(model)
        if getattr(_decoder(model).config, "cross_attention_layers", None)
        else ModelAdapter(model)
    )


def _decoder(model: Any) -> Any:
    """The part of a model that maps embeddings to hidden states."""
    inner = model.model
    return next((getattr(inner, name) for name in DECODER_NAMES if hasattr(inner, name)), inner)


def _require_supported(config: Any) -> None:
    layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    rope = getattr(config, "rope_parameters", None) or {}
    if layer_types:
        raise ValueError(
            f"{config.model_type}: layers of type {', '.join(sorted(layer_types))} are not supported; only full "
            "attention"
        )
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ValueError(f"{config.model_type}: sliding-window attention is not supported; only full attention")
    if "mrope_section" in rope:
        raise ValueError(f"{config.model_type}: three-dimensional positions (M-RoPE) are not supported")
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError(f"{config.model_type}: bidirectional attention of images is not supported")
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "attention_sinks", None):
        raise ValueError(f"{config.model_type}: attention with soft caps or sinks is not supported")
