"""`coatcheck doctor`: every link of the chain looked at, each with what to do.

Rule: a check looks and changes nothing; it says what it found in one line, and what to do in another. Exit status 1
when any check failed; a warning is something that may be meant.
"""

import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import httpx
import typer
from rich.text import Text

from coatcheck.client import ControlPlane, Json
from coatcheck.environment import CA_FILE_VARIABLES, PROXY_VARIABLES
from coatcheck.record import RunningStack, is_unlocked, read_record
from coatcheck.sandbox import Sandbox, sandbox_for
from coatcheck.stack import DEFAULT_PORTS, find_stack, port_is_free
from coatcheck.state import StateFolder, is_open_to_others, private_files
from coatcheck.terminal import CommandError, invocation, output, printable, show_json
from coatcheck.trust import system_roots
from control_plane.contract.destination import parse_destination

_KEK = re.compile(r"[0-9a-fA-F]{64}")
_SOON_DAYS: Final = 30
DUE_DAYS: Final = 14
_CERTIFICATE: Final = re.compile(
    r'^coatcheck_proxy_certificate_ends_in_seconds\{[^}]*source="([a-z_]+)"[^}]*\} (-?[0-9.e+]+)$', re.MULTILINE
)
_DIAL_SECONDS: Final = 5.0
_SHOWN: Final = 4


