"""Envelopes: what is sealed opens for its own row and no other, and a failure yields nothing."""

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.contract.caller import CredentialId, TenantId
from control_plane.contract.destination import parse_destination
from control_plane.contract.placement import BEARER, HeaderPlacement, QueryPlacement
from control_plane.contract.secret import Secret
from control_plane.core.records import Credential, CredentialVersion, VersionState
from control_plane.core.sealing import Kek
from control_plane.custody import Custody, UnopenableError, open_secret, seal_secret

OLD, NEW, FOREIGN = (Kek.of(bytes([number]) * 32) for number in (1, 2, 3))

CREDENTIAL = Credential(
    id=CredentialId("cred_1"),
    tenant=TenantId("acme"),
    name="example",
    preset=None,
    kind="static",
    destinations=(parse_destination("https://api.example.com/v1", methods=frozenset({"GET"})),),
    placements=(BEARER,),
    variables=("EXAMPLE_API_KEY",),
    credential_required=False,
    current_version=1,
    created_at=0,
    updated_at=0,
)
SECRET = Secret("real-key-0123456789")


def custody(*ring: Kek) -> Custody:
    return Custody(ring, entropy=os.urandom)


def opened(
    custody: Custody,
    envelope: bytes | None,
    credential: Credential,
    *,
    version: int,
    state: VersionState = VersionState.ACTIVE,
) -> Secret:
    """The envelope, from where the credential's version of that number is kept."""
    row = CredentialVersion(credential.id, version, credential.tenant, state, NEW.id, envelope, created_at=0)
    return open_secret(custody, row, replace(credential, current_version=version))


@pytest.mark.guards("control_plane/custody.py", "if version is None or version.state in OVER:", "if version is None:")
@pytest.mark.parametrize("state", [VersionState.RETIRED, VersionState.REVOKED])
def test_an_envelope_put_back_into_a_version_that_is_over_does_not_open(state: VersionState) -> None:
    sealed = seal_secret(custody(NEW), SECRET, CREDENTIAL, version=1)

    with pytest.raises(UnopenableError):
        opened(custody(NEW), sealed.envelope, CREDENTIAL, version=1, state=state)


def test_a_sealed_secret_opens_for_its_own_row() -> None:
    sealed = seal_secret(custody(NEW), SECRET, CREDENTIAL, version=1)

    assert opened(custody(NEW), sealed.envelope, CREDENTIAL, version=1) == SECRET
    assert SECRET.reveal().encode() not in sealed.envelope
    assert sealed.kek_id == NEW.id


def test_the_newest_key_seals_and_every_key_of_the_ring_opens() -> None:
    before = seal_secret(custody(OLD), SECRET, CREDENTIAL, version=1)
    after = seal_secret(custody(NEW, OLD), SECRET, CREDENTIAL, version=1)

    assert after.kek_id == NEW.id
    for sealed in (before, after):
        assert opened(custody(NEW, OLD), sealed.envelope, CREDENTIAL, version=1) == SECRET


def test_a_ring_without_the_key_opens_nothing() -> None:
    sealed = seal_secret(custody(OLD), SECRET, CREDENTIAL, version=1)

    with pytest.raises(UnopenableError):
        opened(custody(NEW, FOREIGN), sealed.envelope, CREDENTIAL, version=1)


MOVED = {
    "to another tenant": replace(CREDENTIAL, tenant=TenantId("evil")),
    "to another credential": replace(CREDENTIAL, id=CredentialId("cred_2")),
    "to another kind": replace(CREDENTIAL, kind="oauth"),
    "to another host": replace(
        CREDENTIAL, destinations=(parse_destination("https://evil.example/v1", methods=frozenset({"GET"})),)
    ),
    "to http": replace(
        CREDENTIAL, destinations=(parse_destination("http://api.example.com:443/v1", methods=frozenset({"GET"})),)
    ),
    "to any path": replace(
        CREDENTIAL, destinations=(parse_destination("https://api.example.com", methods=frozenset({"GET"})),)
    ),
    "to any method": replace(CREDENTIAL, destinations=(parse_destination("https://api.example.com/v1"),)),
    "to private addresses": replace(
        CREDENTIAL,
        destinations=(parse_destination("https://api.example.com/v1", methods=frozenset({"GET"}), allow_private=True),),
    ),
    "to one more destination": replace(
        CREDENTIAL, destinations=(*CREDENTIAL.destinations, parse_destination("https://evil.example"))
    ),
    "to another header": replace(CREDENTIAL, placements=(HeaderPlacement(name="x-key"),)),
    "to another format": replace(CREDENTIAL, placements=(HeaderPlacement(name="authorization", format="x {secret}"),)),
    "to one more placement": replace(CREDENTIAL, placements=(BEARER, QueryPlacement(parameter="key"))),
}


