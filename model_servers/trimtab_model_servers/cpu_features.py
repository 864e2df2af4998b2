"""What the processor here can do, as the kernel tells it."""

from pathlib import Path

_ARITHMETIC = ("avx", "amx", "fma", "f16c", "bmi", "sse", "gfni", "vaes", "asimd", "sve", "sme", "i8mm", "bf16")
"""How the names of instructions begin that a compiler may use in code for this very processor."""


def instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Its instructions beyond the basic ones, by Linux' names; nothing where the kernel does not tell."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    told = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(name for name in told.split() if name.startswith(_ARITHMETIC))
