"""What an exchange hands out, tagged with how it is to be used (design: the mode is declared, never guessed).

Rule: an unknown tag is an error at the receiver, never a fallback to the other mode.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from control_plane.contract.secret import Secret


class UnknownCredentialModeError(ValueError):
    """The tag is neither `placeholder` nor `direct`, or the value is missing."""


@dataclass(frozen=True, slots=True)
class PlaceholderCredential:
    """Worthless on its own: only the proxy turns it into a key, for its own caller and destination."""

    value: str


@dataclass(frozen=True, slots=True)
class DirectCredential:
    """The key itself: possible only where no injector exists."""

    value: Secret


UpstreamCredential = PlaceholderCredential | DirectCredential


def to_wire(credential: UpstreamCredential) -> dict[str, str]:
    """`{"mode": …, "value": …}`. For `direct` this reveals the key, for the answer to its owner alone."""
    match credential:
        case PlaceholderCredential(value=value):
            return {"mode": "placeholder", "value": value}
        case DirectCredential(value=secret):
            return {"mode": "direct", "value": secret.reveal()}


def from_wire(untrusted: Mapping[str, object]) -> UpstreamCredential:
    """The reverse of `to_wire`. Raises `UnknownCredentialModeError` for any other tag or shape."""
    value = untrusted.get("value")
    if not isinstance(value, str) or not value:
        raise UnknownCredentialModeError("upstream_credential needs a value")
    match untrusted.get("mode"):
        case "placeholder":
            return PlaceholderCredential(value)
        case "direct":
            return DirectCredential(Secret(value))
        case _:
            raise UnknownCredentialModeError("upstream_credential.mode is neither 'placeholder' nor 'direct'")
