"""`coatcheck credential …`: store, look at, rotate and delete credentials. Their secrets go in and never come out."""

import difflib
import re
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from coatcheck.client import Json
from coatcheck.environment import why_not_a_variable
from coatcheck.kinds import is_a_document, kind_fields
from coatcheck.rotation import read_probe, rotate, rotation
from coatcheck.secret_input import read_secret
from coatcheck.stack import control_plane_of
from coatcheck.state import SUBJECT
from coatcheck.terminal import (
    CommandError,
    WrongUsageError,
    done,
    invocation,
    listing,
    local_time,
    show_fields,
    show_json,
    show_table,
)
from control_plane.contract.destination import (
    FLAGS,
    InvalidDestinationError,
    destination_from_json,
    destination_to_json,
)
from control_plane.contract.placement import (
    BEARER,
    SECRET_FIELD,
    BasicPlacement,
    HeaderPlacement,
    InvalidPlacementError,
    PathPlacement,
    Placement,
    QueryPlacement,
    placement_from_json,
    placement_to_json,
)

_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")

app = typer.Typer(help="Store, rotate, delete. Secrets go in and never out.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
SecretFile = Annotated[
    Path | None,
    typer.Option("--secret-file", metavar="FILE", help="Read the secret from a file ('-': standard input)."),
]
ProbeRequest = Annotated[
    str | None,
    typer.Option(metavar="'GET /path'", help="A request that costs nothing, to try new secrets with."),
]


@app.command("add")
def add(
    context: typer.Context,
    name: Name,
    preset: Annotated[str | None, typer.Option(help="A provider we know (see 'credential presets').")] = None,
    destination: Annotated[
        list[str] | None, typer.Option(metavar="URL", help=r"https://host\[:port]\[/prefix]. Repeatable.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="'Name: format'", help="Such as 'X-Api-Key: {secret}'. Repeatable.")
    ] = None,
    basic: Annotated[
        list[str] | None, typer.Option(metavar="USER", help="HTTP Basic with this user. Repeatable.")
    ] = None,
    query: Annotated[list[str] | None, typer.Option(metavar="PARAM", help="A query parameter. Repeatable.")] = None,
    path: Annotated[
        list[str] | None,
        typer.Option(metavar="FORMAT", help="A whole path segment, such as 'bot{secret}'. Repeatable."),
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="VAR", help="Variable that CMD gets the placeholder in. Repeatable.")
    ] = None,
    allow_private: Annotated[
        bool, typer.Option("--allow-private", help="These destinations may be private or loopback addresses.")
    ] = False,
    websocket: Annotated[
        bool, typer.Option("--websocket", help="Requests may become WebSockets, whose frames are not searched.")
    ] = False,
    ranges: Annotated[
        bool, typer.Option("--ranges", help="Requests may ask for a part (Range); a secret in parts is not found.")
    ] = False,
    unsearchable: Annotated[
        bool, typer.Option("--unsearchable", help="Compressed replies pass, although they cannot be searched.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse requests to these destinations under any key but ours.")
    ] = False,
    ca: Annotated[
        Path | None, typer.Option("--ca", metavar="FILE", help="The CA of these destinations, trusted alone (PEM).")
    ] = None,
    required: Annotated[
        bool, typer.Option("--required", help="Refuse requests to these destinations that do not use the credential.")
    ] = False,
    kind: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="What the secret is: static, oauth_refresh_token, … (docs/kinds.md)."),
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="What the kind needs to know. Repeatable.")
    ] = None,
    max_stale_seconds: Annotated[
        float, typer.Option(metavar="N", min=0, help="How long a value may bridge an outage of where it comes from.")
    ] = 0.0,
    allow_direct: Annotated[
        bool, typer.Option("--allow-direct", help="Direct mode may hand the secret itself out (docs/exchange.md).")
    ] = False,
    probe_request: ProbeRequest = None,
    source: Annotated[
        str | None, typer.Option(metavar="S", help="Do not store the secret: read it from this source, and follow it.")
    ] = None,
    source_name: Annotated[str | None, typer.Option(metavar="N", help="Its name in that source.")] = None,
    secret_file: SecretFile = None,
) -> None:
    """Store a credential. Its secret is typed unseen, piped in, or read from a file or a source."""
    if (source is None) != (source_name is None):
        raise WrongUsageError("--source and --source-name come together")
    if source is not None and secret_file is not None:
        raise WrongUsageError("a secret is read from --source or from --secret-file, not from both")
    if preset is None and not destination:
        raise WrongUsageError("a credential needs a place to go; give --destination https://host, or --preset P")
    traits: Json = {
        "allow_private": allow_private,
        "websocket": websocket,
        "ranges": ranges,
        "unsearchable": unsearchable,
        "strict": strict,
        "ca_pem": _ca_pem(ca),
    }
    named = [name.replace("_", "-").removesuffix("-pem") for name, given in traits.items() if given]
    if named and not destination:
        raise WrongUsageError(f"--{named[0]} is for the destinations you name; give --destination too")
    if not _NAME.fullmatch(name):
        # Not repeated: whoever takes NAME for the place of the secret has typed it there.
        raise WrongUsageError(
            "what stands for NAME is no credential name; use up to 40 lower-case letters, digits and hyphens"
        )
    for variable in env or []:
        if why := why_not_a_variable(variable):
            raise WrongUsageError(f"--env: {why}; choose another")
    fields: dict[str, Any] = {"name": name} | kind_fields(kind, setting or [])
    if max_stale_seconds:
        fields["max_stale_seconds"] = max_stale_seconds
    if preset is not None:
        fields["preset"] = preset
    if destination:
        fields["destinations"] = [_destination(url, traits) for url in destination]
    placements = read_placements(header=header, basic=basic, query=query, path=path)
    if placements or preset is None:
        fields["placements"] = [placement_to_json(placement) for placement in placements or [BEARER]]
    if env or preset is None:
        fields["variables"] = env or [default_variable(name)]
    if required:
        fields["credential_required"] = True
    if allow_direct:
        fields["allow_direct"] = True
    if probe_request is not None:
        fields["probe"] = read_probe(probe_request)
    with control_plane_of(context) as control_plane:
        if preset is not None:
            _require_preset(preset, [str(each["id"]) for each in control_plane.presets()])
        secret = None
        if source is None:
            secret = read_secret(secret_file, credential=name, is_a_document=is_a_document(kind or "static"))
        else:
            fields["secret_source"] = {"source": source, "name": source_name}
        credential = control_plane.add_credential(fields, secret)
        grant = control_plane.add_grant({"credential": name, "subject": SUBJECT})
    if invocation(context).as_json:
        show_json({**credential, "grant": grant})
        return
    done(f"stored {name} for {listing(each['url'] for each in credential['destinations'])}")
    done(f"granted to the local subject '{SUBJECT}'; withdraw it with 'coatcheck grant delete {grant['id']}'")
    if credential["variables"]:
        done(f"'coatcheck run -- CMD' gives CMD its placeholder in {listing(credential['variables'])}")


