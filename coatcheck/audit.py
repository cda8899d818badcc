"""`coatcheck audit …`: read the trail, follow it, take it out, check it by its signed chain.

Rule: what is verified is verified here, from an export and public keys, by nothing that the control plane says about
itself. An export does not vouch for its own keys: they come from a file, or from the control plane.
"""

import base64
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from coatcheck.client import ControlPlane, Json
from coatcheck.stack import control_plane_of
from coatcheck.terminal import (
    CommandError,
    WrongUsageError,
    done,
    invocation,
    listing,
    local_time,
    printable,
    show_json,
    show_json_line,
    show_table,
)
from control_plane.core.chain import AuditKey, Finding, Head, Keys, UnreadableLineError, Verification, head_from_line

POLL_SECONDS: Final = 0.5
_COLUMNS: Final = ["TIME", "WHAT", "CODE", "REQUEST", "CREDENTIAL", "WHO", "REQUEST ID"]

app = typer.Typer(help="Read, follow, export and check the audit trail.", no_args_is_help=True)


@app.command("tail")
def tail(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as events come, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the newest to begin with.")] = 20,
) -> None:
    """The newest events of every tenant."""
    as_json = invocation(context).as_json
    with control_plane_of(context) as control_plane:
        last = last_sequence(control_plane)
        newest = list(events(control_plane, after=max(0, last - lines))) if lines else []
        if not follow:
            if as_json:
                show_json(newest)
            else:
                show_table(_COLUMNS, map(_row, newest), nothing="the trail is empty")
            return
        _follow(control_plane, newest, after=int(newest[-1]["sequence"]) if newest else last, as_json=as_json)


@app.command("export")
def export(
    context: typer.Context,
    tenant: Annotated[str | None, typer.Option(metavar="T", help="This tenant's chain alone.")] = None,
    platform: Annotated[bool, typer.Option("--platform", help="The chain of the events of no tenant alone.")] = False,
    after: Annotated[int, typer.Option(min=0, metavar="POSITION", help="Resume one chain behind it.")] = 0,
) -> None:
    """Events with their signed heads, one JSON object a line: it verifies by itself."""
    if after and tenant is None and not platform:
        raise WrongUsageError("--after counts in one chain: name it with --tenant or --platform")
    with control_plane_of(context) as control_plane:
        for of in _chosen(control_plane, tenant, platform=platform):
            for line in control_plane.audit_export(of, after=after):
                sys.stdout.write(line + "\n")


@app.command("head")
def head(
    context: typer.Context,
    tenant: Annotated[str | None, typer.Option(metavar="T", help="This tenant's chain alone.")] = None,
    platform: Annotated[bool, typer.Option("--platform", help="The chain of the events of no tenant alone.")] = False,
) -> None:
    """The newest signed head of each chain. Kept elsewhere, it proves later that nothing before it was changed."""
    with control_plane_of(context) as control_plane:
        for of in _chosen(control_plane, tenant, platform=platform):
            show_json_line(control_plane.audit_head(of))


@app.command("keys")
def keys(context: typer.Context) -> None:
    """The public keys that sign heads, as a JWK set: what an export is verified with."""
    with control_plane_of(context) as control_plane:
        show_json(control_plane.audit_keys())


