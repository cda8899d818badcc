"""`coatcheck kek …`: the ring of key-encryption keys: what seals, what only opens, what may go."""

import secrets
import time
from typing import Annotated, Any, Final

import typer

from coatcheck.client import Json
from coatcheck.stack import control_plane_of
from coatcheck.state import StateFolder, write_private
from coatcheck.terminal import CommandError, done, invocation, local_time, say, show_fields, show_json, show_table

KEK_BYTES: Final = 32
_POLL_SECONDS: Final = 0.2
_LONGEST_WAIT_SECONDS: Final = 600.0

app = typer.Typer(help="Keys that seal secrets: list, add, re-wrap, retire.", no_args_is_help=True)

KekId = Annotated[str, typer.Argument(metavar="ID", show_default=False)]


@app.command("list")
def list_(context: typer.Context) -> None:
    """Each key, newest first: whether it seals, and how many envelopes are under it."""
    with control_plane_of(context) as control_plane:
        _show(context, control_plane.keks())


@app.command("add")
def add(context: typer.Context) -> None:
    """Make a new key file in the local stack's state folder. It seals from now on; the older ones open."""
    state = StateFolder(invocation(context).home)
    with control_plane_of(context) as control_plane:
        newest = max((int(file.stem) for file in state.kek_files if file.stem.isdigit()), default=0)
        file = state.home / "kek" / f"{newest + 1}.hex"
        write_private(file, secrets.token_bytes(KEK_BYTES).hex() + "\n")
        keks = control_plane.reload_keks()
    if invocation(context).as_json:
        show_json(keks)
        return
    done(f"made {file}; keep a copy somewhere safe")
    say("bring what is sealed already under it with 'coatcheck kek rewrap'")


@app.command("reload")
def reload(context: typer.Context) -> None:
    """Read the settings' key files again now, instead of within ten seconds."""
    with control_plane_of(context) as control_plane:
        _show(context, control_plane.reload_keks())


@app.command("rewrap")
def rewrap(
    context: typer.Context,
    status: Annotated[bool, typer.Option("--status", help="Only say how far it is.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Begin, and do not wait for the end.")] = False,
) -> None:
    """Bring every envelope under the key that seals. Secrets stay closed."""
    with control_plane_of(context) as control_plane:
        rewrap = control_plane.rewrap_status() if status else control_plane.start_rewrap()
        deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
        while not (status or detach) and rewrap["state"] == "running" and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            rewrap = control_plane.rewrap_status()
    if invocation(context).as_json:
        show_json(rewrap)
    else:
        show_fields(_fields(rewrap).items())
    if rewrap["state"] == "done" and rewrap["unopenable"]:
        raise CommandError(
            f"{rewrap['unopenable']} envelopes do not open and stayed as they are",
            "rotate or delete what is named above",
        )


@app.command("retire")
def retire(
    context: typer.Context,
    kek_id: KekId,
    abandon: Annotated[
        bool, typer.Option("--abandon", help="The key is lost: give up the secrets under it that do not open.")
    ] = False,
) -> None:
    """Take a key out of use. Refused while envelopes are under it."""
    with control_plane_of(context) as control_plane:
        control_plane.retire_kek(kek_id, abandon=abandon)
    done(f"retired {kek_id}; its file may be taken away, kept somewhere safe for backups that are under it")


def _show(context: typer.Context, keks: list[Json]) -> None:
    if invocation(context).as_json:
        show_json(keks)
        return
    show_table(
        ["ID", "WHERE", "STATE", "ENVELOPES", "FIRST SEEN"],
        [
            (
                kek["kek_id"],
                f"{kek['provider']} {kek['place']}".strip(),
                _state(kek),
                kek["envelopes"],
                local_time(kek["first_seen_at"]) if kek["first_seen_at"] else "",
            )
            for kek in keks
        ],
        nothing="no key-encryption keys",
    )
    for kek in keks:
        if kek["problem"]:
            say(f"{kek['kek_id']}: {kek['problem']}")


def _state(kek: Json) -> str:
    if kek["retired_at"]:
        return "retired"
    if kek["seals"]:
        return "seals"
    if kek["in_ring"] and kek["seals_from"]:
        return f"opens; seals from {local_time(kek['seals_from'])}"
    if kek["in_ring"]:
        return "opens"
    return "missing" if kek["envelopes"] else "gone"


def _fields(rewrap: Json) -> dict[str, Any]:
    fields = {
        "state": rewrap["state"],
        "under": rewrap["target"],
        "re-wrapped": f"{rewrap['rewrapped']} of {rewrap['total']}",
        "remaining": rewrap["remaining"],
        "do not open": rewrap["unopenable"],
        "begun": local_time(rewrap["started_at"]),
    }
    if rewrap["unopenable_names"]:
        fields["named"] = ", ".join(rewrap["unopenable_names"])
    return fields
