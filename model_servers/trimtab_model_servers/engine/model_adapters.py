"""The two ways a model takes images in, over transformers' own classes and their public parts only.

``DecoderOnlyAdapter``: an image's tokens stand in the prompt (LLaVA, LLaVA-OneVision, InternVL,
SmolVLM, and text models).
``CrossAttentionAdapter``: some layers attend to an image's tokens apart from the prompt (Mllama).
"""

from collections.abc import Mapping
from typing import Any, Final, Protocol

from torch import Tensor

from trimtab_model_servers.engine.attention import NAME, StepContext
from trimtab_model_servers.engine.kv_cache import HeadLayout
from trimtab_model_servers.engine.request import RequestError

DECODERS: Final = ("language_model", "text_model")
"""What transformers' models call the part that writes, where they have others beside it."""


class ModelAdapter(Protocol):
    """What the engine asks of a model."""

    across: bool
    heads: HeadLayout
    own_layers: tuple[int, ...]
    across_layers: tuple[int, ...]
    vocabulary: int
    width: int

    def embed(self, tokens: Tensor) -> Tensor:
        """Map ids [tokens] to [tokens, width]."""
        ...

    def require(self, image: Tensor, tokens: int) -> Tensor:
        """Check an image's embeddings; return them as [tokens, width] of the model's own kind.

        Raises:
            RequestError: they are of another shape, or not finite.
        """
        ...

    def keys_and_values(self, image: Tensor) -> Mapping[int, tuple[Tensor, Tensor]]:
        """What the layers that attend across keep of image tokens [tokens, width]: [tokens, heads, size] each."""
        ...

    def forward(self, embedded: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Run one packed row [tokens, width] at ``positions`` [tokens]; returns [tokens, width]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [n, width] to [n, vocabulary]."""
        ...


class DecoderOnlyAdapter:
    """A model whose decoder attends to one row of tokens, images among them."""

    across: bool = False

    def __init__(self, model: Any) -> None:
        decoder = _decoder(model)
        config = decoder.config
        _refuse_what_is_not_handled(config)
        decoder.set_attn_implementation(NAME)
        self._decoder = decoder
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self.width = int(config.hidden_size)
        self.vocabulary: int = int(self._head.weight.shape[0])
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        keys = int(config.num_key_value_heads or config.num_attention_heads)
        self.heads: HeadLayout = HeadLayout(keys, int(size), int(config.num_attention_heads) // keys)
        self.across_layers: tuple[int, ...] = tuple(getattr(config, "cross_attention_layers", ()))
        self.own_layers: tuple[int, ...] = tuple(
            layer for layer in range(config.num_hidden_layers) if layer not in self.across_layers
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Map ids [tokens] to [tokens, width]."""
        embedded: Tensor = self._embedding(tokens.to(self._embedding.weight.device))
        return embedded

    def require(self, image: Tensor, tokens: int) -> Tensor:
        """Check an image's embeddings, [..., width]; return them as [tokens, width]."""
        if image.shape[-1:] != (self.width,) or image.numel() != tokens * self.width:
            raise RequestError(f"an image's embeddings are {list(image.shape)}; should be [{tokens}, {self.width}]")
        own = image.reshape(tokens, self.width).to(self._embedding.weight)
        if not bool(own.isfinite().all()):
            raise RequestError("an image's embeddings hold numbers that are not finite")
        return own

    def keys_and_values(self, image: Tensor) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Nothing: images stand in the prompt."""
        del image
        return {}

    def forward(self, embedded: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Run one packed row."""
        return self._run(embedded, positions, step_context=context)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [n, width] to [n, vocabulary]."""
        logits: Tensor = self._head(hidden)
        return logits

    def _run(self, embedded: Tensor, positions: Tensor, **told: Any) -> Tensor:
        made = self._decoder(inputs_embeds=embedded[None], position_ids=positions[None], use_cache=False, **told)
        hidden: Tensor = made.last_hidden_state[0]
        return hidden


class CrossAttentionAdapter(DecoderOnlyAdapter):
    """Mllama: text that sees no image skips the layers that attend across, exactly."""

    across: bool = True

    def keys_and_values(self, image: Tensor) -> Mapping[int, tuple[Tensor, Tensor]]:
        """What each layer that attends across keeps of [tokens, width]."""
        kept = {}
        for layer in self.across_layers:
            attention = self._decoder.layers[layer].cross_attn
            shape = (len(image), self.heads.keys, self.heads.size)
            kept[layer] = (attention.k_norm(attention.k_proj(image).view(shape)), attention.v_proj(image).view(shape))
        return kept

    def forward(self, embedded: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Run one packed row; a single made-up image token opens the layers, whose true ones lie in the store."""
        if context.across is None:
            return self._run(embedded, positions, step_context=context)
        behind = context.sees_images
        return self._run(
            embedded,
            positions,
            step_context=context,
            cross_attention_states=embedded.new_zeros(1, 1, self.width),
            full_text_row_masked_out_mask=None if behind is None else behind[None, None],
        )


def family_of(model: Any) -> ModelAdapter:
    """The family of a model of transformers; its attention is over slots from then on.

    Raises:
        ValueError: a model that the engine would run wrongly; the message says which kind.
    """
    return (
        CrossAttentionAdapter(model)
        if getattr(_decoder(model).config, "cross_attention_layers", None)
        else DecoderOnlyAdapter(model)
    )


def _decoder(model: Any) -> Any:
    """The part of a model that maps embeddings to hidden states."""
    inner = model.model
    return next((getattr(inner, name) for name in DECODERS if hasattr(inner, name)), inner)


def _refuse_what_is_not_handled(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    rope = getattr(config, "rope_parameters", None) or {}
    if kinds:
        raise ValueError(
            f"{config.model_type}: layers of {', '.join(sorted(kinds))} are not handled; only full attention"
        )
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ValueError(f"{config.model_type}: attention in a sliding window is not handled; only full attention")
    if "mrope_section" in rope:
        raise ValueError(f"{config.model_type}: positions in three dimensions (M-RoPE) are not handled")
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError(f"{config.model_type}: images that attend in both directions are not handled")
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "attention_sinks", None):
        raise ValueError(f"{config.model_type}: attention with soft caps or sinks is not handled")
