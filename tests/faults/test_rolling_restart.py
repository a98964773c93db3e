"""A service is replaced by its successor under load: a client that tries again loses nothing, nor does one of nginx."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from load import Load, Reference
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


def test_clients_who_try_again_lose_nothing(start_faulty: Callable[..., Server], reference: Reference) -> None:
    port = free_port()
    server = start_faulty(f"--port={port}", ranks=1).wait_ready()
    with Load(f"http://127.0.0.1:{port}", reference, clients=4, forgive="outages") as clients:
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
    with Load(url, reference, clients=4, forgive="nothing") as clients:
        for server, port in zip(servers, ports, strict=True):
            clients.wait_for(10)
            assert server.end(signal.SIGTERM) == 0
            clients.wait_for(10)
            start_faulty(f"--port={port}", "--drain-pause-s=1", ranks=1).wait_ready()
            clients.wait_for(10)
    assert clients.errors == []
