"""Children that never outlive their parent, and trees that are really gone when they were ended.

Linux only: `prctl` for the death signal and for adopting orphans, `/proc` for the tree.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
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


def kill_group(agent_pid: int, *, timeout_s: float = 10.0) -> None:
    """End an agent's ranks with SIGKILL, and the agent, and wait until all of it is gone.

    Finds the ranks under the agent and, if it has died before them, among the orphans that this process adopted. The
    caller reaps the agent itself. Stopped processes die too. Blocks for up to `timeout_s` seconds.

    Raises:
        TimeoutError: a process is still there, as one in an uninterruptible driver call would be.
    """
    tag = f"{PARENT_PID_VARIABLE}={agent_pid}".encode()
    ranks = {pid for pid in _descendants(os.getpid()) if tag in _read(pid, "environ").split(b"\0")}
    for pid in (agent_pid, *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    _wait_until(lambda: _has_ended(agent_pid), deadline)
    # Its orphans are this process's now. A dying one has no environment left, but torchrun made it lead a session.
    orphans = (pid for pid in _children(os.getpid()) if pid != agent_pid and _session(pid) == pid)
    ranks |= {pid for pid in orphans if not _read(pid, "environ")}
    _wait_until(lambda: all(_is_over(pid) for pid in ranks), deadline)


def _wait_until(condition: Callable[[], bool], deadline: float) -> None:
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("a rank did not die of SIGKILL in time")
        time.sleep(0.01)


def _is_over(pid: int) -> bool:
    """Reap it if it is a child of this process; a zombie of another's is that one's to reap."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return not _stat(pid) or _is_zombie(pid)


def _has_ended(child_pid: int) -> bool:
    """Whether every thread of a child is gone, so that its own children have a new parent. Leaves it to be reaped."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, child_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True


def _descendants(pid: int) -> list[int]:
    below: list[int] = []
    for child in _children(pid):
        below += [child, *_descendants(child)]
    return below


def _children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        tasks = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return [int(child) for task in tasks for child in task.split()]
    return []


def _is_zombie(pid: int) -> bool:
    return next(iter(_stat(pid)), "") == "Z"


def _session(pid: int) -> int:
    return int(next(iter(_stat(pid)[3:]), 0))


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the command's name, which may hold anything."""
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _read(pid: int, name: str) -> bytes:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""
