"""By what a caller may be proven: the table of proofs, and what each listener makes of it."""

import base64
from dataclasses import replace
from typing import Any

import pytest

from control_plane.contract.caller import Caller, ClientId, SubjectId, TenantId
from control_plane.contract.destination import AllowRule
from control_plane.contract.refusal import RefusalCode
from control_plane.contract.wire import AskWorkload, Policy, Refused, WorkloadFacts, client_of, issuer_of
from egress_proxy.core import decision as decision_module
from egress_proxy.core.decision import Connection, Forward, Mode, Refuse, Resolve, Tunnel, decide, decide_connect
from egress_proxy.core.fields import request_fields
from egress_proxy.core.http1 import parse_request_head
from egress_proxy.core.proofs import (
    Presented,
    ProofKind,
    in_words,
    parse_accepted,
    presented_certificate,
    presented_token,
)
from egress_proxy.core.view import KnownWorkload
from tests.egress_proxy.core.world import ALICE, BOB, MALLORY, NOW, World, head_of

DECISION = "egress_proxy/core/decision.py"
URL = "https://api.test"
JWT = ".".join(("h" * 60, "p" * 100, "s" * 86)).encode()
OTHER_JWT = ".".join(("h" * 60, "q" * 100, "s" * 86)).encode()
DER = b"0\x82 a certificate"
ALONE = Caller(ClientId("ci"), TenantId("acme"), SubjectId("ci-job"), None)


@pytest.fixture
def world() -> World:
    return World()


def knows(world: World, proof: bytes, *, is_certificate: bool = False, **facts: Any) -> Presented:
    """The control plane has said what client this is."""
    presented = presented_certificate(proof) if is_certificate else presented_token(proof)
    assert presented is not None
    known = WorkloadFacts(ClientId("ci"), NOW + 300)
    world.workloads[presented.fingerprint] = KnownWorkload(replace(known, **facts), NOW - 30)
    return presented


def of_one_subject() -> dict[str, Any]:
    return {"tenant": ALONE.tenant, "subject": ALONE.subject}


def asked(world: World, accepts: str, *lines: str, **connection: Any) -> Forward | Resolve | Refuse:
    """A request without a placeholder to a host that the caller may reach."""
    for caller in (ALICE, BOB, ALONE, MALLORY):
        world.policies[caller] = Policy(caller, (), (AllowRule("api.test", 80),))
    facts = Connection(Mode.FORWARD, accepts=parse_accepted(accepts), **connection)
    head = parse_request_head(head_of("GET http://api.test/ HTTP/1.1", *lines))
    return decide(head, facts, world, NOW)


def bearer(token: bytes | str) -> str:
    return f"Proxy-Authorization: Bearer {token.decode() if isinstance(token, bytes) else token}"


def code(decision: object) -> str:
    assert isinstance(decision, Refuse), decision
    return decision.refusal.code.value


# --- which proofs are enough -----------------------------------------------------------------------------------------

ENOUGH = [
    ("proxy_credential", {"credential"}, True),
    ("proxy_credential", {"certificate"}, False),
    ("mtls", {"certificate"}, True),
    ("mtls", {"credential"}, False),
    ("mtls", {"certificate", "credential"}, True),
    ("workload_token", {"token"}, True),
    ("workload_token", {"certificate"}, False),
    ("mtls+proxy_credential", {"certificate"}, False),
    ("mtls+proxy_credential", {"credential"}, False),
    ("mtls+proxy_credential", {"certificate", "credential"}, True),
    ("workload_token+mtls", {"certificate", "token"}, True),
    ("workload_token+mtls", {"token"}, False),
    ("proxy_credential,mtls", {"credential"}, True),
    ("proxy_credential,mtls", {"certificate"}, True),
    ("proxy_credential,mtls", set(), False),
]


@pytest.mark.parametrize(("accepts", "given", "is_enough"), ENOUGH)
@pytest.mark.guards(DECISION, "if any(together.issubset(kinds) for together in connection.accepts):", "if True:")
def test_a_listener_hears_whoever_brings_all_that_it_asks_for(
    world: World, accepts: str, given: set[str], is_enough: bool
) -> None:
    certificate = knows(world, DER, is_certificate=True, **of_one_subject()) if "certificate" in given else None
    knows(world, JWT, **of_one_subject())
    lines = [bearer(JWT)] if "token" in given else []
    credential = world.proxy_credential(ALONE) if "credential" in given else None

    decision = asked(world, accepts, *lines, certificate=certificate, proxy_credential=credential)

    if is_enough:
        assert isinstance(decision, Forward)
        assert decision.caller == ALONE
    else:
        assert code(decision) == "proxy_authentication_required"


