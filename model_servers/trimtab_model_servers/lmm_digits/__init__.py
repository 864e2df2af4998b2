"""Two small multimodal models trained for real: they answer questions about pages of handwritten digits.

One is decoder-only (LLaVA's way: a page's tokens join the prompt), one attends across (Mllama's way: a page's tokens
are attended apart). ``pages`` draws what they are asked about, ``questions`` asks and knows the answer, ``tokens``
spells it, ``tower`` and ``models`` are the networks, ``fit`` and ``train`` make their weights anew.
"""
