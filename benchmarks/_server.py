"""A real server, and what each of its processes uses."""

import os
import re
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Self

import httpx
import psutil

from benchmarks._environment import original_environment

_PARTS = ("front end", "decoder", "torchrun agent", "rank")
_RANK_MODULES = {"distributed.worker", "benchmarks.instant_worker"}


class Server:
    """A real `patchgrid serve` on a free loopback port. A context manager; leaving it ends the server."""

    def __init__(self, *flags: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the server has ended)
        self.started_at = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service.cli", "serve", "--port=0", *flags],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=original_environment(),
        )
        self._url = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    @property
    def url(self) -> str:
        """Where it listens, as its log says."""
        while not self._url:
            match = re.search(r"listening on (http://\S+)", self._read_log())
            self._url = match.group(1) if match else ""
            self._check_alive()
            time.sleep(0 if self._url else 0.01)
        return self._url

    def wait_for(self, path: str, timeout_s: float = 900.0) -> float:
        """Ask until GET path answers 200. Returns the seconds since the process was started."""
        deadline = self.started_at + timeout_s
        with httpx.Client(base_url=self.url, trust_env=False) as client:
            while client.get(path).status_code != 200:
                self._check_alive()
                if time.perf_counter() > deadline:
                    raise TimeoutError(f"{path} did not answer 200 within {timeout_s:g} s")
                time.sleep(0.02)
        return time.perf_counter() - self.started_at

    def processes(self) -> dict[str, psutil.Process]:
        """The server's processes by the part they play, in the order in which an image meets them."""
        found = {"front end": psutil.Process(self.process.pid)}
        decoders = 0
        for child in found["front end"].children(recursive=True):
            command = child.cmdline()
            if "service.decode_process" in command:
                found[f"decoder {decoders}"] = child
                decoders += 1
            elif "distributed.agent" in command:
                found["torchrun agent"] = child
            elif _RANK_MODULES & set(command):
                found[f"rank {child.environ()['RANK']}"] = child
        return dict(sorted(found.items(), key=lambda item: (_PARTS.index(item[0].rstrip(" 0123456789")), item[0])))

    def cpu_s(self) -> dict[str, float]:
        """CPU time of each process so far, user and kernel, in seconds."""
        times = {name: process.cpu_times() for name, process in self.processes().items()}
        return {name: each.user + each.system for name, each in times.items()}

    def _check_alive(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"serve ended with code {self.process.returncode}:\n{self._read_log()}")

    def _read_log(self) -> str:
        # Not by the handle's position: the server writes at it.
        return os.pread(self._log.fileno(), 2**20, 0).decode(errors="replace")
