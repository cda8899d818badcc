"""`coatcheck run -- CMD`: CMD with placeholders in its variables, a way out, and not one key.

    (1) join the local stack, or start one that ends with the last run
    (2) which credentials, in which variables; may CMD be sandboxed
    (3) a session, its own allow rules, an exchange for each credential
    (4) listeners that prove this run's caller to the proxy; certificates; CMD's environment
    (5) CMD, with signals passed on and placeholders renewed in place
    (6) the session ends, and with it everything that was handed out; what was refused is told

Rule: CMD never holds a key, a proxy credential or the admin token; whatever ends this process in an orderly way
revokes. A stack that was started by a run ends with the last run that uses it; one that was there stays.
"""

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, NoReturn

import httpx
import typer

from coatcheck.allow import describe_rule, is_internal, rule_of
from coatcheck.audit import events, last_sequence, where
from coatcheck.child import Child, PassedOnSignals, RelayedTerminal, start_beside_us
from coatcheck.client import ControlPlane, Exchanged, Json
from coatcheck.environment import (
    WayOut,
    Withheld,
    child_environment,
    has_loopback_destination,
    passed_on_keys,
    variables_of,
)
from coatcheck.lease import WAY_OUT, Lease
from coatcheck.record import TRUSTS_NOBODY, RunningStack, living_stack, own_stack
from coatcheck.relay import Way, loopback_listener, relaying
from coatcheck.sandbox import FORWARD_PORT, REVERSE_PORT, Sandbox, receive, sandbox_for
from coatcheck.stack import joined_stack
from coatcheck.state import RUNTIME_CLIENT, SUBJECT, StateFolder
from coatcheck.terminal import CommandError, invocation, say, typed
from coatcheck.trust import TRUST_STORE_PASSWORD, bundle, java_trust_store
from control_plane.contract.destination import InvalidDestinationError, canonical_host, is_ip_literal
from control_plane.contract.refusal import RefusalCode

TOLD_REFUSALS: Final = 10
DELIVERY_SECONDS: Final = 2.5
"""The proxy delivers its events at least this often."""
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
_NODE_PROGRAMS: Final = frozenset("node npm npx yarn pnpm tsx ts-node".split())
_NODE_HONOURS_PROXIES: Final = ((24, 0), (22, 21))
"""From these on in each line, Node's fetch obeys NODE_USE_ENV_PROXY."""


class SandboxChoice(StrEnum):
    AUTO = "auto"
    REQUIRE = "require"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Run:
    """One run, ready to start."""

    command: list[str]
    state: StateFolder
    lease: Lease
    provision: "Provision"
    sandbox: Sandbox | None


def run(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="CMD", show_default=False)],
    credential: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this granted credential. Repeatable.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="HOST[:PORT]", help="Also this host, for this run alone. Repeatable.")
    ] = None,
    sandbox: Annotated[
        SandboxChoice, typer.Option(help="auto: where bubblewrap works; require: else refuse.")
    ] = SandboxChoice.AUTO,
) -> None:
    """Run CMD with placeholders instead of keys.

    Every granted credential's variables hold a placeholder, and the egress proxy is CMD's way out. Where no local stack
    runs, one is started, and ends with the last run that uses it.
    """
    for number in _ENDING:
        signal.signal(number, _end)  # until CMD runs: an orderly end, so that nothing stays open
    invoked = invocation(context)
    state = StateFolder(invoked.home)
    rules = [rule_for_one_run(host) for host in allow or []]
    with (
        joined_stack(state) as stack,  # (1)
        ControlPlane.of(state) as control_plane,
        tempfile.TemporaryDirectory(prefix="coatcheck-run-") as folder,
    ):
        run_folder = Path(folder)
        run_folder.chmod(0o755)  # CMD may go on as another user
        stored = control_plane.credentials()
        chosen = _chosen(stored, control_plane.grants(), names=credential or [])  # (2)
        variables = variables_of(chosen)
        confined = _sandbox(sandbox, state, run_folder)
        first = last_sequence(control_plane)
        with _session(control_plane, chosen, rules) as (session_id, exchanged):  # (3)
            lease = Lease(control_plane, exchanged, clock=time.time, say=say)
            provision = Provision(
                state=state,
                stored=stored,
                chosen=chosen,
                presets=control_plane.presets(),
                placeholders={variable: lease.placeholder(name) for variable, name in variables.items()},
                rules=rules,
                run_folder=run_folder,
            )
            _say_what_to_know(command, provision)
            started = Run(command, state, lease, provision, confined)
            import uvloop

            status = uvloop.run(_carry_out(started))
        _tell_refusals(control_plane, living_stack(state) or stack, session_id, after=first, home=invoked.home)  # (6)
    raise typer.Exit(status)


