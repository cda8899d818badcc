"""When a token says that it ends: read for a log line alone, and never a reason to fail."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.contract.workload_token import (
    MAX_TOKEN_BYTES,
    described_token,
    described_until,
    is_one_token,
    unverified_end,
)


def token(payload: object) -> str:
    text = base64.urlsafe_b64encode(json.dumps(payload).encode()).decode().rstrip("=")
    return f"e30.{text}.c2ln"


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (token({"exp": 1_800_000_000}), 1_800_000_000.0),
        (token({"exp": 1.5}), 1.5),
        (token({}), None),
        (token({"exp": "soon"}), None),
        (token({"exp": True}), None),
        (token([1]), None),
        ("no token", None),
        ("a.%%%.c", None),
    ],
)
def test_the_end_is_what_the_token_says(text: str, end: float | None) -> None:
    assert unverified_end(text) == end


@given(st.text())
def test_no_text_is_too_odd(text: str) -> None:
    unverified_end(text)
    unverified_end(f"a.{text}.c")


@pytest.mark.parametrize("text", ["", "two words", "a\nb", "tök", "x" * (MAX_TOKEN_BYTES + 1)])
def test_what_cannot_be_sent_as_one_token_is_none(text: str) -> None:
    assert not is_one_token(text)


def test_of_a_proof_it_is_said_what_can_be_seen_to_be_wrong() -> None:
    assert is_one_token("a.b.c")
    assert described_token("the token", "a.b.c", now=0.0) == "the token, which is no JWT with an end"
    assert described_until("the certificate", 100.0, now=99.0) == "the certificate"
    assert described_until("the certificate", 0.0, now=0.0) == "the certificate, which ended at 1970-01-01T00:00:00Z"
