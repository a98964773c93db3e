"""What the cores are said to multiply natively."""

from pathlib import Path

import pytest

from encoder.cpu import bfloat16_units


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["fpu avx512_bf16 amx_bf16"] * 2, "matrix"),
        (["fpu avx512_bf16"] * 2, "vector"),
        (["fpu avx512_bf16 amx_bf16", "fpu avx512_bf16"], "vector"),
        (["fpu avx512_bf16", "fpu avx2"], "none"),
        (["fpu avx512_bf16x"], "none"),
        ([], "none"),
    ],
)
def test_units_are_those_that_every_core_has(flags: list[str], expected: str, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("".join(f"processor: {i}\nvmx flags: amx_bf16\nflags\t\t: {f}\n\n" for i, f in enumerate(flags)))
    assert bfloat16_units(cpuinfo) == expected


def test_a_kernel_that_does_not_tell_has_none(tmp_path: Path) -> None:
    assert bfloat16_units(tmp_path / "missing") == "none"
