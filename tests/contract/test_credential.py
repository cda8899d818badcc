"""The tagged union that an exchange answers with: an unknown tag is an error, never the other mode."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.contract.credential import (
    DirectCredential,
    PlaceholderCredential,
    UnknownCredentialModeError,
    UpstreamCredential,
    from_wire,
    to_wire,
)
from control_plane.contract.secret import Secret

FILE = "control_plane/contract/credential.py"


@given(value=st.text(min_size=1), direct=st.booleans())
def test_a_credential_survives_the_wire(value: str, direct: bool) -> None:
    credential: UpstreamCredential = DirectCredential(Secret(value)) if direct else PlaceholderCredential(value)

    assert from_wire(to_wire(credential)) == credential


def test_the_wire_form_is_fixed() -> None:
    assert to_wire(PlaceholderCredential("coat_x")) == {"mode": "placeholder", "value": "coat_x"}
    assert to_wire(DirectCredential(Secret("sk-real"))) == {"mode": "direct", "value": "sk-real"}


def test_unknown_fields_beside_the_tag_are_ignored() -> None:
    assert from_wire({"mode": "placeholder", "value": "coat_x", "since": 2}) == PlaceholderCredential("coat_x")


@pytest.mark.parametrize(
    "untrusted",
    [
        *({}, {"value": "x"}, {"mode": "placeholder"}, {"mode": "direct"}, {"mode": "placeholder", "value": ""}),
        *(
            {"mode": mode, "value": "x"}
            for mode in ("", "Direct", "PLACEHOLDER", "direct ", "raw", None, 1, True, ["direct"])
        ),
        *({"mode": "direct", "value": value} for value in (None, 1, ["x"], {"x": 1}, b"x")),
    ],
)
@pytest.mark.guards(
    FILE,
    """raise UnknownCredentialModeError("upstream_credential.mode is neither 'placeholder' nor 'direct'")""",
    "return DirectCredential(Secret(value))",
)
def test_an_unknown_tag_is_an_error_and_never_a_fallback(untrusted: dict[str, Any]) -> None:
    with pytest.raises(UnknownCredentialModeError):
        from_wire(untrusted)


def test_a_direct_credential_does_not_show_its_key() -> None:
    credential = from_wire({"mode": "direct", "value": "sk-real-0123"})

    assert "sk-real-0123" not in f"{credential} {credential!r}"