@app.command("verify")
def verify(
    context: typer.Context,
    tenant: Annotated[str | None, typer.Option(metavar="T", help="This tenant's chain alone.")] = None,
    platform: Annotated[bool, typer.Option("--platform", help="The chain of the events of no tenant alone.")] = False,
    file: Annotated[
        list[Path] | None,
        typer.Option(metavar="F", help="An export, instead of the trail itself. Repeatable: parts, in their order."),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="K", help="The public keys ('audit keys'). Default: the control plane's.")
    ] = None,
    head: Annotated[
        list[Path] | None,
        typer.Option(metavar="H", help="Signed heads from earlier ('audit head'): the trail must lead through them."),
    ] = None,
) -> None:
    """Check the trail for altered, deleted, reordered, cut-off and lost events, by its signed chain."""
    known = [one for path in head or [] for one in _heads_in(path)]
    if file and key is not None:
        findings = _findings(_lines_in(file), keys=_keys_in(key), known=known)
    else:
        with control_plane_of(context) as control_plane:
            public = _keys_in(key) if key is not None else _keys_of(control_plane.audit_keys(), "the control plane")
            lines = _lines_in(file) if file else _lines_of(control_plane, tenant, platform=platform)
            findings = _findings(lines, keys=public, known=known)
    if invocation(context).as_json:
        show_json(
            {
                "whole": all(finding.is_whole for finding in findings),
                "chains": [_finding_to_json(finding) for finding in findings],
            }
        )
    else:
        for finding in findings:
            for line in sentences(finding):
                done(line)
        if not known:
            done(CUT_OFF_UNSEEN)
    if not findings:
        raise CommandError("there is nothing to verify", "name an export, or a tenant that has a trail")
    if file and any(finding.problems for finding in findings) and not any(finding.key_ids for finding in findings):
        raise CommandError(
            "no batch of this export is signed by a key that was used to verify it",
            "if another control plane wrote it, give that one's public keys with --key",
        )
    if not all(finding.is_whole for finding in findings):
        raise CommandError("the trail is not whole", "compare it with an export taken earlier")


CUT_OFF_UNSEEN: Final = (
    "not covered: whether the newest events were cut off; keep heads elsewhere ('coatcheck audit head') and give them "
    "with --head"
)


def sentences(finding: Finding) -> Iterator[str]:
    """What was found, for people."""
    whose = f"tenant {finding.tenant}" if finding.tenant is not None else "the platform"
    if finding.first is None:
        yield f"{whose}: no events"
    else:
        yield (
            f"{whose}: {finding.count} events, position {finding.first} to {finding.last}, "
            f"last signed {local_time(finding.chained_at)} by {listing(sorted(finding.key_ids))}"
        )
    if finding.removed:
        yield f"  removed by retention: everything up to position {finding.removed}"
    if finding.earlier:
        yield f"  not in this export: everything up to position {finding.earlier}"
    if finding.unchained:
        yield f"  not signed yet: {finding.unchained} events at the end"
    if finding.lost:
        yield f"  lost: {finding.lost} events were reported as lost before they reached the trail"
    for problem in finding.problems:
        yield f"  PROBLEM: {problem}"
    if finding.is_whole:
        yield "  nothing is altered, missing, added or out of order"


def _finding_to_json(finding: Finding) -> Json:
    return {
        "tenant": finding.tenant,
        "events": finding.count,
        "first": finding.first,
        "last": finding.last,
        "batches": finding.number,
        "head": finding.head,
        "key_ids": sorted(finding.key_ids),
        "removed": finding.removed,
        "earlier": finding.earlier,
        "unchained": finding.unchained,
        "lost": finding.lost,
        "problems": finding.problems,
        "whole": finding.is_whole,
    }


def _findings(lines: Iterator[str], *, keys: Keys, known: list[Head]) -> list[Finding]:
    verification = Verification(keys, known_heads=known)
    try:
        for number, text in enumerate(lines, 1):
            if text.strip():
                verification.read(_object(text, f"line {number}"))
    except UnreadableLineError as error:
        raise CommandError(str(error), "write one with 'coatcheck audit export'") from None
    return list(verification.findings())


def _object(text: str, what: str) -> Json:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    if not isinstance(line, dict):
        raise UnreadableLineError(f"{what} is not a JSON object")
    return line


def _chosen(control_plane: ControlPlane, tenant: str | None, *, platform: bool) -> list[str | None]:
    if tenant is not None and platform:
        raise WrongUsageError("give --tenant or --platform, not both")
    if tenant is not None or platform:
        return [tenant]
    return [chain["tenant"] for chain in control_plane.audit_chains()]


def _lines_of(control_plane: ControlPlane, tenant: str | None, *, platform: bool) -> Iterator[str]:
    for of in _chosen(control_plane, tenant, platform=platform):
        yield from control_plane.audit_export(of)


