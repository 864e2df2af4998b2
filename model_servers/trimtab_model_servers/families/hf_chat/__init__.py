"""Pretrained multimodal models: LLaVA-OneVision, InternVL, SmolVLM and Llama 3.2 Vision."""
