"""A secret does not show itself, and one that would break a request is not accepted."""

import copy
import dataclasses
import json
import logging
import pickle
import traceback
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.contract.secret import MAX_SECRET_BYTES, Secret, UnusableSecretError

FILE = "control_plane/contract/secret.py"

REAL = "sk-real-0123456789"


@dataclasses.dataclass
class Holder:
    secret: Secret


WAYS_TO_SHOW: dict[str, Callable[[Secret], str]] = {
    "repr": repr,
    "str": str,
    "format": lambda secret: format(secret, ">40"),
    "f-string": lambda secret: f"{secret} {secret!r} {secret!s} {secret!a}",
    "percent": lambda secret: "%s %r" % (secret, secret),  # noqa: UP031 (old logging calls do this)
    "str.format": "{0} {0!r}".format,
    "container": lambda secret: f"{[secret]} { {'key': secret} } {(secret,)}",
    "dataclass": lambda secret: repr(Holder(secret)),
    "exception": lambda secret: f"{ValueError(secret)!r} {ValueError(secret)}",
    "traceback with locals": lambda secret: "".join(_traceback_with_locals(secret)),
}


def _traceback_with_locals(secret: Secret) -> list[str]:
    def fail(key: Secret) -> None:
        raise RuntimeError(key)

    try:
        fail(secret)
    except RuntimeError as error:
        return list(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    return []


@pytest.mark.parametrize("way", WAYS_TO_SHOW)
@pytest.mark.guards(FILE, 'return "Secret(***)"', 'return f"Secret({self._value})"')
def test_a_secret_never_shows(way: str) -> None:
    assert REAL not in WAYS_TO_SHOW[way](Secret(REAL))


def test_a_secret_never_shows_in_a_log(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("coatcheck.test").error("a %s and %r", Secret(REAL), {"key": Secret(REAL)})

    assert REAL not in caplog.text


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.guards(
    FILE, 'raise TypeError("a Secret is not pickled")', "return (Secret, (self._value,))  # type: ignore"
)
def test_a_secret_is_not_pickled(protocol: int) -> None:
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(Secret(REAL), protocol)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda secret: dataclasses.asdict(Holder(secret))])
def test_a_secret_is_not_copied_into_other_structures(copied: Callable[[Secret], object]) -> None:
    with pytest.raises(TypeError):
        copied(Secret(REAL))


def test_a_secret_is_not_json() -> None:
    with pytest.raises(TypeError) as raised:
        json.dumps({"key": Secret(REAL)})

    assert REAL not in str(raised.value)


def test_a_secret_has_no_dict_that_a_debugger_or_error_report_would_walk() -> None:
    with pytest.raises(TypeError):
        vars(Secret(REAL))


@given(value=st.text(st.characters() | st.sampled_from("\ud800\udfff")), other=st.text())
def test_secrets_are_equal_when_their_values_are(value: str, other: str) -> None:
    assert Secret(value) == Secret(value)
    assert hash(Secret(value)) == hash(Secret(value))
    assert (Secret(value) == Secret(other)) == (value == other)
    assert Secret(value) != value
    assert Secret(value).reveal() == value


# --- what is accepted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        (REAL, REAL),
        (REAL + "\n", REAL),
        (REAL + "\r\n", REAL),
        ("a b", "a b"),
        ("a&b=c#d/%2e", "a&b=c#d/%2e"),
        ('quote" and \\', 'quote" and \\'),
        ("schlüssel", "schlüssel"),
        ("k", "k"),
        ("k" * MAX_SECRET_BYTES, "k" * MAX_SECRET_BYTES),
        ("k" * MAX_SECRET_BYTES + "\n", "k" * MAX_SECRET_BYTES),
    ],
)
def test_one_trailing_line_end_is_dropped_and_nothing_else_is_changed(typed: str, value: str) -> None:
    assert Secret.submitted(typed).reveal() == value


UNUSABLE = {
    "empty": "",
    "only a line end": "\n",
    "only spaces": "   ",
    "two trailing line ends": REAL + "\n\n",
    "a lone trailing CR": REAL + "\r",
    "LF then CR": REAL + "\n\r",
    "leading space": " " + REAL,
    "trailing space": REAL + " ",
    "trailing space and line end": REAL + " \n",
    "leading no-break space": "\u00a0" + REAL,
    "leading line end": "\n" + REAL,
    "inner LF": f"{REAL}\nX-Evil: 1",
    "inner CRLF": f"{REAL}\r\nX-Evil: 1",
    "inner CR": f"{REAL}\rX-Evil: 1",
    "NUL": f"{REAL}\x00x",
    "trailing NUL": f"{REAL}\x00",
    "tab": "a\tb",
    "vertical tab": "a\x0bb",
    "escape": "a\x1bb",
    "DEL": "a\x7fb",
    "lone surrogate": "a\ud800b",
    "one byte too long": "k" * (MAX_SECRET_BYTES + 1),
    "too long in bytes though not in characters": "ü" * (MAX_SECRET_BYTES // 2 + 1),
}


@pytest.mark.parametrize("what", UNUSABLE)
@pytest.mark.guards(FILE, "if any(ord(char) < _FIRST_PRINTABLE or", "if any(")
def test_a_secret_that_would_break_a_request_is_not_accepted(what: str) -> None:
    with pytest.raises(UnusableSecretError):
        Secret.submitted(UNUSABLE[what])


@given(typed=st.text(st.characters() | st.sampled_from("\r\n\x00\t\ud800 ")))
def test_what_is_accepted_is_one_line_and_what_is_not_is_never_quoted(typed: str) -> None:
    told, accepted = _submit("Q7z" + typed)

    assert "Q7z" not in told
    assert not set(accepted) & {"\r", "\n", "\x00"}


def _submit(typed: str) -> tuple[str, str]:
    try:
        return "", Secret.submitted(typed).reveal()
    except UnusableSecretError as error:
        return str(error), ""
