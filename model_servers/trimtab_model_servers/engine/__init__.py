"""A small engine for large multimodal models: continuous batching, slots of keys and values, chunked prefill, streams.

What decides is pure (``values``, ``slots``, ``scheduler``, ``stops``): values in, values out, no torch and no clock.
What computes is thin (``store``, ``attention``, ``families``, ``sampling``, ``executor``), on transformers' public
attention interface. ``core`` joins the two, ``engine`` runs a core on a thread.
"""
