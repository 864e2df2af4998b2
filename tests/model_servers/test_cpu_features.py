"""CPU features as the kernel reports them."""

import pytest

from trimtab_model_servers.transformer.compiled import instructions


@pytest.mark.parametrize(
    ("reported", "found"),
    [
        ("processor\t: 0\nflags\t\t: fpu hypervisor avx2 avx512_bf16\n", {"avx2", "avx512_bf16"}),
        ("processor\t: 0\nFeatures\t: fp cpuid asimd i8mm bf16\n", {"asimd", "i8mm", "bf16"}),
        ("processor\t: 0\n", set()),
    ],
)
def test_instructions_are_filtered_by_prefix(tmp_path, reported, found):
    (tmp_path / "cpuinfo").write_text(reported)
    assert instructions(tmp_path / "cpuinfo") == found


def test_missing_cpuinfo_gives_no_instructions(tmp_path):
    assert instructions(tmp_path / "absent") == frozenset()
