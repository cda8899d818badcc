"""Rows to records and back. Columns and fields have the same names; the table below lists the few that change form.

Rule: a row that cannot be read (it was edited by hand) is an error of that row alone.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any, TypeVar

import structlog
from pydantic import TypeAdapter

from control_plane.contract.destination import destination_from_json, destination_to_json
from control_plane.contract.placement import placement_from_json, placement_to_json
from control_plane.contract.wire import Measure
from control_plane.core.alarms import Alarm, AlarmKind
from control_plane.core.client_proofs import ClientProofs
from control_plane.core.delegation import Party
from control_plane.core.records import (
    Client,
    ClientKind,
    ClientSource,
    CredentialVersion,
    KeyPurpose,
    Limit,
    MintedValue,
    MintingState,
    OwnKey,
    ProbeResult,
    Rotation,
    RotationPhase,
    Source,
    SourceKind,
    Token,
    TokenKind,
    VersionState,
)
from control_plane.ports import UnreadableRowError

R = TypeVar("R")
Reader = Callable[[Any], Any]

_log = structlog.get_logger("control_plane.store")

_SETS: Reader = lambda value: None if value is None else frozenset(value)  # noqa: E731 (one of a table)

_PROOFS = TypeAdapter(ClientProofs)

_READ: Mapping[str, Reader] = {
    "proofs": _PROOFS.validate_python,
    "destinations": lambda value: tuple(destination_from_json(item) for item in value),
    "placements": lambda value: tuple(placement_from_json(item) for item in value),
    "act": lambda value: tuple(Party.from_claim(item) for item in value),
    "roles": tuple,
    "scopes": tuple,
    "variables": tuple,
    "tenants": lambda value: None if value is None else tuple(value),
    "methods": _SETS,
    "path_prefixes": _SETS,
}

_ENUMS: Mapping[tuple[type, str], type[StrEnum]] = {
    (Client, "kind"): ClientKind,
    (Client, "source"): ClientSource,
    (CredentialVersion, "state"): VersionState,
    (MintedValue, "state"): MintingState,
    (Token, "kind"): TokenKind,
    (OwnKey, "purpose"): KeyPurpose,
    (Alarm, "kind"): AlarmKind,
    (Limit, "measure"): Measure,
    (Rotation, "phase"): RotationPhase,
    (Rotation, "probe_result"): ProbeResult,
    (Source, "kind"): SourceKind,
}

_MAY_BE_NONE: frozenset[str] = frozenset({"probe_result"})

_WRITE: Mapping[str, Reader] = {
    "proofs": lambda value: _PROOFS.dump_python(value, mode="json", exclude_defaults=True),
    "destinations": lambda value: [destination_to_json(item) for item in value],
    "placements": lambda value: [placement_to_json(item) for item in value],
    "settings": dict,
    "hook": lambda value: None if value is None else dict(value),
    "hook_state": dict,
    "secret_source": lambda value: None if value is None else dict(value),
    "act": lambda value: [party.to_claim() for party in value],
    "may_act": lambda value: None if value is None else dict(value),
    "roles": list,
    "scopes": list,
    "variables": list,
    "tenants": lambda value: None if value is None else list(value),
    "methods": lambda value: None if value is None else sorted(value),
    "path_prefixes": lambda value: None if value is None else sorted(value),
}


def to_record(cls: type[R], row: Mapping[str, Any], *, prefix: str = "") -> R:
    """The row's columns (those that begin with `prefix`) as a record. Raises `UnreadableRowError`."""
    try:
        return cls(*[read(row[prefix + name]) if read else row[prefix + name] for name, read in _readers(cls)])
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UnreadableRowError(f"a stored {cls.__name__} is not readable") from None


def to_records(cls: type[R], rows: Iterable[Mapping[str, Any]], *, prefix: str = "") -> list[R]:
    """Those that can be read; the others are reported and left out."""
    records = []
    for row in rows:
        try:
            records.append(to_record(cls, row, prefix=prefix))
        except UnreadableRowError:
            _log.warning("row_unreadable", record=cls.__name__)
    return records


def to_columns(record: Any) -> dict[str, Any]:
    return {name: _write(name, getattr(record, name)) for name in field_names(type(record))}


def field_names(cls: type) -> tuple[str, ...]:
    names = _FIELDS.get(cls)
    if names is None:
        names = _FIELDS[cls] = tuple(field.name for field in fields(cls))
    return names


_FIELDS: dict[type, tuple[str, ...]] = {}


def _readers(cls: type) -> tuple[tuple[str, Callable[[Any], Any] | None], ...]:
    """Its fields in their order, each with what reads its column; None: it stands there as it is."""
    readers = _READERS.get(cls)
    if readers is None:
        readers = _READERS[cls] = tuple((name, _READ.get(name) or _enum_reader(cls, name)) for name in field_names(cls))
    return readers


_READERS: dict[type, tuple[tuple[str, Callable[[Any], Any] | None], ...]] = {}


def _enum_reader(cls: type, name: str) -> Callable[[Any], Any] | None:
    enum = _ENUMS.get((cls, name))
    if enum is None or name not in _MAY_BE_NONE:
        return enum
    return lambda value: None if value is None else enum(value)


def _write(name: str, value: Any) -> Any:
    if (writer := _WRITE.get(name)) is not None:
        return writer(value)
    return value.value if isinstance(value, StrEnum) else value
