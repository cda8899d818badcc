"""`coatcheck credential rotate` and `rotation`: a new secret goes live step by step, and is watched meanwhile.

Rule: a rotation is the control plane's and goes on without whoever watches it: Ctrl-C ends the watching alone. What is
watched goes to standard error, a line a step where that is no terminal; with --json, a JSON line a step to standard
output. Exit status 1 where the new version did not go live.
"""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.status import Status

from coatcheck.client import ControlPlane, Json
from coatcheck.kinds import is_a_document
from coatcheck.secret_input import read_secret
from coatcheck.stack import control_plane_of
from coatcheck.terminal import (
    CommandError,
    WrongUsageError,
    done,
    invocation,
    listing,
    local_time,
    messages,
    show_fields,
    show_json,
    show_json_line,
)
from coatcheck.times import seconds_of

LOOK_SECONDS: Final = 1.0
_METHOD_AND_PATH: Final = re.compile(r"(GET|HEAD|POST) (/\S*)")
_PERCENT: Final = re.compile(r"([0-9]{1,2})%?")
_IN_WORDS: Final = {
    "probing": "version {new} is being tried against its upstream",
    "canary": "{canary}% of the subjects use version {new}, the others version {old}",
    "overlap": "everybody uses version {new}; version {old} is kept, to go back to",
    "completed": "version {new} is in use; placeholders in use stay the same",
    "rolled_back": "version {old} is in use again",
    "cancelled": "version {new} was thrown away",
    "overtaken": "something else took its place",
}
_WENT_WELL: Final = frozenset({"completed", "overlap", "canary", "probing"})

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
SecretFile = Annotated[
    Path | None,
    typer.Option("--secret-file", metavar="FILE", help="Read the secret from a file ('-': standard input)."),
]


