"""`--kind` and `--setting name=value`: what a credential of that kind is to know beside its secret.

Rule: a setting is read as its kind has it (a list is given by repeating it, a table as `name.key=value`); what a kind
does not have is said here, before anybody types a secret.
"""

import difflib
from collections.abc import Sequence
from typing import Any

from coatcheck.terminal import WrongUsageError
from control_plane.contract.kinds import CredentialKind


def kind_fields(kind: str | None, settings: Sequence[str]) -> dict[str, Any]:
    """The fields of a new credential's body. Raises `WrongUsageError`."""
    # Looked up late: certificates and their library are not for every command to load.
    from control_plane.core.kinds import InvalidSettingsError, kind_named, settled_settings

    if kind is None:
        if settings:
            raise WrongUsageError("--setting is for a credential of another kind than 'static'; give --kind too")
        return {}
    try:
        named = kind_named(kind)
    except InvalidSettingsError as error:
        raise WrongUsageError(f"--kind is {error}") from None
    given = _settings(named, settings)
    try:
        settled_settings(named, given)
    except InvalidSettingsError as error:
        raise WrongUsageError(f"--setting {error.field}: {error}") from None
    return {"kind": named.value, "settings": given}


def is_a_document(kind: str) -> bool:
    """Whether that kind's secret may have several lines."""
    return kind != CredentialKind.STATIC.value


def _settings(kind: CredentialKind, texts: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    types = {name: each.get("type") or _inner(each) for name, each in _properties(kind).items()}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise WrongUsageError("--setting is name=value, such as token_url=https://auth.example.com/token")
        table, _, key = name.partition(".")
        if table not in types:
            raise WrongUsageError(f"--setting {_unknown(table, kind, list(types))}")
        match types[table]:
            case "array":
                found.setdefault(table, []).append(value)
            case "object" if key:
                found.setdefault(table, {})[key] = value
            case "object":
                raise WrongUsageError(f"--setting {table} is a table: give {table}.key=value")
            case "integer":
                found[table] = _integer(table, value)
            case _:
                found[table] = value
    return found


def _properties(kind: CredentialKind) -> dict[str, Any]:
    from control_plane.core.kinds import KINDS

    properties: dict[str, Any] = KINDS[kind].settings.model_json_schema().get("properties", {})
    return properties


def _inner(schema: dict[str, Any]) -> str | None:
    """What it is where it may be left out."""
    return next((each.get("type") for each in schema.get("anyOf", ()) if each.get("type") != "null"), None)


def _integer(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise WrongUsageError(f"--setting {name} is a whole number")
    return int(text)


def _unknown(name: str, kind: CredentialKind, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"is not one that a '{kind}' has; did you mean '{close[0]}'?"
    return f"is not one that a '{kind}' has: {', '.join(known) or 'it has none'}"
