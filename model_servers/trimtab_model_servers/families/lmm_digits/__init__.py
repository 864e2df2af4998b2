"""Multimodal models of the lmm-digits pipeline: they answer questions about pages of handwritten digits.

`decoder-only` inserts the tokens of a page into the prompt (LLaVA); `cross-attention` attends to them separately
(Mllama).
"""

from typing import Final

CELLS_A_SIDE: Final = 2
CELLS: Final = CELLS_A_SIDE * CELLS_A_SIDE
"""Cells of a page; each holds at most one digit."""
