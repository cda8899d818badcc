"""Real clients: programs nobody here wrote, run as their users run them.

Rule: a client gets a clean environment (`env -i`), the variables it reads by itself, and nothing else; so what works
here works for a user who sets those variables. Which variable makes which client trust a CA is the knowledge of this
file: they agree on almost nothing.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import pytest

PROGRAMS: Final = Path(__file__).parents[1] / "e2e" / "programs"
SYSTEM_ROOTS: Final = Path("/etc/ssl/certs/ca-certificates.crt")
CLIENT_SECONDS: Final = 60.0


class Mode(StrEnum):
    FORWARD = "forward"
    """Through HTTPS_PROXY, with TLS inside."""
    REVERSE = "reverse"
    """By a base URL."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What one run of a client is given."""

    target_url: str
    """Of the upstream in forward mode, the reverse route's base URL otherwise."""
    key: str
    """A placeholder, where its user would have a key."""
    folder: Path
    proxy_url: str | None = None
    ca_file: Path | None = None

    def environment(self, **more: str) -> dict[str, str]:
        """A clean one: only what is named here, and what the situation calls for."""
        found = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "TARGET_URL": self.target_url,
            "API_KEY": self.key,
        }
        if self.proxy_url:
            found |= dict.fromkeys(("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"), self.proxy_url)
        if self.ca_file:
            found |= dict.fromkeys(CA_VARIABLES, str(self.ca_file))
        return found | more


CA_VARIABLES: Final = (
    "SSL_CERT_FILE",  # curl, httpx, aiohttp, urllib, the SDKs, Go
    "CURL_CA_BUNDLE",  # beats SSL_CERT_FILE in curl
    "REQUESTS_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
)


@dataclass(frozen=True, slots=True)
class Ran:
    """All that came back to the client's user."""

    output: str
    files: bytes = b""

    def holds(self, text: str) -> bool:
        return text in self.output or text.encode() in self.files


class MissingClientError(Exception):
    """The client is not on this machine."""

    def __init__(self, name: str, *, from_pip: bool) -> None:
        super().__init__(f"{name} is not installed")
        self.from_pip = from_pip


def demand(error: MissingClientError) -> None:
    """A missing client skips its test; under CI it fails it, unless the client's toolchain comes from outside pip."""
    if os.environ.get("CI") == "true" and error.from_pip:
        pytest.fail(f"{error} and CI must have it")
    pytest.skip(str(error))


def run(command: list[str], environment: Mapping[str, str], *, cwd: Path) -> Ran:
    """Raises `AssertionError` with the client's own words when it fails."""
    done = subprocess.run(
        command, env=dict(environment), cwd=cwd, capture_output=True, text=True, timeout=CLIENT_SECONDS,
        stdin=subprocess.DEVNULL, errors="replace",
    )  # fmt: skip
    assert done.returncode == 0, f"{Path(command[0]).name} exited {done.returncode}: {done.stdout}{done.stderr}"
    return Ran(done.stdout + done.stderr)


def program(name: str, *arguments: str) -> Callable[[Situation], Ran]:
    """A Python program of `programs`, with the variables its SDK reads."""

    def start(situation: Situation) -> Ran:
        base = situation.target_url
        environment = situation.environment(
            ANTHROPIC_BASE_URL=base,
            ANTHROPIC_API_KEY=situation.key,
            OPENAI_BASE_URL=f"{base}/v1",
            OPENAI_API_KEY=situation.key,
        )
        return run([sys.executable, str(PROGRAMS / f"{name}.py"), *arguments], environment, cwd=situation.folder)

    return start


def curl(situation: Situation) -> Ran:
    command = [_installed("curl"), "-sS", "--fail-with-body", "-i", "-H", f"Authorization: Bearer {situation.key}"]
    return run([*command, f"{situation.target_url}/echo"], situation.environment(), cwd=situation.folder)