# --- (2) which credentials, and may CMD be sandboxed ------------------------------------------------------------------


def _chosen(stored: list[Json], grants: list[Json], *, names: list[str]) -> list[Json]:
    """The credentials that CMD gets placeholders for. Raises `CommandError` for a name that is not there."""
    now = time.time()
    granted = {
        grant["credential"]
        for grant in grants
        if grant.get("subject") == SUBJECT
        and grant.get("client") in (None, RUNTIME_CLIENT)
        and (grant.get("until") is None or grant["until"] > now)
    }
    by_name = {str(each["name"]): each for each in stored}
    for name in names:
        if name not in by_name:
            known = (
                f"there are: {', '.join(sorted(by_name))}" if by_name else "store it with 'coatcheck credential add'"
            )
            raise CommandError(f"there is no credential {name}", known)
        if name not in granted:
            raise CommandError(
                f"{name} is not granted to the local subject",
                f"grant it with 'coatcheck grant add {shlex.quote(name)} --subject {SUBJECT}'",
            )
    return [by_name[name] for name in dict.fromkeys(names)] or [each for each in stored if each["name"] in granted]


def _sandbox(choice: SandboxChoice, state: StateFolder, run_folder: Path) -> Sandbox | None:
    if choice is SandboxChoice.OFF:
        return None
    found = sandbox_for(Path.cwd(), state_folder=state.home, run_folder=run_folder)
    if isinstance(found, Sandbox):
        later = found.what_may_be_run_later()
        if later:
            say(f"{later}: better run in the folder of one project")
        return found
    if choice is SandboxChoice.REQUIRE:
        raise CommandError(
            f"{RefusalCode.SANDBOX_UNAVAILABLE.value}: {found}",
            "install bubblewrap (Debian: apt-get install bubblewrap), or run with --sandbox auto",
        )
    say(
        f"no sandbox: {found}; CMD runs as you, and could read {state.home} and reach the network past the proxy "
        "(install bubblewrap to prevent both)"
    )
    return None


def rule_for_one_run(text: str) -> Json:
    """`--allow HOST[:PORT]`. An address that is spelt out was meant, private or not; a name may lead anywhere."""
    rule = rule_of(text)
    with contextlib.suppress(InvalidDestinationError):
        host = canonical_host(rule["host"])
        if is_ip_literal(host) or host == "localhost":
            rule["allow_private"] = True
    return rule


# --- (3) the session --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _session(
    control_plane: ControlPlane, chosen: list[Json], rules: list[Json]
) -> Iterator[tuple[str, dict[str, Exchanged]]]:
    """A session of the local subject with everything exchanged; it ends with the block."""
    session = control_plane.open_session(SUBJECT)
    session_id = str(session["session_id"])
    try:
        for rule in rules:
            control_plane.add_allow_rule({**rule, "session": session_id})
        token = str(session["session_token"])
        exchanged = {str(each["name"]): control_plane.exchange(token, str(each["name"])) for each in chosen}
        # Without any, CMD's way out still needs proof of its caller.
        yield session_id, exchanged or {WAY_OUT: control_plane.exchange_for_way_out(token)}
    finally:
        try:
            control_plane.end_session(session_id)
        except CommandError as error:
            say(f"could not end the session: {error}; what was handed out runs out by itself")


