"""Which credential an exchange is for: `audience` and `resource` (RFC 8693 §2.1, RFC 8707) among those granted.

Rule: only granted credentials take part, so that "not yours" and "not there" cannot be told apart. Several fits are an
error, never a guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.contract.destination import (
    Destination,
    InvalidDestinationError,
    parse_destination,
    path_is_within,
    split_authority,
)
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.core.records import Credential


@dataclass(frozen=True, slots=True)
class Target:
    """What was asked for. At least one of the two is there."""

    audience: str | None
    resource: str | None


def choose(granted: Sequence[Credential], target: Target) -> Credential:
    """The one credential that is meant. Raises `RefusedError` (`credential_not_found`, `credential_ambiguous`)."""
    found = list(granted)
    if target.audience is not None:
        found = _by_audience(found, target.audience)
    if target.resource is not None:
        found = _by_url(found, target.resource)
    if not found:
        raise RefusedError(NOT_FOUND)
    if len(found) > 1:
        raise RefusedError(AMBIGUOUS)
    return found[0]


def _by_audience(granted: list[Credential], audience: str) -> list[Credential]:
    for found in (
        [credential for credential in granted if credential.name == audience],
        [credential for credential in granted if credential.preset == audience],
    ):
        if found:
            return found
    return _by_url(granted, audience) if "://" in audience else _by_host(granted, audience)


def _by_host(granted: list[Credential], authority: str) -> list[Credential]:
    try:
        host, port = split_authority(authority, default_port=0)
    except InvalidDestinationError:
        return []
    return [
        credential
        for credential in granted
        if any(
            destination.endpoint.host == host and port in (0, destination.endpoint.port)
            for destination in credential.destinations
        )
    ]


def _by_url(granted: list[Credential], url: str) -> list[Credential]:
    try:
        asked = parse_destination(url)
    except InvalidDestinationError:
        return []
    return [
        credential
        for credential in granted
        if any(_serves(destination, asked) for destination in credential.destinations)
    ]


def _serves(destination: Destination, asked: Destination) -> bool:
    if destination.endpoint != asked.endpoint:
        return False
    return asked.path_prefix == "/" or path_is_within(asked.path_prefix, destination.path_prefix)


NOT_FOUND = Refusal(
    RefusalCode.CREDENTIAL_NOT_FOUND,
    "no credential of that name, provider or host is granted to this subject through this client",
    "an operator sees what there is with: coatcheck credential list, coatcheck grant list",
)
AMBIGUOUS = Refusal(
    RefusalCode.CREDENTIAL_AMBIGUOUS,
    "several granted credentials fit the audience",
    "ask for one by its name",
)
