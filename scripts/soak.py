"""Mixed load with faults against a real server: does it creep, does it lose anything? See scripts/soak --help.

First a quiet part: after a warm-up, resident memory of every process may grow by less than 2 % over 10,000 requests.
Then a rough one, until the minutes are up: a fault every few seconds, and every answer compared with the undisturbed.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

import httpx  # noqa: E402
import psutil  # noqa: E402
from faulty_worker import CRASHES, HANGS, RAISES  # noqa: E402
from load import HEADERS, OPTIONS, Load, Reference, embed, noise, plain  # noqa: E402
from server import Server  # noqa: E402

# By then the ranks' heaps have found their size: 387 to 389 MiB from the 6,000th request on, after 364 at the 1,000th.
WARM_UP = 6_000
QUIET = 10_000
MOST_GROWTH = 0.02
SECONDS_BETWEEN_FAULTS = 15.0


def memory(server: Server) -> dict[str, int]:
    """Resident bytes of each process, by its role."""
    front = psutil.Process(server.process.pid)
    found = {"front end": front.memory_info().rss}
    for child in front.children(recursive=True):
        line = " ".join(child.cmdline())
        rank = child.environ().get("RANK")
        role = f"rank {rank}" if rank is not None else "torchrun" if "distributed.agent" in line else "decoder"
        if role == "decoder":
            role += f" {sum(name.startswith('decoder') for name in found)}"
        found[role] = child.memory_info().rss
    return found


def quiet_part(server: Server, reference: Reference) -> bool:
    """Steady load; whether memory stays."""
    with Load(server.url, reference) as load:
        load.wait_for(WARM_UP, timeout_s=3600)
        before, started = memory(server), time.monotonic()
        load.wait_for(QUIET, timeout_s=3600)
        after, elapsed = memory(server), time.monotonic() - started
    print(f"\n{QUIET} requests in {elapsed:.0f} s, after {WARM_UP} to warm up\n")
    print("| process | MiB before | MiB after | growth |\n|---|---|---|---|")
    fine = not load.errors
    for role, resident in before.items():
        growth = after[role] / resident - 1
        fine = fine and growth < MOST_GROWTH
        print(f"| {role} | {resident / 2**20:.1f} | {after[role] / 2**20:.1f} | {growth:+.1%} |")
    return fine


def faults(server: Server, rng: random.Random) -> dict[str, Callable[[], object]]:
    """What can be done to a server, by name."""

    def signal_a_rank(number: signal.Signals) -> None:
        if pids := server.rank_pids():
            os.kill(rng.choice(pids), number)

    def kill_torchrun() -> None:
        if pids := server.rank_pids():
            os.kill(psutil.Process(pids[0]).ppid(), signal.SIGKILL)

    def kill_a_decoder() -> None:
        children = psutil.Process(server.process.pid).children()
        if decoders := [child for child in children if "service.decode_process" in " ".join(child.cmdline())]:
            rng.choice(decoders).kill()

    def send_poison() -> None:
        shade = rng.choice([CRASHES, RAISES, HANGS])
        embed(server.client, plain(shade, width=392 + 14 * rng.randrange(8)))

    def leave_in_masses() -> None:
        image = noise(1, seed=rng.randrange(1000))[0]
        for _ in range(50):
            try:
                httpx.post(f"{server.url}/embed", params=OPTIONS, content=image, headers=HEADERS, timeout=0.02)
            except httpx.TransportError:
                continue

    return {
        "kill a rank": lambda: signal_a_rank(signal.SIGKILL),
        "stop a rank": lambda: signal_a_rank(signal.SIGSTOP),
        "kill torchrun": kill_torchrun,
        "kill a decoder": kill_a_decoder,
        "poison": send_poison,
        "mass disconnect": leave_in_masses,
    }


def rough_part(server: Server, reference: Reference, until: float, seed: int) -> bool:
    """Load with faults; whether all answers were right and the front end stays as it was."""
    rng = random.Random(seed)
    done: dict[str, int] = {}
    before = memory(server)["front end"]
    with Load(server.url, reference) as load:
        while time.monotonic() < until:
            name, commit = rng.choice(list(faults(server, rng).items()))
            commit()
            done[name] = done.get(name, 0) + 1
            time.sleep(rng.uniform(0.1, SECONDS_BETWEEN_FAULTS))
            load.wait_for(1)
    server.wait_ready()
    after = memory(server)["front end"]
    restarts = server.metric("patchgrid_restarts_total")
    print(
        f"\nfaults: {done}; restarts: {restarts:.0f}; answers: {dict(load.answers)}; wrong or lost: {len(load.errors)}"
    )
    print(f"front end: {before / 2**20:.1f} MiB before, {after / 2**20:.1f} MiB after")
    for error in load.errors[:5]:
        print(f"  {error}")
    return not load.errors


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long in all; the quiet part runs in any case")
    parser.add_argument("--model", default=str(ROOT / "tests" / "goldens" / "tiny-deepseek_v4"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        server = Server(
            Path(folder),
            f"--model={arguments.model}",
            "--dtype=float32",
            f"--nproc-per-node={arguments.ranks}",
            "--worker-module=faulty_worker",
            "--rank-timeout-s=3",
            "--stall-timeout-s=5",
            "--restart-limit=100000",
            "--cache-bytes=0",
            env=dict(os.environ, PYTHONPATH=str(SUPPORT)),
        )
        try:
            reference = Reference.of(server.wait_ready(), noise(24))
            fine = quiet_part(server, reference)
            fine = rough_part(server, reference, until, arguments.seed) and fine
            fine = server.end() == 0 and fine
        finally:
            server.close()
    print("\nall well" if fine else "\nNOT WELL")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
