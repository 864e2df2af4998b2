"""Pretrained chat models: decoders of text, LLaVA-OneVision, InternVL, SmolVLM and Llama 3.2 Vision."""
