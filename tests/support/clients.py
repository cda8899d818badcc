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
from urllib.parse import urlsplit

import pytest

from coatcheck.trust import TRUST_STORE_PASSWORD, java_trust_store
from tests.support.package_index import NPM_PACKAGE, PIP_PACKAGE, PIP_USER

PROGRAMS: Final = Path(__file__).parents[1] / "e2e" / "programs"
CLIENT_SECONDS: Final = 60.0


class Mode(StrEnum):
    FORWARD = "forward"
    """Through HTTPS_PROXY, with TLS inside."""
    REVERSE = "reverse"
    """By a base URL."""
    SESSION = "session"
    """As forward, through a listener opened for the session (`coatcheck run`): for clients with no proxy password."""


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
    "PIP_CERT",
    "npm_config_cafile",
)


@dataclass(frozen=True, slots=True)
class Ran:
    """All that came back to the client's user, and stayed with them."""

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


class ClientFailedError(AssertionError):
    """It ended with an error; this is what it said."""


def run(command: list[str], environment: Mapping[str, str], *, cwd: Path) -> Ran:
    """Raises `ClientFailedError` with the client's own words when it fails."""
    done = subprocess.run(
        command, env=dict(environment), cwd=cwd, capture_output=True, text=True, timeout=CLIENT_SECONDS,
        stdin=subprocess.DEVNULL, errors="replace",
    )  # fmt: skip
    if done.returncode:
        raise ClientFailedError(f"{Path(command[0]).name} exited {done.returncode}: {done.stdout}{done.stderr}")
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
        _require_undici(situation.folder)
        options = ["--import", str(shutil.copy(PROGRAMS / "proxy_preload.mjs", situation.folder))]
    return run([node, *options, program_file], situation.environment(), cwd=situation.folder)


def undici_request(situation: Situation) -> Ran:
    node = _installed("node")
    _require_undici(situation.folder)
    program_file = str(shutil.copy(PROGRAMS / "undici_request.mjs", situation.folder))
    return run([node, program_file], situation.environment(), cwd=situation.folder)


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
    return Ran("\n".join(said), _everything_in(work))


def java_http_client(situation: Situation) -> Ran:
    """Java takes neither proxy nor CA from the environment, only from properties; a proxy's password only from code."""
    java, more = _installed("java"), {}
    options = [f"-Djava.io.tmpdir={situation.folder}"]
    if situation.ca_file and situation.proxy_url:
        store, proxy = situation.folder / "trust.p12", urlsplit(situation.proxy_url)
        store.write_bytes(java_trust_store(situation.ca_file.read_text()))
        options += [
            f"-Djavax.net.ssl.trustStore={store}",
            f"-Djavax.net.ssl.trustStorePassword={TRUST_STORE_PASSWORD}",
            f"-Dhttps.proxyHost={proxy.hostname}",
            f"-Dhttps.proxyPort={proxy.port}",
            "-Dhttp.nonProxyHosts=",  # else never for localhost
        ]
        if proxy.password:
            options.append("-Djdk.http.auth.tunneling.disabledSchemes=")  # else never Basic on CONNECT
            more["PROXY_PASSWORD"] = proxy.password
    command = [java, *options, str(PROGRAMS / "Fetch.java")]
    return run(command, situation.environment(**more), cwd=situation.folder)


def pip_install(situation: Situation) -> Ran:
    """From an index whose URL holds the token. `-vv`: without it, pip keeps to itself what an index answered."""
    python, target = _installed("python3"), situation.folder / "installed"
    scheme, _, rest = situation.target_url.partition("://")
    index = f"{scheme}://{PIP_USER}:{situation.key}@{rest}/simple/"
    environment = situation.environment(PIP_INDEX_URL=index, PIP_RETRIES="0", PIP_CONFIG_FILE=os.devnull)
    command = [python, "-m", "pip", "install", "-vv", "--no-input", "--disable-pip-version-check", "--no-deps"]
    ran = run([*command, "--target", str(target), PIP_PACKAGE], environment, cwd=situation.folder)
    assert (target / "coats_hook.py").exists(), ran.output
    return Ran(ran.output, _everything_in(situation.folder))


