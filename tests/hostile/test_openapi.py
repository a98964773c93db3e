"""What the served OpenAPI promises, held to by schemathesis: whatever is sent within the schema and beside it, every
answer is one of the documented, in its documented shape, and what the schema forbids is refused.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from attack import Target

pytestmark = pytest.mark.usefixtures("unharmed")

NUM_EXAMPLES = 40
# A string that is base64 of no image is within the schema, and is refused.
NOT_PROMISED = "positive_data_acceptance"


def test_every_answer_is_as_documented(target: Target, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"{target.server.url}/openapi.json",
        f"--max-examples={NUM_EXAMPLES}",
        f"--exclude-checks={NOT_PROMISED}",
        "--generation-deterministic",
        "--continue-on-failure",
        "--request-timeout=60",
        "--no-color",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    num_paths = len(target.ask("GET", "/openapi.json").document["paths"])
    assert f"{num_paths} selected / {num_paths} total" in done.stdout