class Health(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One link."""

    link: str
    health: Health
    found: str
    todo: str = ""


def doctor(
    context: typer.Context,
    upstreams: Annotated[
        bool, typer.Option("--upstreams", help="Also open a TLS connection to each credential's destinations.")
    ] = False,
) -> None:
    """Check every link, and say what to do."""
    invoked = invocation(context)
    checks = []
    for check in examine(StateFolder(invoked.home), dial_upstreams=upstreams):
        checks.append(check)
        if not invoked.as_json:
            _show(check)
    if invoked.as_json:
        show_json([asdict(check) for check in checks])
    failed = [check.link for check in checks if check.health is Health.FAILED]
    if failed:
        raise CommandError(f"{len(failed)} of {len(checks)} checks failed ({', '.join(failed)})", "see above")


def examine(state: StateFolder, *, dial_upstreams: bool) -> Iterator[Check]:
    """Every check, in the order in which a request meets the links."""
    yield from _state_folder(state)
    yield from _kek(state)
    yield from _database(state)
    yield from _ca(state)
    stack = find_stack(state) if state.exists() else None
    yield _stack(state, stack)
    if stack is None:
        yield from _ports()
    else:
        yield from _running(state, stack, dial_upstreams=dial_upstreams)
    yield _bubblewrap(state)
    yield _system_roots()
    yield from _shell()
    yield from _client_settings()


# --- what lies on the disk --------------------------------------------------------------------------------------------


def _state_folder(state: StateFolder) -> Iterator[Check]:
    if not state.home.exists():
        yield Check("state folder", Health.WARNING, f"{state.home} is not there yet", "'coatcheck up' creates it")
        return
    if is_open_to_others(state.home):
        todo = f"chmod 700 {state.home}"
        yield Check("state folder", Health.FAILED, f"{state.home} is open to others, or not yours", todo)
    else:
        yield Check("state folder", Health.OK, f"{state.home}, yours alone")
    opened = [file for file in private_files(state) if file.exists() and is_open_to_others(file)]
    if opened:
        yield Check(
            "secret files",
            Health.FAILED,
            f"open to others: {', '.join(file.name for file in opened)}",
            "chmod 600 them; if others may have read them, replace what they hold",
        )
    elif state.exists():
        yield Check("secret files", Health.OK, "yours alone")


def _kek(state: StateFolder) -> Iterator[Check]:
    if not state.exists():
        return
    wrong = [file.name for file in state.kek_files if not _KEK.fullmatch(_text(file))]
    if wrong or not state.kek_files:
        found = f"not 32 bytes in hex: {', '.join(wrong)}" if wrong else "there is none"
        yield Check("key-encryption key", Health.FAILED, found, "put the files in kek/ back from your backup")
        return
    yield Check("key-encryption key", Health.OK, f"{len(state.kek_files)} in the ring; keep a copy somewhere safe")


def _database(state: StateFolder) -> Iterator[Check]:
    if not state.exists():
        return
    if state.database.exists():
        yield Check("database", Health.OK, str(state.database))
        return
    todo = "put it back from your backup, with the key-encryption keys of its time; 'coatcheck up' makes an empty one"
    yield Check("database", Health.FAILED, f"{state.database} is not there: no credential, no grant, no trail", todo)


def _ca(state: StateFolder) -> Iterator[Check]:
    if not state.exists():
        return
    from cryptography import x509

    from egress_proxy.ca import CertificateAuthority, UnusableCaError

    try:
        CertificateAuthority.load(cert_file=state.ca_certificate, key_file=state.ca_key)
        certificate = x509.load_pem_x509_certificates(state.ca_certificate.read_bytes())[0]
    except (UnusableCaError, OSError, ValueError) as error:
        todo = f"move {state.home / 'ca'} away and start the stack: it makes a new CA, which clients must then trust"
        yield Check("interception CA", Health.FAILED, str(error), todo)
        return
    now, end = datetime.now(UTC), certificate.not_valid_after_utc
    days = (end - now).days
    renew = f"move {state.home / 'ca'} away and start the stack: it makes a new CA"
    if now < certificate.not_valid_before_utc:
        yield Check("clock", Health.FAILED, "this machine's clock is before our CA was made", "set the clock")
    if end <= now:
        yield Check("interception CA", Health.FAILED, f"expired on {end:%Y-%m-%d}", renew)
    elif days < _SOON_DAYS:
        yield Check("interception CA", Health.WARNING, f"expires on {end:%Y-%m-%d}", renew)
    else:
        yield Check("interception CA", Health.OK, f"usable until {end:%Y-%m-%d}")


# --- what runs --------------------------------------------------------------------------------------------------------


def _stack(state: StateFolder, stack: RunningStack | None) -> Check:
    if stack is not None:
        return Check("local stack", Health.OK, f"process {stack.pid}")
    record = read_record(state)
    if not is_unlocked(state.stack_lock):
        todo = f"wait a moment; if it stays so, look at {state.stack_log}"
        return Check("local stack", Health.FAILED, "it holds its lock but does not answer", todo)
    if record is not None:
        todo = "'coatcheck up --detach' starts it again"
        return Check("local stack", Health.WARNING, f"process {record.pid} ended without saying so", todo)
    return Check("local stack", Health.WARNING, "not running", "'coatcheck up --detach' starts it, 'coatcheck run' too")


def _ports() -> Iterator[Check]:
    taken = [f"{port} ({name})" for name, port in DEFAULT_PORTS.items() if not port_is_free(port)]
    if taken:
        todo = "'coatcheck up --<name>-port N' takes another; 'coatcheck run' finds free ones by itself"
        yield Check("ports", Health.WARNING, f"taken by other programs: {', '.join(taken)}", todo)
    else:
        yield Check("ports", Health.OK, f"{', '.join(str(port) for port in DEFAULT_PORTS.values())} are free")


def _running(state: StateFolder, stack: RunningStack, *, dial_upstreams: bool) -> Iterator[Check]:
    log = f"look at {state.stack_log}"
    yield _answers("control plane", f"{stack.control_plane_url}/readyz", log)
    yield _answers("egress proxy", f"{stack.admin_url}/readyz", log)
    yield from _proxy_numbers(stack, log)
    with ControlPlane.of(state) as control_plane:
        yield from keks(control_plane.keks())
        yield from _credentials(control_plane.credentials(), control_plane.grants())
        yield from ages(control_plane.credentials(), now=time.time())
        if dial_upstreams:
            for credential in control_plane.credentials():
                yield from _upstreams(credential, stack)


def keks(listed: list[Json]) -> Iterator[Check]:
    """Of the running ring: what is missing from it, and what does not answer."""
    troubled = [kek for kek in listed if kek["problem"]]
    for kek in troubled:
        name = f"{kek['kek_id']} ({kek['provider']} {kek['place']})"
        under = f"{kek['envelopes']} envelopes are under it"
        yield Check(f"key {name}", Health.FAILED, f"{kek['problem']}; {under}", "'coatcheck kek list' shows the ring")
    if not troubled:
        sealing = next((kek["kek_id"] for kek in listed if kek["seals"]), "none")
        yield Check("key ring", Health.OK, f"{sealing} seals, and every key that is needed answers")


def ages(credentials: list[Json], *, now: float) -> Iterator[Check]:
    """Secrets that are older than their schedules let them become."""
    scheduled = [each for each in credentials if each["rotation_due_at"] is not None]
    due = [str(each["name"]) for each in scheduled if each["rotation_due_at"] <= now]
    if due:
        todo = "submit new ones with 'coatcheck credential rotate NAME'; 'coatcheck credential rotation NAME' says more"
        yield Check("age of secrets", Health.WARNING, f"due: {_some(due)}", todo)
    elif scheduled:
        yield Check("age of secrets", Health.OK, f"{len(scheduled)} on a schedule, none due")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _answers(link: str, url: str, todo: str) -> Check:
    try:
        response = httpx.get(url, trust_env=False, timeout=_DIAL_SECONDS)
    except httpx.HTTPError as error:
        return Check(link, Health.FAILED, f"{url} cannot be reached ({type(error).__name__})", todo)
    if response.status_code != httpx.codes.OK:
        why, hint = _refusal_in(response)
        return Check(link, Health.FAILED, f"not ready ({response.status_code} at {url}){why}", hint or todo)
    return Check(link, Health.OK, f"ready at {url.removesuffix('/readyz')}")


def _refusal_in(response: httpx.Response) -> tuple[str, str]:
    """What a problem document says (RFC 9457), and what to do."""
    try:
        problem = response.json()
        return f": {problem['detail']}", str(problem.get("hint") or "")
    except (ValueError, TypeError, KeyError):
        return "", ""


def _proxy_numbers(stack: RunningStack, todo: str) -> Iterator[Check]:
    try:
        metrics = httpx.get(f"{stack.admin_url}/metrics", trust_env=False, timeout=_DIAL_SECONDS).text
    except httpx.HTTPError:
        return
    from control_plane.contract.wire import SILENCE_SECONDS  # slow to import: its messages are compiled

    silence = metric(metrics, "coatcheck_proxy_control_plane_silence_seconds")
    if silence is not None and silence > SILENCE_SECONDS:
        found = f"the proxy has not heard from the control plane for {silence:.0f} s"
        yield Check("event stream", Health.FAILED, found, f"revocations arrive late until it does; {todo}")
    elif silence is not None:
        yield Check("event stream", Health.OK, f"last heard {silence:.1f} s ago")
    spooled = metric(metrics, "coatcheck_proxy_audit_spool_events") or 0
    dropped = metric(metrics, "coatcheck_proxy_audit_events_dropped_total") or 0
    if dropped:
        yield Check("audit spool", Health.FAILED, f"{dropped:.0f} events were lost", todo)
    else:
        yield Check("audit spool", Health.OK, f"{spooled:.0f} events on their way, none lost")
    yield from _certificates(metrics)


def _certificates(metrics: str) -> Iterator[Check]:
    """What the running proxy uses: the first of each source to end."""
    first: dict[str, float] = {}
    for source, seconds in _CERTIFICATE.findall(metrics):
        first[source] = min(first.get(source, float("inf")), float(seconds))
    for source, seconds in sorted(first.items()):
        days = int(seconds // 86_400)
        link = f"certificate ({source.replace('_', ' ')})"
        if seconds <= 0:
            yield Check(link, Health.FAILED, "it has ended", "replace its file; the proxy reads it again by itself")
        elif days < DUE_DAYS:
            yield Check(link, Health.WARNING, f"ends in {days} days", "replace its file; the proxy reads it by itself")
        else:
            yield Check(link, Health.OK, f"ends in {days} days")
    refused = metric(metrics, 'coatcheck_proxy_certificate_reloads_total{outcome="refused"}')
    if refused:
        todo = "the log says which (certificates_refused); the old ones are still used"
        yield Check("certificate files", Health.WARNING, f"{refused:.0f} changes could not be used", todo)


def metric(text: str, name: str) -> float | None:
    """The value of one metric in Prometheus' text format."""
    found = re.search(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.e+-]+)$", text, re.MULTILINE)
    return float(found[1]) if found else None


