"""`coatcheck demo`: the whole idea, step by step, each step verified on the wire.

A stack of its own in a temporary folder on free ports; an upstream that checks its key and writes down every byte. What
is claimed is looked up there, in the bytes the client got back, or in the audit trail, never taken from our own word.
Exit status 0 only when every step held.
"""

import contextlib
import json
import os
import secrets
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coatcheck.audit import events
from coatcheck.client import ControlPlane, Exchanged, Json
from coatcheck.demo_upstream import Upstream, ca_file, running_upstream
from coatcheck.record import RunningStack
from coatcheck.stack import Ports, start_in_background, stop_stack
from coatcheck.state import StateFolder, own_folder
from coatcheck.terminal import CommandError, output
from control_plane.contract.placeholder import TokenKind

NAME: Final = "demo-api"
THIEF: Final = "mallory"
_HTTP_SECONDS: Final = 10.0
_COMMAND_SECONDS: Final = 60.0
_TRAIL_SECONDS: Final = 5.0
_AGENT: Final = '''\
"""A program that knows nothing of Coatcheck: it reads its key from a variable, and calls its API."""
import os, urllib.request

request = urllib.request.Request(
    os.environ["UPSTREAM"] + "/v1/models", headers={"Authorization": "Bearer " + os.environ["DEMO_API_API_KEY"]}
)
print(urllib.request.urlopen(request, timeout=10).status)
print(open("/proc/self/environ", "rb").read().hex())
'''


