"""Models that write answers to chats, with images or without, as a replica serves them (decision 41).

``words`` reads what is asked; ``kit`` says what a model brings; ``images`` opens files; ``encoding`` has images encoded
once each, and keeps them; ``kept`` holds what is to be pulled, ``pulling`` pulls it; ``hosted`` serves a model that
writes, ``encoder`` one that encodes only; ``told`` puts answers into tensors and events.
"""
