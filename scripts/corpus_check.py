"""What `scripts/corpus_check` runs: other projects' test images against a real server.

It fails if an image is answered with a 5xx, takes longer than an image may take to decode, or is answered otherwise the
second time, and if the server is not as it was before, or has logged what is not its own.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import httpx
from attack import Target
from server import Server

from service.settings import Settings

DEBIAN_SOURCES = ("libpng1.6", "giflib")
SUFFIXES = {".png", ".gif", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".avif", ".ico"}
LIMIT_S: float = Settings.model_fields["decode_timeout_s"].default


@dataclass
class Corpus:
    """One project's images, and what became of them."""

    name: str
    files: list[Path]
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and give the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/corpus_check", description="Other projects' test images, twice.")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--model", default="demo", help="what to serve (default: demo)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="patchgrid-corpus-") as name:
        folder = Path(name)
        corpora = [*pillow(folder / "pillow"), *debian(folder / "debian")]
        failures = ask_for_all(corpora, options.model, folder)
    print("\n".join(markdown(corpora) if options.markdown else text(corpora)))
    for failure in failures:
        say(f"FAILED: {failure}")
    return 1 if failures else 0


def say(line: str) -> None:
    print(f"corpus_check: {line}", file=sys.stderr, flush=True)


def pillow(folder: Path) -> Iterator[Corpus]:
    """The source distribution of the release that is installed."""
    release = version("pillow")
    say(f"fetching the sources of pillow {release}")
    command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--no-binary=pillow"]
    subprocess.run([*command, f"--dest={folder}", f"pillow=={release}"], check=True)
    yield Corpus(f"Pillow {release}, Tests/images", unpacked(folder, "*/Tests/images/**/*"))


def debian(folder: Path) -> Iterator[Corpus]:
    """Debian's source packages, by the system's own package lists, with every file of apt's in this folder."""
    system = platform.freedesktop_os_release()
    if shutil.which("apt-get") is None or system.get("ID") != "debian":
        say("no Debian here: libpng and giflib are left out")
        return
    for part in ("sources", "lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    apt = Path("/etc/apt")
    for file in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*.sources"))):
        if file.is_file():
            lines = file.read_text().splitlines()
            lines = [line.replace("Types: deb", "Types: deb-src").replace("deb ", "deb-src ", 1) for line in lines]
            (folder / "sources" / file.name).with_suffix(file.suffix).write_text("\n".join([*lines, ""]))
    options = {
        "Dir::Etc::SourceList": folder / "sources/sources.list",
        "Dir::Etc::SourceParts": folder / "sources",
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
    }
    command = ["apt-get", "--quiet=2", *(f"--option={name}={value}" for name, value in options.items())]
    for package in DEBIAN_SOURCES:
        place = folder / package
        place.mkdir()
        say(f"fetching the sources of {package}")
        try:
            if package == DEBIAN_SOURCES[0]:
                subprocess.run([*command, "update"], check=True, stdout=subprocess.DEVNULL)
            fetched = [*command, "source", "--download-only", f"{package}/{system['VERSION_CODENAME']}"]
            subprocess.run(fetched, check=True, cwd=place, stdout=subprocess.DEVNULL)
        except subprocess.CalledProcessError as error:
            say(f"apt-get ended with {error.returncode}: {package} is left out")
            continue
        files = [file for file in unpacked(place, "*/**/*") if file.suffix.lower() in SUFFIXES]
        release = next(place.glob("*.dsc")).stem.partition("_")[2]
        yield Corpus(f"{package} {release} (Debian)", files)


def unpacked(folder: Path, pattern: str) -> list[Path]:
    for archive in folder.glob("*.tar.*"):
        with tarfile.open(archive) as opened:
            opened.extractall(folder / "unpacked", filter="data")
    return sorted(file for file in (folder / "unpacked").glob(pattern) if file.is_file() and not file.is_symlink())


def ask_for_all(corpora: Sequence[Corpus], model: str, folder: Path) -> list[str]:
    """Fill in the outcomes. Returns what went wrong."""
    failures: list[str] = []
    server = Server(folder, f"--model={model}", "--nproc-per-node=1", "--cache-bytes=0")
    try:
        target = Target(server.wait_ready())
        golden = next(file for corpus in corpora for file in corpus.files if file.name == "hopper.png").read_bytes()
        before = target.embed(golden)
        for corpus in corpora:
            say(f"{len(corpus.files)} files of {corpus.name}")
            for file in corpus.files:
                failures += [f"{corpus.name}, {file.name}: {what}" for what in ask_twice(server, corpus, file)]
        try:
            target.check_unharmed(golden, before)
        except AssertionError as error:
            failures.append(f"the server is not as it was: {error}")
        if (code := server.end()) != 0:
            failures.append(f"the server ended with {code}")
    finally:
        server.close()
    return failures


def ask_twice(server: Server, corpus: Corpus, file: Path) -> Iterator[str]:
    """Count one image's outcome. Yields what is wrong with it."""
    answers: list[httpx.Response] = []
    for _ in range(2):
        start = time.perf_counter()
        headers = {"content-type": "application/octet-stream"}
        answers.append(server.client.post("/embed", content=file.read_bytes(), headers=headers))
        took_s = time.perf_counter() - start
        if took_s > corpus.slowest_s:
            corpus.slowest_s, corpus.slowest = took_s, file.name
        if took_s > LIMIT_S:
            yield f"took {took_s:.1f} s, more than {LIMIT_S:g} s"
    status = answers[0].status_code
    code = "ok" if status == 200 else answers[0].json()["error"]["code"]
    corpus.outcomes[f"{status} {code}"] += 1
    if status >= 500:
        yield f"{status} {code}"
    if (status, answers[0].content) != (answers[1].status_code, answers[1].content):
        yield f"{status} {code}, and something else the second time"


def table(corpora: Sequence[Corpus]) -> list[list[str]]:
    outcomes = sorted({outcome for corpus in corpora for outcome in corpus.outcomes})
    rows = [["images of", "files", *outcomes, "slowest answer"]]
    for corpus in corpora:
        counts = [str(corpus.outcomes[outcome]) for outcome in outcomes]
        slowest = f"{corpus.slowest_s:.1f} s ({corpus.slowest})"
        rows.append([corpus.name, str(len(corpus.files)), *counts, slowest])
    return rows


def markdown(corpora: Sequence[Corpus]) -> list[str]:
    head, *rows = table(corpora)
    rule = ["---", *["---:"] * (len(head) - 2), "---"]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def text(corpora: Sequence[Corpus]) -> list[str]:
    rows = table(corpora)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main())
