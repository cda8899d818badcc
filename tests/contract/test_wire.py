"""`/internal` on the wire: today's messages against yesterday's files, and what a newer end may add.

The golden files are contract 1. They are never edited: a change that breaks them is contract 2, beside which 1 is
served on.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from control_plane.contract.wire import (
    AUDIT_BATCH,
    CONTRACT,
    EVENT,
    QUOTA_ANSWER,
    QUOTA_REQUEST,
    RESOLVE_ANSWER,
    RESOLVE_REQUEST,
    SERVED_CONTRACTS,
    TAG_KEYS,
    AskWorkload,
    ResolveRequest,
    WireError,
    read,
    write,
)
from tests.contract.messages import BINDING, MESSAGES, REAL

FILE = "control_plane/contract/wire.py"

GOLDEN = Path(__file__).parent / "golden" / "contract-1"
EVERY_MESSAGE = pytest.mark.parametrize("name", MESSAGES)
ADAPTERS: list[TypeAdapter[Any]] = [
    *(RESOLVE_REQUEST, RESOLVE_ANSWER, TAG_KEYS, EVENT, AUDIT_BATCH),
    *(QUOTA_REQUEST, QUOTA_ANSWER),
]


@EVERY_MESSAGE
def test_a_message_survives_the_wire(name: str) -> None:
    adapter, message = MESSAGES[name]

    assert read(adapter, write(adapter, message)) == message


@EVERY_MESSAGE
def test_the_golden_message_of_contract_1_is_still_understood(name: str) -> None:
    adapter, message = MESSAGES[name]

    assert read(adapter, (GOLDEN / f"{name}.json").read_bytes()) == message


@EVERY_MESSAGE
def test_what_is_written_is_still_the_golden_message_of_contract_1(name: str) -> None:
    adapter, message = MESSAGES[name]

    assert json.loads(write(adapter, message)) == json.loads((GOLDEN / f"{name}.json").read_bytes())


def test_every_golden_file_is_tested() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(MESSAGES)
    assert CONTRACT in SERVED_CONTRACTS


@EVERY_MESSAGE
def test_fields_of_a_newer_end_are_ignored_wherever_they_stand(name: str) -> None:
    adapter, message = MESSAGES[name]

    newer = _with_unknown_fields(json.loads(write(adapter, message)))

    assert read(adapter, json.dumps(newer)) == message


def _with_unknown_fields(data: Any) -> Any:
    match data:
        case dict():
            inner = {key: value if key == "extra" else _with_unknown_fields(value) for key, value in data.items()}
            return inner if "note" in data else {**inner, "invented_later": {"deep": [1]}}
        case list():
            return [_with_unknown_fields(item) for item in data]
        case _:
            return data


@pytest.mark.parametrize("name", [name for name in MESSAGES if name.startswith("resolve")])
@pytest.mark.guards(FILE, "if not UNDERSTOOD.issuperset(", "if False and not UNDERSTOOD.issuperset(")
def test_an_unknown_field_that_must_be_understood_is_an_error(name: str) -> None:
    adapter, message = MESSAGES[name]
    newer = json.loads(write(adapter, message)) | {"must_understand": ["invented_later"], "invented_later": True}

    with pytest.raises(WireError, match="must_understand"):
        read(adapter, json.dumps(newer))


def test_a_known_field_that_must_be_understood_is_no_error() -> None:
    adapter, message = MESSAGES["resolve_answer.placeholder"]
    insisting = json.loads(write(adapter, message)) | {"must_understand": ["scopes", "max_stale_seconds"]}

    assert read(adapter, json.dumps(insisting)).answer.binding == BINDING


@pytest.mark.parametrize("name", [name for name in MESSAGES if name.startswith("resolve")])
@pytest.mark.parametrize("contract", [0, 2, 99])
@pytest.mark.guards(FILE, 'if getattr(message, "contract", CONTRACT) not in SERVED_CONTRACTS:', "if False:")
def test_a_contract_that_is_not_served_is_an_error(name: str, contract: int) -> None:
    adapter, message = MESSAGES[name]

    with pytest.raises(WireError, match="contract"):
        read(adapter, json.dumps(json.loads(write(adapter, message)) | {"contract": contract}))


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("resolve_request.caller", ["ask", "kind"], "everything"),
        ("resolve_request.placeholder", ["ask", "caller", "tenant"], None),
        ("resolve_request.placeholder", ["ask", "endpoint", "port"], "https"),
        ("resolve_answer.placeholder", ["answer", "kind"], "direct"),
        ("resolve_answer.placeholder", ["answer", "secret"], None),
        ("resolve_answer.placeholder", ["answer", "binding", "expires_at"], "never"),
        ("resolve_answer.placeholder", ["answer", "binding", "placements", 0, "kind"], "body"),
        ("resolve_answer.placeholder", ["answer", "binding", "placements", 0, "name"], "host"),
        ("resolve_answer.placeholder", ["answer", "binding", "destinations", 0, "methods"], []),
        ("resolve_answer.placeholder", ["answer", "binding", "destinations", 0, "path_prefix"], "/v1/../v2"),
        ("resolve_answer.placeholder", ["answer", "binding", "scopes", 0, "methods"], []),
        ("resolve_answer.placeholder", ["answer", "binding", "scopes", 0, "path_prefixes"], [""]),
        ("resolve_answer.refused", ["answer", "code"], "not_a_code"),
        ("resolve_answer.refused", ["as_of"], None),
        ("tag_keys", ["keys_hex"], "abcd"),
        ("event", ["kind"], "surprise"),
        ("audit_batch", ["events", 0, "true_code"], "not_a_code"),
    ],
)
def test_a_wrong_field_is_an_error_that_names_the_field_and_never_quotes_a_value(
    name: str, path: list[str | int], value: object
) -> None:
    adapter, message = MESSAGES[name]
    data = json.loads(write(adapter, message))
    _replace(data, path, value)

    with pytest.raises(WireError) as raised:
        read(adapter, json.dumps(data))

    assert REAL not in str(raised.value)
    assert raised.value.__cause__ is None
    assert str(value) not in str(raised.value) or value in (None, [])


def _replace(data: Any, path: list[str | int], value: object) -> None:
    for step in path[:-1]:
        data = data[step]
    data[path[-1]] = value


@EVERY_MESSAGE
def test_a_cut_message_is_an_error(name: str) -> None:
    adapter, message = MESSAGES[name]
    raw = write(adapter, message)

    for at in range(0, len(raw), 7):
        with pytest.raises(WireError):
            read(adapter, raw[:at])


@given(raw=st.binary(max_size=60) | st.text(max_size=60))
def test_any_bytes_are_an_error_of_the_wire_and_of_nothing_else(raw: bytes | str) -> None:
    for adapter in ADAPTERS:
        with pytest.raises(WireError):
            read(adapter, raw)


@pytest.mark.guards(FILE, 'return f"ResolvedPlaceholder({self.binding!r}, secret=***)"', "return self.secret")
def test_a_resolved_placeholder_does_not_show_its_secret() -> None:
    _, answer = MESSAGES["resolve_answer.placeholder"]
    _, keys = MESSAGES["tag_keys"]

    assert REAL not in f"{answer} {answer!r}"
    assert "ab" * 32 not in f"{keys} {keys!r}"


def test_a_session_that_is_absent_stays_absent_on_the_wire() -> None:
    adapter, message = MESSAGES["resolve_request.policy"]

    assert json.loads(write(adapter, message))["ask"]["caller"]["session"] is None
    assert read(adapter, write(adapter, message)).ask.caller.session is None


def test_a_workloads_proof_is_sent_and_neither_shown_nor_compared() -> None:
    ask = AskWorkload("ef" * 32, token=REAL)

    sent = read(RESOLVE_REQUEST, write(RESOLVE_REQUEST, ResolveRequest(ask))).ask

    assert isinstance(sent, AskWorkload)
    assert sent.token == REAL
    assert REAL not in repr(sent)
    assert ask == AskWorkload("ef" * 32)
