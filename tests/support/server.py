"""A real `patchgrid serve` in a process of its own, on a free loopback port."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


class Server:
    """Started when made, ended by `close`. Flags are those of `patchgrid serve`."""

    def __init__(self, folder: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self.log_file = folder / "serve.log"
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "service.cli", "serve", "--port=0", "--device=cpu", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
            )
        self._client: httpx.Client | None = None

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def url(self) -> str:
        return self.wait_for_log(r"listening on (http://\S+)").group(1)

    @property
    def client(self) -> httpx.Client:
        if self._client is None:
            self._client = httpx.Client(base_url=self.url, timeout=120.0, trust_env=False)
        return self._client

    def wait_for_log(self, pattern: str, timeout_s: float = 120.0) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while (match := re.search(pattern, self.log)) is None:
            assert self.process.poll() is None, f"serve ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n{self.log}"
            time.sleep(0.02)
        return match

    def wait_ready(self, timeout_s: float = 120.0) -> "Server":
        deadline = time.monotonic() + timeout_s
        while self.client.get("/health/ready").status_code != 200:
            assert self.process.poll() is None, f"serve ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"not ready:\n{self.log}"
            time.sleep(0.05)
        return self

    def rank_pids(self) -> list[int]:
        """The ranks' process ids, in rank order."""
        ranks = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if (rank := child.environ().get("RANK")) is not None:
                    ranks[int(rank)] = child.pid
        return [pid for _, pid in sorted(ranks.items())]

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample of /metrics, by its full name; 0 where it was never counted."""
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        return 0.0

    def end(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal and give the exit code."""
        self.process.send_signal(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 120.0) -> int:
        """Wait for the end and give the exit code."""
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self.process.poll() is None:
            tree = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
            for child in tree:  # the kernel ends them with their parents; this only waits
                child.wait(timeout=30) if child.is_running() else None