def _credentials(credentials: list[Json], grants: list[Json]) -> Iterator[Check]:
    if not credentials:
        yield Check("credentials", Health.WARNING, "none stored", "coatcheck credential add NAME --preset P")
        return
    granted = {grant["credential"] for grant in grants}
    unused = [str(each["name"]) for each in credentials if each["name"] not in granted]
    if unused:
        todo = f"coatcheck grant add {unused[0]} --subject local"
        yield Check("credentials", Health.WARNING, f"granted to nobody: {', '.join(unused)}", todo)
    else:
        yield Check("credentials", Health.OK, f"{len(credentials)} stored, each granted to somebody")


def _upstreams(credential: Json, stack: RunningStack) -> Iterator[Check]:
    for destination in credential["destinations"]:
        endpoint = parse_destination(destination["url"]).endpoint
        link = f"upstream {endpoint.url}"
        try:
            with socket.create_connection((endpoint.host, endpoint.port), timeout=_DIAL_SECONDS) as connection:
                if endpoint.scheme == "https":
                    context = ssl.create_default_context()
                    for file in stack.upstream_ca:
                        context.load_verify_locations(file)
                    context.wrap_socket(connection, server_hostname=endpoint.host).close()
        except ssl.SSLError as error:
            todo = "if it has a CA of its own: 'coatcheck down', then 'coatcheck up --upstream-ca FILE'"
            yield Check(link, Health.FAILED, f"its certificate is not trusted ({error.reason})", todo)
        except OSError as error:
            yield Check(
                link, Health.FAILED, f"cannot be reached ({error})", "check its name, and this machine's network"
            )
        else:
            yield Check(link, Health.OK, f"reached for {credential['name']}")


