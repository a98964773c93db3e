#!/usr/bin/env bash
# Everything that only a GPU can show, in one command of under five minutes: the tests marked gpu (attention backends, CUDA
# graphs, ranks over NCCL) and the figures of benchmarks/gpu.py. Uses PYTHON (default: .venv's, else python3) as it is and
# installs nothing; what it lacks besides torch may lie in a folder named by PYTHONPATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-}"
if [[ -z "$python" ]]; then python=.venv/bin/python; fi
if ! "$python" -c '' 2>/dev/null; then python=python3; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$python" - <<'PY'
import importlib.util, sys
needed = ["torch", "numpy", "PIL", "safetensors", "huggingface_hub", "msgspec", "zmq", "pytest", "hypothesis", "pytest_timeout"]
missing = [name for name in needed if importlib.util.find_spec(name) is None]
sys.exit(f"missing: {', '.join(missing)}" if missing else 0)
PY
status=0
"$python" -m benchmarks.gpu --json "${OUT:-.}/gpu.json" || status=$?
"$python" -m pytest -q -p no:cacheprovider -m gpu tests/encoder tests/distributed || status=$?
exit "$status"
