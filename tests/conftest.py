"""Fixtures for every package's tests."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Many small processes on few cores: threads of each would only wait for the others'. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("patchgrid", deadline=None)  # no test is about how fast a machine is
settings.load_profile("patchgrid")


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of golden vectors, computed by other people's code; see its README."""
    return Path(__file__).parent / "goldens"
