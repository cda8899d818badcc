"""The closed list of refusals: every code has a status, a problem, and one answer to "should I retry?"."""

import pytest

from control_plane.contract.headers import REFUSAL_TYPE_PREFIX
from control_plane.contract.refusal import (
    RETRY_MAY_HELP,
    Refusal,
    RefusalCode,
    RefusedError,
    problem,
    status_of,
)

STATUSES = {
    400: """malformed_request ambiguous_framing subject_conflict session_mismatch credential_required
        credential_ambiguous endpoint_unresolved""",
    401: "token_required token_invalid token_expired",
    407: "proxy_authentication_required",
    403: """unknown_placeholder expired_placeholder revoked_placeholder caller_mismatch destination_denied
        destination_private plaintext_credential placement_denied method_denied path_denied direct_not_allowed
        foreign_credential forbidden""",
    404: "session_not_found credential_not_found not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "session_busy turn_in_progress turn_not_running rotation_in_progress rotation_not_running",
    413: "body_too_large",
    414: "uri_too_long",
    415: "encoding_denied",
    421: "misdirected_request",
    422: "invalid_field secret_required idempotency_conflict",
    429: "rate_limited spend_limit_exceeded overloaded",
    431: "headers_too_large",
    500: "internal_error",
    502: "upstream_unreachable upstream_unverified upstream_protocol_error response_leak_blocked",
    503: """credential_unavailable ca_unavailable store_unavailable audit_unavailable sandbox_unavailable draining""",
    504: "upstream_timeout",
    505: "protocol_denied",
    508: "loop_detected",
}


def test_the_list_of_codes_and_their_statuses_is_the_documented_one() -> None:
    documented = {code: status for status, codes in STATUSES.items() for code in codes.split()}

    assert {code.value: status_of(code) for code in RefusalCode} == documented


@pytest.mark.parametrize("code", RefusalCode)
def test_every_code_makes_a_problem_of_its_own(code: RefusalCode) -> None:
    refusal = Refusal(code, detail="what was wrong", hint="what to do")

    assert problem(refusal, request_id="req-1") == {
        "type": REFUSAL_TYPE_PREFIX + code.value,
        "title": code.value.replace("_", " ").capitalize(),
        "status": status_of(code),
        "code": code.value,
        "detail": "what was wrong",
        "hint": "what to do",
        "request_id": "req-1",
    }


@pytest.mark.parametrize(
    "code", [code for code in RefusalCode if status_of(code) in (400, 401, 403, 404, 405, 413, 422)]
)
def test_no_code_that_needs_the_caller_to_change_something_invites_a_retry(code: RefusalCode) -> None:
    assert code not in RETRY_MAY_HELP


@pytest.mark.parametrize("code", [code for code in RefusalCode if status_of(code) == 503])
def test_what_is_only_away_for_a_while_invites_a_retry(code: RefusalCode) -> None:
    assert code in RETRY_MAY_HELP


@pytest.mark.guards(
    "control_plane/contract/refusal.py", '"code": refusal.code.value,', '"code": refusal.audited_code.value,'
)
def test_the_true_reason_goes_to_audit_and_not_to_the_caller() -> None:
    refusal = Refusal(RefusalCode.UNKNOWN_PLACEHOLDER, detail="", true_code=RefusalCode.CALLER_MISMATCH)

    assert refusal.audited_code is RefusalCode.CALLER_MISMATCH
    assert "caller_mismatch" not in str(problem(refusal, request_id="r"))


def test_a_refusal_without_a_hidden_reason_is_audited_as_what_was_told() -> None:
    assert Refusal(RefusalCode.PATH_DENIED, detail="").audited_code is RefusalCode.PATH_DENIED


def test_a_raised_refusal_names_its_code_only() -> None:
    error = RefusedError(Refusal(RefusalCode.TOKEN_EXPIRED, detail="the token of some subject"))

    assert str(error) == "token_expired"
