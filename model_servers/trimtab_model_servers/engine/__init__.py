"""Inference engine for multimodal models: continuous batching, KV slots, prefix reuse, chunked prefill, streaming.

``request``, ``kv_slots``, ``scheduler`` and ``stop_strings`` decide; they import neither torch nor a clock.
``kv_cache``, ``attention``, ``model_adapters``, ``sampling`` and ``model_runner`` compute, on transformers' public
attention interface. ``core`` joins the two; ``async_engine`` runs a core on a thread.
"""
