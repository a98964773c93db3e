"""A private folder for one service's life: the socket to rank 0, and the reasons that ranks leave when they fail.

Removed at the end, and if the end was a SIGKILL, by the next service of the same user that starts.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "patchgrid-"
_LOCK = "lock"


@contextmanager
def private_run_dir() -> Iterator[Path]:
    """A new folder of mode 0700 with a random name, locked for as long as this process lives."""
    _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with (folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder)


def _sweep(parent: Path) -> None:
    """Remove our own folders that no living process holds."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, another sweeper's, or held
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