@pytest.mark.guards("control_plane/core/sealing.py", '"tenant": credential.tenant,', '"tenant": "",')
@pytest.mark.guards("control_plane/core/sealing.py", '"credential": credential.id,', '"credential": "",')
@pytest.mark.guards("control_plane/core/sealing.py", '"kind": credential.kind,', '"kind": "",')
@pytest.mark.guards(
    "control_plane/core/sealing.py",
    "[destination_to_json(destination) for destination in credential.destinations]",
    "[]",
)
@pytest.mark.guards(
    "control_plane/core/sealing.py", "[placement_to_json(placement) for placement in credential.placements]", "[]"
)
@pytest.mark.parametrize("row", MOVED.values(), ids=MOVED.keys())
def test_an_envelope_moved_to_another_row_or_reach_does_not_open(row: Credential) -> None:
    sealed = seal_secret(custody(NEW), SECRET, CREDENTIAL, version=1)

    with pytest.raises(UnopenableError):
        opened(custody(NEW), sealed.envelope, row, version=1)


@pytest.mark.guards("control_plane/core/sealing.py", '"version": version,', '"version": 1,')
def test_an_envelope_of_another_version_does_not_open() -> None:
    sealed = seal_secret(custody(NEW), SECRET, CREDENTIAL, version=1)

    with pytest.raises(UnopenableError):
        opened(custody(NEW), sealed.envelope, CREDENTIAL, version=2)


def test_what_does_not_decide_where_a_secret_goes_does_not_keep_it_from_opening() -> None:
    sealed = seal_secret(custody(NEW), SECRET, CREDENTIAL, version=1)
    renamed = replace(CREDENTIAL, name="other", variables=(), credential_required=True, updated_at=9)

    assert opened(custody(NEW), sealed.envelope, renamed, version=1) == SECRET


@given(st.data())
def test_an_envelope_with_any_bit_flipped_does_not_open(data: st.DataObject) -> None:
    envelope = bytearray(seal_secret(custody(NEW), SECRET, CREDENTIAL, version=1).envelope)
    bit = data.draw(st.integers(0, len(envelope) * 8 - 1))
    envelope[bit // 8] ^= 1 << bit % 8

    with pytest.raises(UnopenableError):
        opened(custody(NEW), bytes(envelope), CREDENTIAL, version=1)


@given(st.binary(max_size=200))
def test_bytes_that_were_never_sealed_do_not_open(envelope: bytes) -> None:
    with pytest.raises(UnopenableError):
        custody(NEW).open(envelope, aad=b"")


@given(st.integers(0, 200))
def test_a_cut_envelope_does_not_open(length: int) -> None:
    envelope = seal_secret(custody(NEW), SECRET, CREDENTIAL, version=1).envelope

    with pytest.raises(UnopenableError):
        opened(custody(NEW), envelope[: min(length, len(envelope) - 1)], CREDENTIAL, version=1)


def test_a_wrapped_key_of_another_row_does_not_open_this_one() -> None:
    mine = seal_secret(custody(NEW), SECRET, CREDENTIAL, version=1).envelope
    other = seal_secret(custody(NEW), SECRET, replace(CREDENTIAL, tenant=TenantId("evil")), version=1).envelope
    wrapped = 1 + 12 + 32 + 16

    with pytest.raises(UnopenableError):
        opened(custody(NEW), other[:wrapped] + mine[wrapped:], CREDENTIAL, version=1)


def test_the_same_secret_is_never_sealed_to_the_same_bytes() -> None:
    sealed = {seal_secret(custody(NEW), SECRET, CREDENTIAL, version=1).envelope for _ in range(8)}

    assert len(sealed) == 8
    assert len({envelope[:13] for envelope in sealed}) == 8


def test_neither_a_key_nor_a_failure_shows_what_it_holds() -> None:
    sealed = seal_secret(custody(NEW), SECRET, CREDENTIAL, version=1)

    with pytest.raises(UnopenableError) as failure:
        opened(custody(FOREIGN), sealed.envelope, CREDENTIAL, version=1)

    assert str(failure.value) == "the envelope does not open"
    assert failure.value.__cause__ is None
    assert NEW.key.hex() not in repr(NEW)
    assert repr(NEW.key) not in repr(NEW)
