"""torchrun, tied to the front end's life: `python -m distributed.agent PARENT_PID TORCHRUN_ARGS...`.

The front end's end, even by SIGKILL, ends this process, and this process's end ends every rank that it started.
"""

import os
import sys

from distributed.processes import PARENT_PID_VARIABLE, die_with_parent


def main() -> None:
    """Bind to the parent, then become torchrun."""
    die_with_parent(int(sys.argv[1]))
    os.environ[PARENT_PID_VARIABLE] = str(os.getpid())
    from torch.distributed.run import main as torchrun  # seconds of import: bound to the parent before it

    torchrun(sys.argv[2:])


if __name__ == "__main__":
    main()
