"""Small Qwen2-VL with random weights, made on the spot: as many tokens of an image as its pixels give."""

from pathlib import Path
from typing import Any

from tests.tiny_llama import write_tokenizer

VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
PART = (
    f"{{% if part['type'] == 'text' %}}{{{{ part['text'] }}}}{{% else %}}{VISION_START}{IMAGE}{VISION_END}{{% endif %}}"
)
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}"
    f"{{% else %}}{{% for part in message['content'] %}}{PART}{{% endfor %}}{{% endif %}}</s>{{% endfor %}}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def write_vision_model(folder: Path, max_pixels: int) -> None:
    """Write model, tokenizer and image processor."""
    import torch  # noqa: PLC0415 - only where the test runs
    import transformers  # noqa: PLC0415

    tokenizer = write_tokenizer(folder, TEMPLATE, (VISION_START, VISION_END, IMAGE, VIDEO))
    torch.manual_seed(0)
    text = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    text |= {"num_key_value_heads": 4, "vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 1}
    names = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    names |= {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    config = transformers.Qwen2VLConfig(
        text_config=text | {"rope_parameters": rope, "max_position_embeddings": 8192},
        vision_config={"depth": 4, "embed_dim": 256, "hidden_size": 256, "num_heads": 4, "mlp_ratio": 2},
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    )
    model: Any = transformers.Qwen2VLForConditionalGeneration(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=max_pixels),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