# --- the machine ------------------------------------------------------------------------------------------------------


def _bubblewrap(state: StateFolder) -> Check:
    with TemporaryDirectory(prefix="coatcheck-doctor-") as folder:
        try:
            found = sandbox_for(Path(folder), state_folder=state.home, run_folder=Path(folder))
        except CommandError as error:
            found = str(error)
    if isinstance(found, Sandbox):
        return Check("sandbox", Health.OK, "bubblewrap works")
    todo = "install bubblewrap (Debian: apt-get install bubblewrap) and allow user namespaces"
    return Check("sandbox", Health.WARNING, f"{found}; 'coatcheck run' does not confine CMD", todo)


def _system_roots() -> Check:
    import certifi

    roots = system_roots()
    if roots == Path(certifi.where()):
        todo = "install ca-certificates, so that updates of the system reach CMD"
        return Check("system roots", Health.WARNING, f"this machine has none; using {roots}", todo)
    return Check("system roots", Health.OK, str(roots))


def _shell() -> Iterator[Check]:
    taken_out = [
        name for name in (*PROXY_VARIABLES, "ALL_PROXY", "all_proxy", *CA_FILE_VARIABLES) if os.environ.get(name)
    ]
    if taken_out:
        more = f" and {len(taken_out) - _SHOWN} more" if len(taken_out) > _SHOWN else ""
        found = f"sets {', '.join(taken_out[:_SHOWN])}{more}; 'coatcheck run' gives CMD its own instead"
        yield Check("shell", Health.OK, found)
    settings = [name for name in os.environ if name.startswith("COATCHECK_")]
    if settings:
        todo = "unset them, unless they are meant for 'coatcheck up' and 'coatcheck serve'"
        yield Check("shell", Health.WARNING, f"sets {', '.join(sorted(settings))}", todo)


def _client_settings() -> Iterator[Check]:
    """Settings files that win over variables, which `run` cannot take out."""
    for link, read, todo in (
        ("git settings", _git_settings, "remove them with 'git config --global --unset NAME'"),
        ("curl settings", _curl_settings, "remove them from ~/.curlrc"),
    ):
        found = read()
        if found:
            yield Check(link, Health.WARNING, f"win over what 'run' sets: {', '.join(found)}", todo)


def _git_settings() -> list[str]:
    if shutil.which("git") is None:
        return []
    command = ["git", "config", "--name-only", "--get-regexp", r"^http\.(.*\.)?(proxy|sslcainfo|sslverify)$"]
    return sorted(set(_run(command).split()))


def _curl_settings() -> list[str]:
    text = _text(Path.home() / ".curlrc")
    return sorted(set(re.findall(r"^\s*-{0,2}(proxy|cacert|insecure|noproxy)\b", text, re.MULTILINE)))


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


_MARKS: Final[dict[Health, tuple[str, str]]] = {
    Health.OK: ("ok", "green"),
    Health.WARNING: ("warn", "yellow"),
    Health.FAILED: ("FAIL", "bold red"),
}


def _show(check: Check) -> None:
    mark, style = _MARKS[check.health]
    line = Text(f"{mark:<5}", style=style).append(f"{check.link}: ", style="bold").append(printable(check.found))
    output().print(line, soft_wrap=True)
    if check.todo:
        output().print(Text(f"     → {printable(check.todo)}"), soft_wrap=True)