# --- (4) what CMD gets ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Provision:
    """Everything that CMD's environment is made of, but where its listeners are."""

    state: StateFolder
    stored: list[Json]
    chosen: list[Json]
    presets: list[Json]
    placeholders: Mapping[str, str]
    rules: list[Json]
    run_folder: Path

    @property
    def withheld(self) -> Withheld:
        names = {variable for credential in self.stored for variable in credential["variables"]}
        return Withheld(frozenset(names), tuple(self.state.own_secrets()))

    @property
    def loopback(self) -> bool:
        return has_loopback_destination(self.chosen, [str(rule["host"]) for rule in self.rules])

    def unprotected(self) -> list[str]:
        """Keys in the shell that CMD gets as they are, because no credential replaces them."""
        known = [variable for preset in self.presets for variable in preset["variables"]]
        return passed_on_keys(os.environ, known, self.withheld)

    def environment(self, *, forward_port: int, reverse_port: int) -> dict[str, str]:
        reverse_url = f"http://127.0.0.1:{reverse_port}"
        trust_store = self._java_trust_store()
        return child_environment(
            os.environ,
            placeholders=self.placeholders,
            # Where loopback goes through the proxy, so would the base URL itself, and be refused there.
            base_urls={} if self.loopback else self._base_urls(reverse_url),
            way_out=WayOut(
                forward_url=f"http://127.0.0.1:{forward_port}",
                reverse_url=reverse_url,
                forward_host="127.0.0.1",
                forward_port=forward_port,
                ca_bundle=str(self._bundle_file()),
                java_trust_store=str(trust_store) if trust_store else None,
                java_trust_store_password=TRUST_STORE_PASSWORD,
                has_loopback_destination=self.loopback,
            ),
            withheld=self.withheld,
        )

    def _base_urls(self, reverse_url: str) -> dict[str, str]:
        templates = {preset["id"]: preset.get("base_url_variables", {}) for preset in self.presets}
        return {
            variable: template.replace("{base}", f"{reverse_url}/{credential['name']}")
            for credential in self.chosen
            for variable, template in templates.get(credential.get("preset"), {}).items()
        }

    def _bundle_file(self) -> Path:
        file = self.run_folder / "ca-bundle.pem"
        if not file.exists():
            file.write_text(bundle(self.state.ca_certificate, os.environ))
            file.chmod(0o644)
        return file

    def _java_trust_store(self) -> Path | None:
        if shutil.which("java") is None and shutil.which("keytool") is None:
            return None
        file = self.run_folder / "truststore.p12"
        file.write_bytes(java_trust_store(self._bundle_file().read_text()))
        file.chmod(0o644)
        return file


# --- (5) CMD runs -----------------------------------------------------------------------------------------------------


async def _carry_out(run: Run) -> int:
    """CMD from its start to its end. Its status."""
    renewing = asyncio.create_task(run.lease.keep())
    try:
        with PassedOnSignals() as signals:
            async with _beside_us(run) if run.sandbox is None else _sandboxed(run, run.sandbox) as child:
                signals.to(child)
                return await child.wait()
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)


@contextlib.asynccontextmanager
async def _beside_us(run: Run) -> AsyncIterator[Child]:
    """Without a sandbox. Whoever on this machine finds the listeners is taken for CMD, but has no placeholder."""
    forward, reverse = loopback_listener(), loopback_listener()
    environment = run.provision.environment(
        forward_port=forward.getsockname()[1], reverse_port=reverse.getsockname()[1]
    )
    async with _relaying(run, forward, reverse):
        child = start_beside_us(run.command, environment)
        try:
            yield child
        finally:
            child.end()


@contextlib.asynccontextmanager
async def _sandboxed(run: Run, sandbox: Sandbox) -> AsyncIterator[Child]:
    environment = run.provision.environment(forward_port=FORWARD_PORT, reverse_port=REVERSE_PORT)
    channel, inner_channel = socket.socketpair()
    with contextlib.ExitStack() as held:
        held.enter_context(channel)
        terminal = held.enter_context(RelayedTerminal()) if RelayedTerminal.is_wanted() else None
        with inner_channel:
            # Started here, on the main thread: bubblewrap's --die-with-parent watches the thread that started it.
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - bubblewrap; Popen itself takes a millisecond
                sandbox.command(inner_channel.fileno(), run.command, terminal=terminal is not None),
                env=environment,
                stdin=terminal.stream(0) if terminal else None,
                stdout=terminal.stream(1) if terminal else None,
                stderr=terminal.stream(2) if terminal else None,
                pass_fds=(inner_channel.fileno(),),
                start_new_session=True,  # not even by /dev/tty does CMD reach our terminal
            )
        held.callback(process.kill)  # does nothing once it has ended; bubblewrap takes everything inside with it
        if terminal is not None:
            terminal.relay()
        handed_out = await asyncio.to_thread(receive, channel)
        held.callback(os.close, handed_out.pidfd)
        async with _relaying(run, handed_out.forward, handed_out.reverse):
            yield Child(
                process,
                send=lambda number: signal.pidfd_send_signal(handed_out.pidfd, number),
                shares_our_terminal=False,
                on_resize=terminal.resize if terminal else None,
            )