def node_fetch(situation: Situation) -> Ran:
    node = _installed("node")
    program_file = str(shutil.copy(PROGRAMS / "fetch.mjs", situation.folder))
    options = []
    if situation.proxy_url:
        options = ["--import", str(_preload(situation.folder))]
    return run([node, *options, program_file], situation.environment(), cwd=situation.folder)


def go_net_http(situation: Situation) -> Ran:
    binary = situation.folder / "fetch"
    build = situation.environment(GOFLAGS="-mod=mod", GO111MODULE="off", CGO_ENABLED="0", GOCACHE=_go_cache())
    run([_installed("go"), "build", "-o", str(binary), str(PROGRAMS / "fetch.go")], build, cwd=situation.folder)
    # Go never uses a proxy for `localhost`, spelt so; a host name has no case (RFC 9110 §4.2.3).
    target = situation.target_url.replace("//localhost:", "//LOCALHOST:")
    return run([str(binary)], situation.environment(TARGET_URL=target), cwd=situation.folder)


def git_clone_and_push(situation: Situation) -> Ran:
    """The token stands in the remote's URL; afterwards everything git keeps is looked through as well."""
    git = _installed("git")
    identity = {
        f"GIT_{who}_{what}": "coat@example.test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    environment = situation.environment(GIT_CONFIG_NOSYSTEM="1", GIT_TERMINAL_PROMPT="0", **identity)
    scheme, _, rest = situation.target_url.partition("://")
    remote = f"{scheme}://x-access-token:{situation.key}@{rest}/coats.git"
    work = situation.folder / "work"
    cloned = run([git, "clone", remote, str(work)], environment, cwd=situation.folder)
    (work / "second").write_text("another coat\n")
    said = [cloned.output]
    for arguments in (["add", "."], ["commit", "-m", "Another coat"], ["push", "origin", "HEAD:main"]):
        said.append(run([git, *arguments], environment, cwd=work).output)
    kept = b"".join(path.read_bytes() for path in work.rglob("*") if path.is_file())
    return Ran("\n".join(said), kept)


@dataclass(frozen=True, slots=True)
class Client:
    """One line of the table."""

    name: str
    start: Callable[[Situation], Ran]
    speaks: str = "echo"
    """What the upstream must be for it: an `echo`, a `provider`, or `git`."""
    long: bool = False
    modes: tuple[Mode, ...] = (Mode.FORWARD, Mode.REVERSE)


CLIENTS: Final = (
    Client("curl", curl),
    Client("git clone, push", git_clone_and_push, speaks="git"),
    Client("anthropic SDK", program("anthropic_sdk"), speaks="provider"),
    Client("openai SDK", program("openai_sdk"), speaks="provider"),
    Client("httpx", program("httpx_get")),
    Client("requests", program("requests_get")),
    Client("aiohttp", program("aiohttp_get")),
    Client("urllib", program("urllib_get")),
    Client("Node fetch", node_fetch),
    Client("Go net/http", go_net_http, long=True),
)


def _installed(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise MissingClientError(name, from_pip=False)
    return found


def _preload(folder: Path) -> Path:
    """The preload beside a `node_modules` that has undici, where Node looks for it. Raises when npm cannot get it."""
    shutil.copy(PROGRAMS / "proxy_preload.mjs", folder)
    install = [_installed("npm"), "install", "--silent", "--no-audit", "--no-fund", "--fetch-retries=0", "undici@6"]
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    if SYSTEM_ROOTS.exists():  # Node does not look at the system's roots by itself
        environment["NODE_EXTRA_CA_CERTS"] = str(SYSTEM_ROOTS)
    try:
        subprocess.run(
            [*install, "--prefix", str(folder)],
            cwd=folder,
            env=environment,
            capture_output=True,
            timeout=20,
            check=True,
        )
    except subprocess.SubprocessError:
        raise MissingClientError("undici (from npm)", from_pip=False) from None
    return folder / "proxy_preload.mjs"


def _go_cache() -> str:
    """The user's own, so that the standard library is compiled once and not for each run."""
    done = subprocess.run(["go", "env", "GOCACHE"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "/tmp/go-build"
