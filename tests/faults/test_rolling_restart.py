"""A service is replaced by its successor under load: a client that tries again loses nothing, nor does one of nginx."""

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from load import Reference, embed
from server import Server, free_port

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin")

CONFIG = """
{user}daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log off; client_max_body_size 64m; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    upstream patchgrid {{ server 127.0.0.1:{first} max_fails=0; server 127.0.0.1:{second} max_fails=0; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://patchgrid;
            proxy_next_upstream error timeout http_503 non_idempotent;
        }}
    }}
}}
"""


class Clients:
    """Four who each want their next answer, and count what they had to try again for."""

    def __init__(self, url: str, reference: Reference, *, try_again: bool) -> None:
        self.answers, self.tries, self.errors = 0, 0, []  # type: ignore[var-annotated]
        self._url, self._reference, self._try_again = url, reference, try_again
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(4)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in self._threads)

    def wait_for(self, count: int) -> None:
        goal, deadline = self.answers + count, time.monotonic() + 90
        while self.answers < goal:
            assert not self.errors, self.errors
            assert time.monotonic() < deadline, "no progress"
            time.sleep(0.02)

    def _run(self, index: int) -> None:
        while not self._stopping.is_set():
            try:
                with httpx.Client(base_url=self._url, timeout=120, trust_env=False) as client:
                    while not self._stopping.is_set():
                        response = embed(client, self._reference.images[index])
                        if response.status_code == 200:
                            self._reference.check(index, response)
                            self.answers += 1
                        elif response.status_code == 503 and self._try_again:
                            self.tries += 1
                            time.sleep(0.1)
                        else:
                            self.errors.append(response.text)
                            return
            except httpx.TransportError as error:
                if not self._try_again:
                    self.errors.append(repr(error))
                    return
                self.tries += 1
                time.sleep(0.1)
            except AssertionError as error:
                self.errors.append(str(error))
                return


def test_clients_who_try_again_lose_nothing(start_faulty: Callable[..., Server], reference: Reference) -> None:
    port = free_port()
    server = start_faulty(f"--port={port}", ranks=1).wait_ready()
    with Clients(f"http://127.0.0.1:{port}", reference, try_again=True) as clients:
        clients.wait_for(20)
        assert server.end(signal.SIGTERM) == 0
        successor = start_faulty(f"--port={port}", ranks=1)
        clients.wait_for(20)
    assert clients.errors == []
    assert successor.end() == 0


@pytest.fixture
def balancer(tmp_path: Path) -> Iterator[tuple[str, int, int]]:
    port, first, second = free_port(), free_port(), free_port()
    config = tmp_path / "nginx.conf"
    config.write_text(
        CONFIG.format(
            user="user root; " if os.getuid() == 0 else "", folder=tmp_path, port=port, first=first, second=second
        )
    )
    process = subprocess.Popen([str(NGINX), "-c", str(config)])
    yield f"http://127.0.0.1:{port}", first, second
    process.terminate()
    process.wait()


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_clients_behind_nginx_do_not_even_notice(
    start_faulty: Callable[..., Server], reference: Reference, balancer: tuple[str, int, int]
) -> None:
    url, *ports = balancer
    servers = [start_faulty(f"--port={port}", "--drain-pause-s=1", ranks=1) for port in ports]
    for server in servers:
        server.wait_ready()
    with Clients(url, reference, try_again=False) as clients:
        for server, port in zip(servers, ports, strict=True):
            clients.wait_for(10)
            assert server.end(signal.SIGTERM) == 0
            clients.wait_for(10)
            start_faulty(f"--port={port}", "--drain-pause-s=1", ranks=1).wait_ready()
            clients.wait_for(10)
    assert clients.errors == []