@dataclass(frozen=True, slots=True)
class Fact:
    claim: str
    held: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client got back: all of it."""

    status: int
    body: bytes
    head: bytes
    refusal: str

    @property
    def everything(self) -> bytes:
        return self.head + self.body


@dataclass(slots=True)
class Stage:
    """What the steps play with."""

    state: StateFolder
    stack: RunningStack
    control_plane: ControlPlane
    upstream: Upstream
    stranger: Upstream
    """A second server: the credential is not for it."""
    workspace: Path
    old_key: str
    new_key: str
    console: Console
    ours: Exchanged | None = None
    our_session: str = ""
    facts: dict[str, list[Fact]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    """What the proxy refused to our client: it must all be in the trail."""

    @property
    def placeholder(self) -> str:
        assert self.ours is not None
        return self.ours.placeholder

    @property
    def proxy_credential(self) -> str:
        assert self.ours is not None
        return self.ours.proxy_credential

    def client(self, proxy_credential: str) -> httpx.Client:
        """As any program behind the proxy: HTTPS by CONNECT, our CA trusted."""
        proxy = httpx.Proxy(self.stack.forward_url, headers={"Proxy-Authorization": f"Bearer {proxy_credential}"})
        trust = ssl.create_default_context(cafile=str(self.state.ca_certificate))
        return httpx.Client(proxy=proxy, verify=trust, trust_env=False, timeout=_HTTP_SECONDS)

    def get(self, url: str, *, placeholder: str = "", proxy_credential: str = "") -> Answer:
        headers = {"Authorization": f"Bearer {placeholder or self.placeholder}"}
        with self.client(proxy_credential or self.proxy_credential) as client:
            try:
                response = client.get(url, headers=headers)
            except httpx.ProxyError as error:  # CONNECT itself was refused; the code is in the reason phrase
                status, _, reason = str(error).partition(" ")
                self.refused[reason] += 1
                return Answer(int(status) if status.isdigit() else 0, b"", b"", reason)
        refusal = response.headers.get("coatcheck-refusal", "")
        self.refused += Counter([refusal] if refusal else [])
        head = b"".join(name + b": " + value + b"\r\n" for name, value in response.headers.raw)
        return Answer(response.status_code, response.content, head, refusal)

    def coatcheck(self, *arguments: str, typed: str = "") -> "subprocess.CompletedProcess[str]":
        """One of our own commands, as people type it; `typed` is what they pipe in."""
        shown = " ".join("python" if argument == sys.executable else argument for argument in arguments)
        self.console.print(Text(f"   $ coatcheck {shown}" + (" < key" if typed else ""), style="dim"))
        return subprocess.run(  # noqa: S603 - our own command
            [sys.executable, "-m", "coatcheck", "--home", str(self.state.home), *arguments],
            input=typed,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
            cwd=self.workspace,
            env=self._environment(),
        )

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "UPSTREAM": self.upstream.url}


Step = Callable[[Stage], Iterator[Fact]]


def show_demo() -> None:
    """Play every step. Raises `CommandError` when one did not hold."""
    console = output()
    began = time.monotonic()
    console.print(Text("Coatcheck: agents carry the ticket, never the key", style="bold"))
    with tempfile.TemporaryDirectory(prefix="coatcheck-demo-") as folder, _stage(Path(folder), console) as stage:
        for number, (title, step) in enumerate(STEPS, start=1):
            _play(stage, number, title, step)
    _summary(console, stage, seconds=time.monotonic() - began)
    failed = [title for title, facts in stage.facts.items() if not all(fact.held for fact in facts)]
    if failed:
        raise CommandError(f"{len(failed)} of {len(STEPS)} steps did not hold ({', '.join(failed)})", "see above")


# --- the steps --------------------------------------------------------------------------------------------------------


def _store(stage: Stage) -> Iterator[Fact]:
    stored = stage.coatcheck(
        "credential", "add", NAME, "--destination", stage.upstream.url, "--allow-private", typed=stage.old_key
    )
    yield Fact("the key went in through standard input, and was sealed", stored.returncode == 0)
    files = [file for file in stage.state.home.rglob("*") if file.is_file()]
    yield Fact(
        f"the key stands in none of the state folder's {len(files)} files",
        not any(stage.old_key.encode() in file.read_bytes() for file in files),
    )
    shown = stage.coatcheck("credential", "show", NAME)
    yield Fact("no command shows it again", shown.returncode == 0 and stage.old_key not in shown.stdout + shown.stderr)


def _exchange(stage: Stage) -> Iterator[Fact]:
    answer = stage.coatcheck("exchange", "--audience", NAME)
    stage.ours = Exchanged(json.loads(answer.stdout))
    stage.our_session = stage.ours.answer["session_id"]
    yield Fact(
        f"the answer holds a placeholder for {stage.ours.expires_in:.0f} s, and no key",
        TokenKind.PLACEHOLDER.value in stage.placeholder and stage.old_key not in answer.stdout,
    )


def _swap(stage: Stage) -> Iterator[Fact]:
    answer = stage.get(f"{stage.upstream.url}/v1/models")
    yield Fact("the client got 200 with nothing but its placeholder", answer.status == httpx.codes.OK)
    yield Fact("the upstream saw the real key", stage.old_key.encode() in stage.upstream.everything())
    yield Fact("the upstream saw no placeholder", _no_token_in(stage.upstream.everything()))


def _run_child(stage: Stage) -> Iterator[Fact]:
    before = len(stage.upstream.heard)
    ran = stage.coatcheck("run", "--", sys.executable, "agent.py")
    status, _, environment_hex = ran.stdout.strip().partition("\n")
    environment = bytes.fromhex(environment_hex.strip() or "00")
    yield Fact("an unchanged program got 200", status.strip() == "200")
    yield Fact("the upstream saw the real key", _heard_since(stage.upstream, before, stage.old_key))
    yield Fact(
        "its environment holds a placeholder, and neither key nor proxy credential",
        TokenKind.PLACEHOLDER.value.encode() in environment
        and stage.old_key.encode() not in environment
        and TokenKind.PROXY_CREDENTIAL.value.encode() not in environment,
    )


def _thief(stage: Stage) -> Iterator[Fact]:
    stage.coatcheck("grant", "add", NAME, "--subject", THIEF)
    session = stage.control_plane.open_session(THIEF)
    theirs = stage.control_plane.exchange(session["session_token"], NAME)
    before = len(stage.upstream.heard)
    answer = stage.get(f"{stage.upstream.url}/v1/models", proxy_credential=theirs.proxy_credential)
    yield Fact(
        f"{THIEF}, with a right to the same credential, is refused our placeholder ({answer.refusal})",
        answer.status == httpx.codes.FORBIDDEN and answer.refusal == "caller_mismatch",
    )
    yield Fact("the upstream heard nothing of it", len(stage.upstream.heard) == before)


def _elsewhere(stage: Stage) -> Iterator[Fact]:
    host = stage.stranger.url.removeprefix("https://")
    denied = stage.get(f"{stage.stranger.url}/v1/models")
    yield Fact(f"a host nobody allowed is refused ({denied.refusal})", denied.refusal == "destination_denied")
    stage.coatcheck("allow", "add", host, "--allow-private")
    answer = stage.get(f"{stage.stranger.url}/v1/models")
    yield Fact(
        f"one that is allowed gets no placeholder swapped ({answer.refusal})",
        answer.status == httpx.codes.FORBIDDEN and answer.refusal == "destination_denied",
    )
    yield Fact("that host never heard a request", not stage.stranger.heard)


def _forged(stage: Stage) -> Iterator[Fact]:
    before = len(stage.upstream.heard)
    last = "0" if stage.placeholder[-1] != "0" else "1"
    answer = stage.get(f"{stage.upstream.url}/v1/models", placeholder=stage.placeholder[:-1] + last)
    yield Fact(
        f"one altered character is refused ({answer.refusal})",
        answer.status == httpx.codes.FORBIDDEN and answer.refusal == "unknown_placeholder",
    )
    yield Fact("the upstream heard nothing of it", len(stage.upstream.heard) == before)


def _echo(stage: Stage) -> Iterator[Fact]:
    before = len(stage.upstream.heard)
    answer = stage.get(f"{stage.upstream.url}/v1/echo")
    yield Fact(
        "the upstream sent the request's head back, key and all", _heard_since(stage.upstream, before, stage.old_key)
    )
    yield Fact("the client got the answer", answer.status == httpx.codes.OK and b"GET /v1/echo" in answer.body)
    yield Fact("the key is nowhere in what the client got", stage.old_key.encode() not in answer.everything)


def _rotate(stage: Stage) -> Iterator[Fact]:
    headers = {"Authorization": f"Bearer {stage.placeholder}"}
    before = len(stage.upstream.heard)
    with (
        stage.client(stage.proxy_credential) as client,
        client.stream("GET", f"{stage.upstream.url}/v1/stream", headers=headers) as stream,
    ):
        lines = stream.iter_lines()
        first = next(lines)
        rotated = stage.coatcheck("credential", "rotate", NAME, typed=stage.new_key)
        during = stage.get(f"{stage.upstream.url}/v1/models")
        used_new_key = _heard_since(stage.upstream, before + 1, stage.new_key)
        stage.upstream.finish.set()
        received = [first, *lines]
    tokens = [line for line in received if line.startswith("data: ")]
    yield Fact("the key was replaced while a stream was open", rotated.returncode == 0)
    yield Fact("the next request, with the same placeholder, used the new key", during.status == 200 and used_new_key)
    yield Fact(
        f"the stream ran on to its end on the old key ({len(tokens)} events)",
        len(tokens) == 6 and stage.old_key.encode() in stage.upstream.heard[before],
    )


def _revoke(stage: Stage) -> Iterator[Fact]:
    before = len(stage.upstream.heard)
    stage.control_plane.end_session(stage.our_session)
    deadline = time.monotonic() + _TRAIL_SECONDS
    answer = stage.get(f"{stage.upstream.url}/v1/models")
    while answer.status == httpx.codes.OK and time.monotonic() < deadline:
        before = len(stage.upstream.heard)
        time.sleep(0.05)
        answer = stage.get(f"{stage.upstream.url}/v1/models")
    yield Fact(
        f"after the session's end its placeholder is refused ({answer.refusal or answer.status})",
        answer.status in (httpx.codes.FORBIDDEN, httpx.codes.PROXY_AUTHENTICATION_REQUIRED),
    )
    yield Fact("the upstream heard nothing of it", len(stage.upstream.heard) == before)


def _trail(stage: Stage) -> Iterator[Fact]:
    trail = _delivered(stage)
    for event in trail:
        if event["action"] in ("swap", "refuse"):
            what = event.get("code") or f"{event.get('credential')} v{event.get('version')}"
            stage.console.print(Text(f"   {event['action']:<8}{event.get('subject') or '-':<9}{what}", style="dim"))
    yield Fact("every swap, before and after the rotation, is in it", _swapped_versions(trail) == {1, 2})
    yield Fact("every refusal is in it", _refused(trail) >= stage.refused)
    text = json.dumps(trail)
    yield Fact(
        "it holds names, and neither keys nor placeholders",
        stage.old_key not in text and stage.new_key not in text and _no_token_in(text.encode()),
    )
    verified = stage.coatcheck("audit", "verify")
    yield Fact("no event is missing or altered: its signed chain proves it", verified.returncode == 0)


def _delivered(stage: Stage) -> list[Json]:
    """The trail, once the proxy has delivered everything (about a second)."""
    deadline = time.monotonic() + _TRAIL_SECONDS
    while True:
        trail = list(events(stage.control_plane))
        is_whole = _refused(trail) >= stage.refused and _swapped_versions(trail) == {1, 2}
        if is_whole or time.monotonic() > deadline:
            return trail
        time.sleep(0.1)


def _refused(trail: list[Json]) -> Counter[str]:
    return Counter(event["code"] for event in trail if event["action"] == "refuse")


def _swapped_versions(trail: list[Json]) -> set[int]:
    return {event["version"] for event in trail if event["action"] == "swap"}


STEPS: Final[tuple[tuple[str, Step], ...]] = (
    ("A key is stored", _store),
    ("A session gets a placeholder for it", _exchange),
    ("A request is swapped", _swap),
    ("A program runs without the key", _run_child),
    ("A stolen placeholder is refused", _thief),
    ("Another host gets nothing", _elsewhere),
    ("A forgery is refused", _forged),
    ("A key that is sent back is taken out", _echo),
    ("The key is rotated under a stream", _rotate),
    ("The session ends, the placeholder with it", _revoke),
    ("All of it stands in the audit trail", _trail),
)


# --- around them ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stage(folder: Path, console: Console) -> Iterator[Stage]:
    old_key, new_key = (f"sk-demo-{secrets.token_hex(16)}" for _ in range(2))
    state, workspace = StateFolder(folder / "state"), folder / "workspace"
    own_folder(state.home)
    workspace.mkdir()
    (workspace / "agent.py").write_text(_AGENT)
    with (
        running_upstream({old_key, new_key}, folder) as upstream,
        running_upstream({old_key, new_key}, folder) as stranger,
    ):
        stack = start_in_background(state, Ports(0, 0, 0, 0), until_unused=False, upstream_ca=(str(ca_file(folder)),))
        try:
            with ControlPlane.of(state) as control_plane:
                ready = f"stack ready: control plane {stack.control_plane_url}, proxy {stack.forward_url}"
                console.print(Text(ready, style="dim"))
                yield Stage(state, stack, control_plane, upstream, stranger, workspace, old_key, new_key, console)
        finally:
            stop_stack(state, stack)


def _play(stage: Stage, number: int, title: str, step: Step) -> None:
    stage.console.print(Text(f"\n{number:>2} {title}", style="bold"))
    facts = stage.facts[title] = []
    try:
        for fact in step(stage):
            facts.append(fact)
            _show(stage.console, fact)
    except Exception as error:
        facts.append(Fact(f"the step broke off: {type(error).__name__}: {error}", held=False))
        _show(stage.console, facts[-1])


def _show(console: Console, fact: Fact) -> None:
    mark, style = ("✓", "green") if fact.held else ("✗", "bold red")
    console.print(Text(f"   {mark} ", style=style).append(fact.claim, style="not bold default"))


def _summary(console: Console, stage: Stage, *, seconds: float) -> None:
    table = Table(title="What was verified", title_justify="left", title_style="bold")
    table.add_column("", justify="right")
    table.add_column("step")
    table.add_column("facts", justify="right")
    table.add_column("result")
    for number, (title, facts) in enumerate(stage.facts.items(), start=1):
        held = sum(fact.held for fact in facts)
        whole = held == len(facts) > 0
        result = Text("held", style="green") if whole else Text("DID NOT HOLD", style="bold red")
        table.add_row(str(number), title, f"{held}/{len(facts)}", result)
    console.print()
    console.print(table)
    total = sum(len(facts) for facts in stage.facts.values())
    held = sum(fact.held for facts in stage.facts.values() for fact in facts)
    console.print(Text(f"{held} of {total} facts held, in {seconds:.1f} s"))


def _heard_since(upstream: Upstream, index: int, key: str) -> bool:
    return any(key.encode() in head for head in upstream.heard[index:])


def _no_token_in(data: bytes) -> bool:
    return not any(kind.value.encode() in data for kind in TokenKind)