def _lines_in(files: list[Path]) -> Iterator[str]:
    for file in files:
        try:
            with file.open(encoding="utf-8", errors="replace") as lines:
                yield from lines
        except OSError as error:
            raise CommandError(f"{file} cannot be read ({error.strerror})", "name an export") from None


def _heads_in(file: Path) -> Iterator[Head]:
    """Also of a whole export: its heads are heads."""
    found = False
    for text in _lines_in([file]):
        try:
            line = _object(text, "a line") if text.strip() else {}
            if line.get("kind") in ("head", "resume"):
                found = True
                yield head_from_line(line)
        except UnreadableLineError as error:
            raise CommandError(f"{file}: {error}", "write one with 'coatcheck audit head'") from None
    if not found:
        raise CommandError(f"{file} holds no head", "write one with 'coatcheck audit head'")


def _keys_in(file: Path) -> Keys:
    try:
        return _keys_of(json.loads(file.read_text()), str(file))
    except OSError as error:
        raise CommandError(
            f"{file} cannot be read ({error.strerror})", "write it with 'coatcheck audit keys'"
        ) from None
    except ValueError:
        raise CommandError(f"{file} is not JSON", "write it with 'coatcheck audit keys'") from None


def _keys_of(jwks: Json, where_from: str) -> Keys:
    try:
        found = {
            str(jwk["kid"]): AuditKey(
                Ed25519PublicKey.from_public_bytes(base64.urlsafe_b64decode(jwk["x"] + "==")),
                since=float(jwk.get("in_use_from", 0.0)),
                until=None if jwk.get("in_use_until") is None else float(jwk["in_use_until"]),
            )
            for jwk in jwks["keys"]
            if jwk.get("crv") == "Ed25519"
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        found = {}
    if not found:
        raise CommandError(f"{where_from} holds no public key", "write them with 'coatcheck audit keys'")
    return found


def events(control_plane: ControlPlane, *, after: int = 0) -> Iterator[Json]:
    """Every event from there on, oldest first, fetched page by page."""
    while page := control_plane.audit_page(after=after):
        yield from page
        after = int(page[-1]["sequence"])


def last_sequence(control_plane: ControlPlane) -> int:
    """The newest event's sequence (0: none), found by halving: the API only reads forwards."""
    beyond = 1
    while control_plane.audit_page(after=beyond - 1, limit=1):
        beyond *= 2
    low, high = beyond // 2, beyond  # something lies after `low - 1`, nothing after `high - 1`
    while low + 1 < high:
        middle = (low + high) // 2
        if control_plane.audit_page(after=middle - 1, limit=1):
            low = middle
        else:
            high = middle
    return low


def where(event: Json) -> str:
    """The request as people write it: `GET https://host/path`."""
    if not event.get("host"):
        return str(event.get("path") or "")
    scheme, port = event.get("scheme") or "https", event.get("port")
    shown = f":{port}" if port and (scheme, port) not in (("https", 443), ("http", 80)) else ""
    host = f"[{event['host']}]" if ":" in event["host"] else event["host"]
    return f"{event.get('method') or ''} {scheme}://{host}{shown}{event.get('path') or ''}".strip()


def _row(event: Json) -> tuple[object, ...]:
    return (
        local_time(event["at"]),
        event["action"],
        event.get("code") or event.get("status") or "",
        where(event),
        event.get("credential"),
        event.get("subject"),
        event["request_id"],
    )


def _follow(control_plane: ControlPlane, newest: list[Json], *, after: int, as_json: bool) -> None:
    for event in newest:
        _show_line(event, as_json=as_json)
    while True:
        for event in events(control_plane, after=after):
            _show_line(event, as_json=as_json)
            after = int(event["sequence"])
        time.sleep(POLL_SECONDS)


def _show_line(event: Json, *, as_json: bool) -> None:
    if as_json:
        show_json_line(event)
        return
    sys.stdout.write("  ".join(printable(cell) for cell in _row(event) if cell not in (None, "")) + "\n")
    sys.stdout.flush()