def test_a_token_is_refused_where_the_listener_takes_none(world: World) -> None:
    knows(world, JWT, **of_one_subject())

    decision = asked(world, "proxy_credential,mtls", bearer(JWT))

    assert code(decision) == "proxy_authentication_required"


@pytest.mark.parametrize("text", ["", " , ", "password", "mtls+", "mtls+password"])
def test_a_list_of_proofs_that_says_nothing_or_something_unknown_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="proxy_credential, mtls, workload_token"):
        parse_accepted(text)


def test_what_is_missing_is_said_in_words() -> None:
    words = in_words(parse_accepted("mtls+proxy_credential, workload_token"))

    assert words == "a client certificate with a proxy credential or a workload token"


# --- whom they prove -------------------------------------------------------------------------------------------------


@pytest.mark.guards(DECISION, "elif workload.subject is not None and workload.tenant is not None:", "elif True:")
def test_a_client_of_several_subjects_is_never_a_caller_by_its_own_proof(world: World) -> None:
    certificate = knows(world, DER, is_certificate=True)

    decision = asked(world, "mtls", certificate=certificate)

    assert code(decision) == "proxy_authentication_required"
    assert isinstance(decision, Refuse)
    assert "several subjects" in decision.refusal.detail


def test_a_client_of_one_subject_is_a_caller_without_a_session(world: World) -> None:
    knows(world, JWT, **of_one_subject())

    decision = asked(world, "workload_token", bearer(JWT))

    assert isinstance(decision, Forward)
    assert decision.caller == ALONE
    assert decision.caller.session is None


def test_a_proxy_credential_narrows_the_client_to_its_session(world: World) -> None:
    certificate = knows(world, DER, is_certificate=True, client=ALICE.client)

    decision = asked(world, "mtls", certificate=certificate, proxy_credential=world.proxy_credential(ALICE))

    assert isinstance(decision, Forward)
    assert decision.caller == ALICE


@pytest.mark.parametrize(
    "facts",
    [
        {"client": ClientId("other")},
        {"client": ALICE.client, "tenant": TenantId("evil")},
        {"client": ALICE.client, "tenant": ALICE.tenant, "subject": BOB.subject},
    ],
)
@pytest.mark.guards(DECISION, "caller.client == workload.client\n", "True\n")
@pytest.mark.guards(DECISION, "and workload.tenant in (None, caller.tenant)", "")
@pytest.mark.guards(DECISION, "and workload.subject in (None, caller.subject)", "")
def test_a_proxy_credential_of_another_client_tenant_or_subject_is_a_mismatch(
    world: World, facts: dict[str, Any]
) -> None:
    certificate = knows(world, DER, is_certificate=True, **facts)

    decision = asked(world, "mtls", certificate=certificate, proxy_credential=world.proxy_credential(ALICE))

    assert code(decision) == "caller_mismatch"


@pytest.mark.guards(DECISION, "if any(other.client != workload.client for other in facts[1:]):", "if False:")
def test_a_token_and_a_certificate_of_two_clients_are_a_mismatch(world: World) -> None:
    certificate = knows(world, DER, is_certificate=True, **of_one_subject())
    knows(world, JWT, client=ClientId("other"), **of_one_subject())

    decision = asked(world, "mtls,workload_token", bearer(JWT), certificate=certificate)

    assert code(decision) == "caller_mismatch"


def test_another_token_than_the_connections_own_is_a_mismatch(world: World) -> None:
    given = knows(world, JWT, **of_one_subject())
    knows(world, OTHER_JWT, **of_one_subject())

    decision = asked(world, "workload_token", bearer(OTHER_JWT), token=given)

    assert code(decision) == "caller_mismatch"


def test_a_certificate_that_nobody_knows_is_refused_beside_a_good_proxy_credential(world: World) -> None:
    certificate = knows(world, DER, is_certificate=True)
    refused = Refused(RefusalCode.PROXY_AUTHENTICATION_REQUIRED, "no", true_code=RefusalCode.TOKEN_INVALID)
    world.workloads[certificate.fingerprint] = refused

    decision = asked(
        world, "proxy_credential,mtls", certificate=certificate, proxy_credential=world.proxy_credential(ALICE)
    )

    assert code(decision) == "proxy_authentication_required"


# --- how long --------------------------------------------------------------------------------------------------------