@app.command("list")
def list_(context: typer.Context) -> None:
    """Every credential: names and places, never a secret."""
    with control_plane_of(context) as control_plane:
        credentials = control_plane.credentials()
    if invocation(context).as_json:
        show_json(credentials)
        return
    show_table(
        ["NAME", "DESTINATIONS", "PLACED IN", "VARIABLES", "VERSION", "AGE", "DUE", "UPDATED"],
        [
            (
                each["name"],
                listing(destination["url"] for destination in each["destinations"]),
                listing(describe_placement(placement) for placement in each["placements"]),
                listing(each["variables"]),
                each["current_version"],
                age_in_words(each["rotated_at"], now=time.time()),
                local_time(each["rotation_due_at"]),
                local_time(each["updated_at"]),
            )
            for each in credentials
        ],
        nothing="no credentials; store one with 'coatcheck credential add NAME --preset P'",
    )


@app.command("show")
def show(context: typer.Context, name: Name) -> None:
    """One credential with its versions, never its secret."""
    with control_plane_of(context) as control_plane:
        credential = control_plane.credential(name)
        grants = [grant for grant in control_plane.grants() if grant["credential"] == name]
    if invocation(context).as_json:
        show_json(credential)
        return
    show_fields(_fields(credential, grants))


@app.command("change")
def change(
    context: typer.Context,
    name: Name,
    allow_direct: Annotated[
        bool | None, typer.Option("--allow-direct/--no-allow-direct", help="Whether direct mode may hand it out.")
    ] = None,
    required: Annotated[
        bool | None, typer.Option("--required/--no-required", help="Whether requests without it are refused.")
    ] = None,
    probe_request: ProbeRequest = None,
    no_probe: Annotated[bool, typer.Option("--no-probe", help="It has no probe of its own any more.")] = False,
    env: Annotated[
        list[str] | None, typer.Option(metavar="VAR", help="Its variables, in place of all old ones. Repeatable.")
    ] = None,
    max_stale_seconds: Annotated[
        float | None, typer.Option(metavar="N", min=0, help="How long a value may bridge an outage.")
    ] = None,
    secret_file: SecretFile = None,
) -> None:
    """Change what is named; the rest stays. By what the secret could reach more needs it again, with --secret-file."""
    if no_probe and probe_request is not None:
        raise WrongUsageError("--probe-request gives it a probe and --no-probe takes it away; one of the two")
    for variable in env or []:
        if why := why_not_a_variable(variable):
            raise WrongUsageError(f"--env: {why}; choose another")
    given = {
        "allow_direct": allow_direct,
        "credential_required": required,
        "probe": read_probe(probe_request) if probe_request is not None else None,
        "variables": env or None,
        "max_stale_seconds": max_stale_seconds,
    }
    fields: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    if no_probe:
        fields["probe"] = None
    if not fields and secret_file is None:
        raise WrongUsageError("name what to change; see 'coatcheck credential change --help'")
    with control_plane_of(context) as control_plane:
        secret = None
        if secret_file is not None:
            kind = str(control_plane.credential(name)["kind"])
            secret = read_secret(secret_file, credential=name, is_a_document=is_a_document(kind))
        changed = control_plane.change_credential(name, fields, secret)
    if invocation(context).as_json:
        show_json(changed)
        return
    done(f"changed {name}; it is at version {changed['current_version']}")


