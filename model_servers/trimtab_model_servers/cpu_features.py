"""CPU features, as the Linux kernel reports them."""

from pathlib import Path

_PREFIXES = ("avx", "amx", "fma", "f16c", "bmi", "sse", "gfni", "vaes", "asimd", "sve", "sme", "i8mm", "bf16")
"""Prefixes of instruction sets that a compiler may use for this processor."""


def instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction set extensions by their Linux names; empty if the kernel does not report them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(name for name in flags.split() if name.startswith(_PREFIXES))