def rotate(
    context: typer.Context,
    name: Name,
    secret_file: SecretFile = None,
    compromised: Annotated[
        bool, typer.Option("--compromised", help="The old secret leaked: at once, and cut open streams that use it.")
    ] = False,
    no_successor: Annotated[
        bool, typer.Option("--no-successor", help="With --compromised: stop the old one now, without a new one.")
    ] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Try the new secret against its upstream before anybody uses it.")
    ] = False,
    probe_request: Annotated[
        str | None,
        typer.Option("--probe-request", metavar="'GET /path'", help="With this request; it stays with the credential."),
    ] = None,
    proceed_if_unknown: Annotated[
        bool, typer.Option("--proceed-if-unknown", help="Go on also where the probe gets neither a yes nor a no.")
    ] = False,
    canary: Annotated[
        str | None, typer.Option(metavar="10%", help="This share of subjects uses the new secret first.")
    ] = None,
    canary_for: Annotated[str | None, typer.Option(metavar="10m", help="For so long.")] = None,
    overlap: Annotated[
        str | None, typer.Option(metavar="1h", help="Keep the old secret for so long, to go back to by itself.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="90d", help="Rotate nothing now; say how old the secret may become ('off': any age)."),
    ] = None,
    remind: Annotated[
        str | None, typer.Option(metavar="7d", help="With --schedule: remind so long before. Default: a tenth of it.")
    ] = None,
    hook: Annotated[
        str | None,
        typer.Option(metavar="URL|aws_iam", help="With --schedule: who makes new secrets. Otherwise people do."),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Begin it, and do not watch.")] = False,
) -> None:
    """Replace a credential's secret. Placeholders stay the same; streams that are open finish on the old one."""
    options = _options(
        compromised=compromised,
        probe=_probe(probe, probe_request),
        proceed_if_unknown=proceed_if_unknown,
        canary=canary,
        canary_for=canary_for,
        overlap=overlap,
    )
    if no_successor and not compromised:
        raise WrongUsageError("--no-successor goes with --compromised")
    if schedule is None and (remind or hook):
        raise WrongUsageError("--remind and --hook go with --schedule")
    as_json = invocation(context).as_json
    with control_plane_of(context) as control_plane:
        if schedule is not None:
            _schedule(control_plane, name, schedule, remind=remind, hook=hook, options=options, as_json=as_json)
            return
        seen = control_plane.credential(name)  # before anybody types a secret for nothing
        if not no_successor:
            is_document = is_a_document(seen["kind"])
            options["secret"] = read_secret(secret_file, credential=name, is_a_document=is_document).reveal()
        if not compromised:
            options["if_version"] = seen["current_version"]
        with _waiting("trying the new secret") if probe or probe_request else _waiting(""):
            credential = control_plane.rotate(name, options)
        rotation = credential["rotation"]
        if no_successor:
            _say_stopped(credential, as_json=as_json)
        elif compromised or (not rotation["running"] and rotation["phase"] == "completed"):
            _say_rotated(credential, as_json=as_json)
        else:
            _watch(control_plane, name, as_json=as_json, detach=detach)


def rotation(
    context: typer.Context,
    name: Name,
    promote: Annotated[
        bool, typer.Option("--promote", help="The next step, now: a canary goes live, an overlap ends.")
    ] = False,
    roll_back: Annotated[bool, typer.Option("--roll-back", help="Go back to the old secret.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Throw the new secret away before it goes live.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Watch it until it ends.")] = False,
) -> None:
    """Where a credential's rotation is, or how the last one ended; or help it on, or take it back."""
    verbs = [verb for verb, asked in (("promote", promote), ("rollback", roll_back), ("cancel", cancel)) if asked]
    if len(verbs) > 1:
        raise WrongUsageError("--promote, --roll-back and --cancel exclude each other")
    as_json = invocation(context).as_json
    with control_plane_of(context) as control_plane:
        for verb in verbs:
            control_plane.help_rotation(name, verb)
        if watch:
            _watch(control_plane, name, as_json=as_json, detach=False)
            return
        state, schedule = control_plane.rotation(name), control_plane.rotation_schedule(name)
    if as_json:
        show_json({**state, "schedule": schedule})
        return
    if state["rotation"] is None and schedule is None:
        done(f"{name} was never rotated, and has no schedule")
        return
    show_fields([*_fields(state), *_schedule_fields(schedule)])


# --- watching ---------------------------------------------------------------------------------------------------------


def _watch(control_plane: ControlPlane, name: str, *, as_json: bool, detach: bool) -> None:
    """Until it ends. Raises `CommandError` where the new version did not go live."""
    last: Json = {}
    shown = ""
    try:
        with _waiting("") as status:
            for state in _states(control_plane, name):
                last = state["rotation"] or {}
                if not last:
                    raise CommandError(f"{name} was never rotated", "rotate it with 'coatcheck credential rotate'")
                step = f"{last['id']} {last['phase']} {last['probe']}"
                if step != shown:
                    shown = step
                    show_json_line(state) if as_json else done(_sentence(last))
                if status is not None:
                    status.update(_counts(state))
                if detach or not last["running"]:
                    break
    except KeyboardInterrupt:
        done(f"it goes on by itself; look again with 'coatcheck credential rotation {name}'")
        return
    if last["phase"] not in _WENT_WELL:
        raise CommandError(f"the new secret of {name} is not in use: {last['reason'] or last['phase']}", _todo(last))


def _states(control_plane: ControlPlane, name: str) -> Iterator[Json]:
    while True:
        yield control_plane.rotation(name)
        time.sleep(LOOK_SECONDS)


@contextmanager
def _waiting(doing: str) -> Iterator[Status | None]:
    """A line that moves, where somebody looks at a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with Status(doing, console=messages()) as status:
        yield status


def _sentence(rotation: Json) -> str:
    said = _IN_WORDS[rotation["phase"]].format(
        new=rotation["new_version"], old=rotation["old_version"] or "none", canary=rotation["canary_percent"]
    )
    if rotation["probe"] is not None:
        said += f"; probe {rotation['probe']}: {rotation['probe_detail']}"
    if rotation["ends_at"] is not None:
        said += f"; until {local_time(rotation['ends_at'])}"
    return f"{said}; {rotation['reason']}" if rotation["reason"] else said


def _counts(state: Json) -> str:
    return "; ".join(_replies(each) for each in state["replies"]) or "no replies yet"


def _replies(each: Json) -> str:
    return (
        f"version {each['version']}: {each['replies']} replies, {each['authentication_errors']} of them "
        f"authentication errors, of {each['failing_subjects']} subjects"
    )


def _todo(rotation: Json) -> str:
    if rotation["probe"] == "unknown":
        return "see whether the proxy and the upstream are up; --proceed-if-unknown goes on without an answer"
    return "the old one is still in use; submit another"


# --- what was asked for ----------------------------------------------------------------------------------------------


def _options(
    *,
    compromised: bool,
    probe: bool | Json,
    proceed_if_unknown: bool,
    canary: str | None,
    canary_for: str | None,
    overlap: str | None,
) -> dict[str, Any]:
    if (canary is None) != (canary_for is None):
        raise WrongUsageError("--canary and --canary-for go together, such as --canary 10% --canary-for 10m")
    if compromised and (probe or canary or overlap):
        raise WrongUsageError("--compromised replaces the secret at once: no --probe, no --canary, no --overlap")
    options: dict[str, Any] = {"compromised": compromised}
    if probe:
        options |= {"probe": probe, "proceed_if_unknown": proceed_if_unknown}
    if canary is not None and canary_for is not None:
        options["canary_percent"] = _percent(canary)
        options["canary_seconds"] = float(seconds_of(canary_for, option="--canary-for"))
    if overlap is not None:
        options["overlap_seconds"] = float(seconds_of(overlap, option="--overlap"))
    return options


def _probe(asked: bool, request: str | None) -> bool | Json:
    return asked if request is None else read_probe(request)


def read_probe(request: str) -> Json:
    """Raises `WrongUsageError`."""
    found = _METHOD_AND_PATH.fullmatch(request.strip())
    if found is None:
        raise WrongUsageError("--probe-request is a method and a path, such as 'GET /v1/models'")
    return {"method": found[1], "path": found[2]}


def _percent(text: str) -> int:
    found = _PERCENT.fullmatch(text.strip())
    if found is None or not int(found[1]):
        raise WrongUsageError("--canary is a share of the subjects from 1% to 99%")
    return int(found[1])


def _schedule(
    control_plane: ControlPlane,
    name: str,
    every: str,
    *,
    remind: str | None,
    hook: str | None,
    options: dict[str, Any],
    as_json: bool,
) -> None:
    if every == "off":
        control_plane.remove_rotation_schedule(name)
        done(f"{name} may become as old as it likes")
        return
    if isinstance(options.get("probe"), dict):
        raise WrongUsageError(
            "a schedule tries secrets by the credential's own probe: declare it with credential change"
        )
    seconds = float(seconds_of(every, option="--schedule"))
    fields = {name: value for name, value in options.items() if name != "compromised"}
    fields |= {
        "every_seconds": seconds,
        "remind_seconds": float(seconds_of(remind, option="--remind")) if remind is not None else seconds / 10,
        "hook": _hook(hook),
    }
    schedule = control_plane.schedule_rotation(name, fields)
    if as_json:
        show_json(schedule)
        return
    who = "its hook makes a new one" if schedule["hook"] else "somebody is reminded"
    done(f"the secret of {name} is due {local_time(schedule['due_at']) or 'once there is one'}; then {who}")


def _hook(text: str | None) -> Json | None:
    if text is None:
        return None
    return {"kind": "aws_iam"} if text == "aws_iam" else {"kind": "http", "url": text}


# --- what is shown ----------------------------------------------------------------------------------------------------


def _say_rotated(credential: Json, *, as_json: bool) -> None:
    if as_json:
        show_json(credential)
        return
    rotation, name = credential["rotation"] or {}, credential["name"]
    if rotation.get("probe"):
        done(f"probe {rotation['probe']}: {rotation['probe_detail']}")
    done(f"{name} is at version {credential['current_version']}; placeholders in use stay the same")


def _say_stopped(credential: Json, *, as_json: bool) -> None:
    if as_json:
        show_json(credential)
        return
    name = credential["name"]
    if any(version["state"] == "active" for version in credential["versions"]):
        done(f"{name} is at version {credential['current_version']}, which was waiting; the one before is revoked")
        return
    done(f"nothing of {name} is in use any more; submit a new secret with 'coatcheck credential rotate {name}'")


def _fields(state: Json) -> list[tuple[str, object]]:
    rotation = state["rotation"]
    if rotation is None:
        return [("rotation", "never")]
    return [
        ("rotation", rotation["id"]),
        ("step", rotation["phase"].replace("_", " ") + ("" if rotation["running"] else " (over)")),
        ("versions", f"{rotation['old_version'] or 'none'} → {rotation['new_version']}"),
        ("canary", f"{rotation['canary_percent']}% of subjects" if rotation["canary_percent"] else ""),
        ("probe", f"{rotation['probe']}: {rotation['probe_detail']}" if rotation["probe"] else ""),
        ("replies", listing(_replies(each) for each in state["replies"])),
        ("began", f"{local_time(rotation['started_at'])}, by {rotation['started_by']}"),
        ("since", local_time(rotation["since"])),
        ("ends", local_time(rotation["ends_at"])),
        ("reason", rotation["reason"]),
    ]


def _schedule_fields(schedule: Json | None) -> list[tuple[str, object]]:
    if schedule is None:
        return [("schedule", "none")]
    return [
        ("schedule", f"every {schedule['every_seconds'] / 86_400:g} days"),
        ("due", local_time(schedule["due_at"])),
        ("hook", listing((schedule["hook"] or {}).values())),
        ("suspended", schedule["suspended"]),
        ("last failure", schedule["last_failure"]),
    ]
