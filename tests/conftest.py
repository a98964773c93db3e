"""Fixtures for every package's tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of golden vectors, computed by other people's code; see its README."""
    return Path(__file__).parent / "goldens"
