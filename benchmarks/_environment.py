"""A rank's environment for a tower in this process, so that both allocate and wait in the same way."""

import os
import sys

from distributed.launcher import rank_environment

_ADDED = "BENCHMARK_ADDED_VARIABLES"


def enter_rank_environment() -> None:
    """Start this very command again where a variable is missing: OpenMP and the allocator read theirs only once."""
    missing = {name: value for name, value in rank_environment(1).items() if name not in os.environ}
    if missing:
        environment = os.environ | missing | {_ADDED: ",".join(missing)}
        os.execve(sys.executable, sys.orig_argv, environment)


def original_environment() -> dict[str, str]:
    """The environment without what was added: for a server, whose ranks are given it, and nothing else of it is."""
    added = os.environ.get(_ADDED, "").split(",")
    return {name: value for name, value in os.environ.items() if name not in (*added, _ADDED)}