app.command("rotate")(rotate)
app.command("rotation")(rotation)


@app.command("delete")
def delete(context: typer.Context, name: Name) -> None:
    """Delete a credential with its grants; its placeholders are refused from now on."""
    with control_plane_of(context) as control_plane:
        control_plane.delete_credential(name)
    done(f"deleted {name}; its grants and placeholders are gone with it")


@app.command("presets")
def presets(context: typer.Context) -> None:
    """The providers that --preset knows."""
    with control_plane_of(context) as control_plane:
        items = control_plane.presets()
    if invocation(context).as_json:
        show_json(items)
        return
    show_table(
        ["PRESET", "PROVIDER", "DESTINATIONS", "VARIABLES"],
        [
            (
                each["id"],
                each["title"],
                listing(each["destinations"]) or "name it with --destination",
                listing(each["variables"]),
            )
            for each in items
        ],
        nothing="no presets",
    )


def age_in_words(since: float | None, *, now: float) -> str:
    """How old the secret in use is. Empty: none is in use."""
    if since is None:
        return ""
    hours = max(0, int(now - since)) // 3600
    return f"{hours // 24} d" if hours >= 48 else f"{hours} h"


def default_variable(name: str) -> str:
    """`my-service` → `MY_SERVICE_API_KEY`."""
    variable = name.upper().replace("-", "_") + "_API_KEY"
    return f"_{variable}" if variable[0].isdigit() else variable