@contextlib.asynccontextmanager
async def _relaying(run: Run, forward: socket.socket, reverse: socket.socket) -> AsyncIterator[None]:
    def stack() -> RunningStack:
        return own_stack(run.state)

    proof = run.lease.live_proxy_credential
    async with (
        relaying(forward, Way(lambda: stack().forward_port, proof)),
        relaying(reverse, Way(lambda: stack().reverse_port, proof)),
    ):
        yield


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


# --- what people should know ------------------------------------------------------------------------------------------


def _say_what_to_know(command: list[str], provision: Provision) -> None:
    if not provision.chosen:
        say(
            "no credential is granted to the local subject: CMD gets no placeholder, and reaches allowed hosts alone "
            "(store one with 'coatcheck credential add NAME --preset P')"
        )
    passed_on = provision.unprotected()
    if passed_on:
        say(
            f"CMD gets {', '.join(passed_on)} from your shell as it is; "
            "store it with 'coatcheck credential add', and CMD gets a placeholder instead"
        )
    if Path(command[0]).name in _NODE_PROGRAMS and not _node_honours_proxies():
        say(
            "this Node's fetch() ignores proxy variables: give it $COATCHECK_REVERSE_URL/<credential> as its base URL, "
            "or preload a proxy agent (NODE_OPTIONS=--import=FILE)"
        )


def _node_honours_proxies() -> bool:
    try:
        said = subprocess.run(["node", "--version"], capture_output=True, text=True, timeout=5, check=False).stdout  # noqa: S607
    except (OSError, subprocess.TimeoutExpired):
        return True
    found = re.match(r"v(\d+)\.(\d+)", said)
    if found is None:
        return True
    version = (int(found[1]), int(found[2]))
    return version >= _NODE_HONOURS_PROXIES[0] or (22, 21) <= version < (23, 0)


def _tell_refusals(
    control_plane: ControlPlane, stack: RunningStack, session_id: str, *, after: int, home: Path
) -> None:
    """One line for each thing that was refused in this run, with the command that would allow it."""
    _wait_for_delivery(stack)
    try:
        refused = [
            event
            for event in events(control_plane, after=after)
            if event.get("session") == session_id and event.get("code") and event["action"] == "refuse"
        ]
    except CommandError:
        return
    lines = Counter(_refusal_line(event, home) for event in refused)
    for line, count in list(lines.items())[:TOLD_REFUSALS]:
        say(line if count == 1 else f"{line} ({count} times)")
    if len(lines) > TOLD_REFUSALS:
        say(f"and {len(lines) - TOLD_REFUSALS} more: {typed(home, 'coatcheck audit tail')}")


def _refusal_line(event: Json, home: Path) -> str:
    code = str(event["code"])
    if event.get("placeholder_id") is None and event.get("host"):
        host = shlex.quote(describe_rule({"host": event["host"], "port": _odd_port(event)}))
        if code == RefusalCode.DESTINATION_PRIVATE or (
            code == RefusalCode.DESTINATION_DENIED and is_internal(str(event["host"]))
        ):
            return f"refused {host}: it is, or leads to, an internal address of this machine or its network"
        if code == RefusalCode.DESTINATION_DENIED:
            return f"refused {host}: allow it with '{typed(home, f'coatcheck allow add {host}')}'"
    return f"refused {where(event)}: {code}; '{typed(home, 'coatcheck why ' + str(event['request_id']))}' says why"


def _odd_port(event: Json) -> int | None:
    return None if event.get("port") in (None, 443 if event.get("scheme") == "https" else 80) else int(event["port"])


def _wait_for_delivery(stack: RunningStack) -> None:
    """Until the proxy holds no event back: it sends them about once a second."""
    deadline = time.monotonic() + DELIVERY_SECONDS
    while time.monotonic() < deadline:
        try:
            metrics = httpx.get(f"{stack.admin_url}/metrics", verify=TRUSTS_NOBODY, trust_env=False, timeout=2).text
        except httpx.HTTPError:
            return
        waiting = re.search(r"^coatcheck_proxy_audit_spool_events(?:\{[^}]*\})? ([0-9.e+]+)", metrics, re.MULTILINE)
        if waiting is None or float(waiting[1]) == 0:
            return
        time.sleep(0.05)