@pytest.mark.guards(DECISION, "    if now >= known.facts.expires_at:\n", "    if False:\n")
def test_a_token_that_is_over_proves_nobody(world: World) -> None:
    knows(world, JWT, expires_at=NOW, **of_one_subject())

    decision = asked(world, "workload_token", bearer(JWT))

    assert code(decision) == "proxy_authentication_required"
    assert isinstance(decision, Refuse)
    assert decision.refusal.audited_code is RefusalCode.TOKEN_EXPIRED


@pytest.mark.guards(
    DECISION, "ends = min(known.expires_at, *(each.expires_at for each in facts))", "ends = known.expires_at"
)
def test_what_was_decided_holds_no_longer_than_each_of_its_proofs(world: World) -> None:
    certificate = knows(world, DER, is_certificate=True, client=ALICE.client, expires_at=NOW + 7)

    decision = asked(world, "mtls", certificate=certificate, proxy_credential=world.proxy_credential(ALICE))

    assert isinstance(decision, Forward)
    assert decision.until == NOW + 7


def test_what_vouches_for_a_workload_is_part_of_the_decision(world: World) -> None:
    knows(world, JWT, issuer="cluster-a", **of_one_subject())

    decision = asked(world, "workload_token", bearer(JWT))

    assert isinstance(decision, Forward)
    assert decision.proof.vouchers == {client_of("ci"), issuer_of("cluster-a")}


# --- what is asked, and kept -----------------------------------------------------------------------------------------


def test_an_unknown_token_is_asked_about_by_its_digest_and_its_text(world: World) -> None:
    decision = asked(world, "workload_token", bearer(JWT))

    assert isinstance(decision, Resolve)
    ask = decision.ask
    assert isinstance(ask, AskWorkload)
    assert (ask.token, ask.certificate) == (JWT.decode(), "")


def test_a_token_is_read_from_a_proxy_urls_password_too(world: World) -> None:
    knows(world, JWT, **of_one_subject())
    line = "Proxy-Authorization: Basic " + base64.b64encode(b"workload:" + JWT).decode()

    assert isinstance(asked(world, "workload_token", line), Forward)


def test_a_proxy_credential_as_the_user_name_beside_a_token_narrows_it(world: World) -> None:
    knows(world, JWT, client=ALICE.client)
    credential = world.proxy_credential(ALICE).text.encode()
    line = "Proxy-Authorization: Basic " + base64.b64encode(credential + b":" + JWT).decode()

    decision = asked(world, "workload_token+proxy_credential", line)

    assert isinstance(decision, Forward)
    assert decision.caller == ALICE


def test_a_tunnel_is_opened_by_a_token_and_keeps_it(world: World) -> None:
    knows(world, JWT, **of_one_subject())
    world.policies[ALONE] = Policy(ALONE, (), (AllowRule("api.test", 443),))
    head = parse_request_head(head_of("CONNECT api.test:443 HTTP/1.1", bearer(JWT), host="api.test:443"))

    tunnel = decide_connect(head, Connection(Mode.FORWARD, accepts=parse_accepted("workload_token")), world, NOW)

    assert isinstance(tunnel, Tunnel)
    assert tunnel.proof.token == presented_token(JWT)


def test_of_a_token_only_its_digest_is_shown_and_remembered() -> None:
    presented = presented_token(JWT)

    assert presented is not None
    assert JWT.decode() not in repr(presented)
    assert presented.kind is ProofKind.WORKLOAD_TOKEN


@pytest.mark.guards(
    "egress_proxy/core/fields.py",
    'longest = MAX_REMEMBERED_PROOF_BYTES if field.name == b"proxy-authorization" else MAX_REMEMBERED_LINE_BYTES',
    "longest = MAX_REMEMBERED_LINE_BYTES",
)
def test_no_line_that_holds_a_token_is_remembered_from_connection_to_connection() -> None:
    shortest = b".".join((b"h" * 20, b"p" * 52, b"s" * 86))
    line = b"Proxy-Authorization: Bearer " + shortest
    decision_module._remembered_parse.cache_clear()

    first, second = request_fields(line)[0], request_fields(line)[0]

    assert presented_token(shortest) is not None
    assert first is not second
    assert decision_module._remembered_parse.cache_info().currsize == 0


@pytest.mark.parametrize(
    "text", [b"", b"a.b.c", b"x" * 300, b".".join((b"h" * 80, b"p" * 80, b"")), JWT + b".x", JWT + b"=", b"e" * 20_000]
)
def test_what_is_no_signed_token_is_not_taken_for_one(text: bytes) -> None:
    assert presented_token(text) is None
