"""Children that never outlive their parent, and trees that are really gone when they were ended.

Linux only: `prctl` for the death signal and for adopting orphans, `/proc` for the tree.
"""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

PARENT_PID_VARIABLE = "PATCHGRID_PARENT_PID"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process with SIGKILL when its parent dies, however that happens.

    Args:
        parent_pid: the parent's id as the parent gave it; if it is gone already, this process ends at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants, so that it can wait for their end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents before children. Empty if it is gone."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def kill_tree(pid: int, *, timeout_s: float = 10.0) -> None:
    """End `pid` and everything below it with SIGKILL and wait until all of it is gone.

    The caller reaps `pid` itself. Stopped processes die too. Blocks for up to `timeout_s` seconds.

    Raises:
        TimeoutError: a process is still there, as one in an uninterruptible driver call would be.
    """
    tree = descendants(pid)
    for victim in [pid, *tree]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while left := [victim for victim in tree if not _is_gone(victim)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} did not die of SIGKILL within {timeout_s:g} s")
        time.sleep(0.01)


def _is_gone(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # an adopted orphan: collect it
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"  # some other parent's to collect