def npm_install(situation: Situation) -> Ran:
    """A scoped package; the token stands in the project's .npmrc, as a variable."""
    npm, project = _installed("npm"), situation.folder / "project"
    project.mkdir()
    (project / "package.json").write_text("{}")
    host = situation.target_url.partition("://")[2]
    (project / ".npmrc").write_text(f"@coats:registry={situation.target_url}/\n//{host}/:_authToken=${{API_KEY}}\n")
    environment = situation.environment(npm_config_globalconfig=os.devnull, npm_config_update_notifier="false")
    command = [npm, "install", "--no-audit", "--no-fund", "--fetch-retries=0", NPM_PACKAGE]
    ran = run(command, environment, cwd=project)
    assert (project / "node_modules" / "@coats" / "hook" / "hook.js").exists(), ran.output
    return Ran(ran.output, _everything_in(situation.folder))


def chromium(situation: Situation) -> Ran:
    """A page of the upstream uses the key that stands in its fragment, which browsers send to nobody."""
    browser, certutil = _installed("chromium"), _installed("certutil")
    assert situation.ca_file is not None
    environment = situation.environment(XDG_CONFIG_HOME=str(situation.folder), XDG_CACHE_HOME=str(situation.folder))
    store = situation.folder / ".pki" / "nssdb"
    store.mkdir(parents=True)
    trust = [certutil, "-d", f"sql:{store}"]
    run([*trust, "-N", "--empty-password"], environment, cwd=situation.folder)
    run([*trust, "-A", "-t", "C,,", "-n", "proxy", "-i", str(situation.ca_file)], environment, cwd=situation.folder)
    profile = situation.folder / "profile"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}",
               f"--proxy-server={situation.proxy_url}", "--proxy-bypass-list=<-loopback>", "--dump-dom"]  # fmt: skip
    return run([*command, f"{situation.target_url}/page#{situation.key}"], environment, cwd=situation.folder)


@dataclass(frozen=True, slots=True)
class Client:
    """One line of the table."""

    name: str
    start: Callable[[Situation], Ran]
    speaks: str = "echo"
    """What the upstream must be for it: an `echo`, a `provider`, `git`, an index for `pip` or `npm`, or a `page`."""
    long: bool = False
    modes: tuple[Mode, ...] = (Mode.FORWARD, Mode.REVERSE)
    shows: str = "unknown_placeholder"
    """What its user reads when it is refused with that code."""


CLIENTS: Final = (
    Client("curl", curl),
    Client("git clone, push", git_clone_and_push, speaks="git", shows="error: 403"),
    Client("anthropic SDK", program("anthropic_sdk"), speaks="provider"),
    Client("openai SDK", program("openai_sdk"), speaks="provider"),
    Client("httpx", program("httpx_get")),
    Client("requests", program("requests_get")),
    Client("aiohttp", program("aiohttp_get")),
    Client("urllib", program("urllib_get")),
    Client("Node fetch", node_fetch),
    Client("undici", undici_request),
    Client("Go net/http", go_net_http, long=True),
    Client("Java HttpClient", java_http_client, long=True, modes=(Mode.FORWARD, Mode.REVERSE, Mode.SESSION)),
    Client("pip install", pip_install, speaks="pip"),
    # In reverse mode npm finds a package, but not its tarball: it goes to the URL that the registry gives for it.
    Client("npm install", npm_install, speaks="npm", modes=(Mode.FORWARD, Mode.SESSION)),
    Client("Chromium", chromium, speaks="page", long=True, modes=(Mode.SESSION,)),
)


def _everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def _installed(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise MissingClientError(name, from_pip=False)
    return found


def _require_undici(folder: Path) -> None:
    """Node looks for packages beside the program. `make test` installs them, where there is an npm."""
    packages = Path(sys.prefix) / "node" / "node_modules"
    if not (packages / "undici").is_dir():
        raise MissingClientError("undici (by `make test`, from npm)", from_pip=False)
    (folder / "node_modules").symlink_to(packages)


def _go_cache() -> str:
    """The user's own, so that the standard library is compiled once and not for each run."""
    done = subprocess.run(["go", "env", "GOCACHE"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "/tmp/go-build"