def describe_placement(placement: Json) -> str:
    match placement_from_json(placement):
        case HeaderPlacement(name=name, format=format_):
            return f"{name}: {format_}"
        case BasicPlacement(username=username):
            return f"basic {username}"
        case QueryPlacement(parameter=parameter):
            return f"?{parameter}="
        case PathPlacement(format=format_):
            return f"/{format_}/"


def _fields(credential: Json, grants: list[Json]) -> list[tuple[str, object]]:
    destinations = [
        each["url"]
        + (f" ({' '.join(each['methods'])})" if each.get("methods") else "")
        + (" (may be private)" if each.get("allow_private") else "")
        + "".join(f" ({name})" for name in FLAGS if each.get(name))
        + (" (own CA)" if each.get("ca_pem") else "")
        for each in credential["destinations"]
    ]
    return [
        ("name", credential["name"]),
        ("id", credential["id"]),
        ("kind", credential["kind"]),
        *_settings(credential),
        ("preset", credential["preset"]),
        ("destinations", listing(destinations)),
        ("placed in", listing(describe_placement(placement) for placement in credential["placements"])),
        ("variables", listing(credential["variables"])),
        ("direct", "direct mode may hand it out" if credential["allow_direct"] else ""),
        ("probe", " ".join(credential["probe"].values()) if credential["probe"] else ""),
        ("required", "no request without it" if credential["credential_required"] else ""),
        (
            "granted to",
            listing(f"{each.get('subject') or 'role ' + str(each.get('role'))}" for each in grants) or "nobody",
        ),
        (
            "versions",
            listing(
                f"{each['version']} {each['state']} {local_time(each['created_at'])}" for each in credential["versions"]
            ),
        ),
        ("created", local_time(credential["created_at"])),
        ("updated", local_time(credential["updated_at"])),
    ]


def _settings(credential: Json) -> list[tuple[str, object]]:
    """What its kind knows, and what its provider said last."""
    shown: list[tuple[str, object]] = [
        (name, listing(map(str, value)) if isinstance(value, list) else value)
        for name, value in credential["settings"].items()
    ]
    minted = credential.get("minted")
    if minted:
        end = f", until {local_time(minted['expires_at'])}" if minted["expires_at"] else ""
        shown.append(("minted", f"{minted['state']}{end}"))
        if minted["detail"]:
            shown.append(("", f"{minted['detail']}; {minted['hint']}"))
    return shown


def _destination(url: str, traits: Json) -> Json:
    try:
        return destination_to_json(destination_from_json({"url": url, **traits}))
    except InvalidDestinationError as error:
        raise WrongUsageError(f"--destination: {error}") from None  # the URL may hold a password


def _ca_pem(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        raise WrongUsageError(f"--ca: cannot read PEM certificates from {file}") from None


def _require_preset(preset: str, known: list[str]) -> None:
    if preset not in known:
        close = difflib.get_close_matches(preset, known, n=1)
        todo = f"did you mean '{close[0]}'?" if close else "see 'coatcheck credential presets'"
        raise CommandError("there is no preset of that name", todo)


def read_placements(
    *, header: list[str] | None, basic: list[str] | None, query: list[str] | None, path: list[str] | None
) -> list[Placement]:
    """As the options of those names say. Raises `WrongUsageError`."""
    return [
        *map(_header, header or []),
        *map(_basic, basic or []),
        *map(_query, query or []),
        *map(_path, path or []),
    ]


def _header(text: str) -> Placement:
    name, colon, value_format = text.partition(":")
    if not colon or SECRET_FIELD not in value_format:
        raise WrongUsageError("--header is 'Name: format with {secret}', such as 'X-Api-Key: {secret}'")
    return _placement(kind="header", name=name.strip().lower(), format=value_format.strip())


def _basic(username: str) -> Placement:
    return _placement(kind="basic", username=username)


def _path(value_format: str) -> Placement:
    return _placement(kind="path", format=value_format)


def _query(parameter: str) -> Placement:
    return _placement(kind="query", parameter=parameter)


def _placement(**fields: str) -> Placement:
    try:
        return placement_from_json(fields)
    except InvalidPlacementError as error:
        raise WrongUsageError(str(error)) from None
