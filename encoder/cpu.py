"""What this machine's cores multiply natively, by Linux's names for it."""

from functools import cache
from pathlib import Path
from typing import Literal

_CPUINFO = Path("/proc/cpuinfo")


@cache
def bfloat16_units(cpuinfo: Path = _CPUINFO) -> Literal["none", "vector", "matrix"]:
    """What every core multiplies bfloat16 with: AMX tiles ("matrix"), AVX-512 ("vector"); "none" where nobody tells."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "none"
    cores = [set(line.partition(":")[2].split()) for line in lines if line.partition(":")[0].strip() == "flags"]
    if not cores:
        return "none"
    if all("amx_bf16" in flags for flags in cores):
        return "matrix"
    return "vector" if all("avx512_bf16" in flags for flags in cores) else "none"
