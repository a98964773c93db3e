import subprocess
import sys
from pathlib import Path

import pytest

import service

_FREE = [
    *(f"service.{file.stem}" for file in Path(service.__file__).parent.glob("*.py") if file.stem != "__init__"),
    *(f"distributed.{name}" for name in ("link", "messages", "launcher")),
    *(f"encoder.{name}" for name in ("config", "geometry", "image", "layout", "checkpoint")),
]


@pytest.mark.parametrize("module", sorted(_FREE))
def test_the_front_end_imports_no_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", program], check=False).returncode == 0
