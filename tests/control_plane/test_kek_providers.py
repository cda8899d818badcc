"""Key-encryption keys that are kept elsewhere: one suite, on AWS KMS (moto) and on Vault transit, over real TLS."""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from control_plane.adapters.keks.aws_kms import AwsKmsKek
from control_plane.adapters.keks.vault_transit import VaultTransitKek
from control_plane.adapters.outbound import Exceptions, HttpOutbound
from control_plane.adapters.sources.auth_files import read_auth_path
from control_plane.contract.refusal import RefusalCode, RefusedError
from control_plane.core.sealing import Kek
from control_plane.core.sources import AwsAuth, VaultAuth
from control_plane.custody import Custody, KeyNeededError, UnopenableError
from control_plane.ports import KekError, KekFailure, KekProvider
from tests.control_plane.serving import private_file
from tests.support.fake_aws import KEYS_FILE, REGION, serving_aws
from tests.support.fake_vault import FakeVault, serving_vault

CUSTODY = "control_plane/custody.py"
DATA_KEY = bytes(range(32))
HERE, THERE = b"wrap\0here", b"wrap\0there"
HELD = Kek.of(b"\1" * 32)


@dataclass
class Elsewhere:
    kek: KekProvider
    other: KekProvider
    """Another key at the same provider."""
    break_off: Callable[[], None]
    come_back: Callable[[], None]


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca_file(ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    ca.cert_pem.write_to_path(path)
    return path


def outbound_to(port: int, ca_file: Path) -> HttpOutbound:
    return HttpOutbound(ca_files=[ca_file], exceptions=Exceptions(frozenset({("127.0.0.1", port)})))


def transit(vault: FakeVault, ca_file: Path, token_file: Path, key: str) -> VaultTransitKek:
    return VaultTransitKek(
        outbound_to(vault.port, ca_file),
        address=vault.url,
        namespace=None,
        mount="transit",
        key=key,
        auth=VaultAuth("token", "token", None, str(token_file), None, None),
        read_auth_file=read_auth_path,
    )


@pytest.fixture(scope="module")
def aws(ca: trustme.CA, ca_file: Path) -> Iterator[tuple[str, list[str]]]:
    """Its URL, and the ARNs of two keys."""
    with serving_aws(ca, str(ca_file)) as server:
        kms = server.client("kms")
        yield server.url, [kms.create_key()["KeyMetadata"]["Arn"] for _ in range(2)]


@pytest.fixture(params=["aws_kms", "vault_transit"])
async def elsewhere(
    request: pytest.FixtureRequest, ca: trustme.CA, ca_file: Path, tmp_path: Path
) -> AsyncIterator[Elsewhere]:
    if request.param == "vault_transit":
        with serving_vault(ca) as vault:
            vault.transit |= {"coatcheck": [b"k" * 32], "other": [b"o" * 32]}
            token_file = private_file(tmp_path / "token", vault.issue_token("transit/") + "\n")

            def break_off() -> None:
                vault.sealed = True

            def come_back() -> None:
                vault.sealed = False

            kek, other = (transit(vault, ca_file, token_file, key) for key in ("coatcheck", "other"))
            yield Elsewhere(kek, other, break_off, come_back)
        return
    url, arns = request.getfixturevalue("aws")
    port = int(url.rpartition(":")[2])
    allowed = {("127.0.0.1", port)}
    outbound = HttpOutbound(ca_files=[ca_file], exceptions=Exceptions(frozenset(allowed)))
    keys_file = private_file(tmp_path / "aws", KEYS_FILE)
    made = [
        AwsKmsKek(
            outbound,
            key_arn=arn,
            region=REGION,
            endpoint=url,
            auth=AwsAuth("keys", str(keys_file), None, None),
            read_auth_file=read_auth_path,
        )
        for arn in arns
    ]

    def break_aws() -> None:
        outbound._exceptions = Exceptions()  # its address is a private one: nothing gets out

    def mend_aws() -> None:
        outbound._exceptions = Exceptions(frozenset(allowed))

    yield Elsewhere(made[0], made[1], break_aws, mend_aws)


async def test_a_wrapped_data_key_unwraps_for_its_own_place(elsewhere: Elsewhere) -> None:
    wrapped = await elsewhere.kek.wrap(DATA_KEY, context=HERE)

    assert DATA_KEY not in wrapped
    assert await elsewhere.kek.unwrap(wrapped, context=HERE) == DATA_KEY


async def test_a_wrapped_data_key_does_not_unwrap_for_another_place(elsewhere: Elsewhere) -> None:
    wrapped = await elsewhere.kek.wrap(DATA_KEY, context=HERE)

    with pytest.raises(KekError) as error:
        await elsewhere.kek.unwrap(wrapped, context=THERE)

    assert error.value.failure is KekFailure.UNOPENABLE


async def test_what_another_key_has_wrapped_or_nobody_does_not_unwrap(elsewhere: Elsewhere) -> None:
    foreign = await elsewhere.other.wrap(DATA_KEY, context=HERE)

    for wrapped in (foreign, b"never wrapped", foreign[:-1] + bytes([foreign[-1] ^ 1])):
        with pytest.raises(KekError) as error:
            await elsewhere.kek.unwrap(wrapped, context=HERE)
        # AWS's stand-in takes what it does not know for something that we may not use.
        assert error.value.failure in (KekFailure.UNOPENABLE, KekFailure.DENIED)


async def test_a_key_that_nobody_answers_for_is_unavailable_and_comes_back(elsewhere: Elsewhere) -> None:
    wrapped = await elsewhere.kek.wrap(DATA_KEY, context=HERE)
    elsewhere.break_off()

    with pytest.raises(KekError) as error:
        await elsewhere.kek.unwrap(wrapped, context=HERE)
    elsewhere.come_back()

    assert error.value.failure is KekFailure.UNAVAILABLE
    assert await elsewhere.kek.unwrap(wrapped, context=HERE) == DATA_KEY


async def test_ids_tell_keys_apart_and_stay_the_same(elsewhere: Elsewhere) -> None:
    assert elsewhere.kek.id != elsewhere.other.id
    assert 0 < len(elsewhere.kek.id) <= 32


# --- in custody ------------------------------------------------------------------------------------------------------


async def sealed_by(custody: Custody, plaintext: bytes, aad: bytes) -> bytes:
    async def attempt() -> bytes:
        return custody.seal(plaintext, aad=aad).envelope

    return await custody.with_keys(attempt)


async def opened_by(custody: Custody, envelope: bytes, aad: bytes) -> bytes:
    async def attempt() -> bytes:
        return custody.open(envelope, aad=aad)

    return await custody.with_keys(attempt)


def custody_of(*ring: Kek | KekProvider, clock: Clock | None = None) -> Custody:
    return Custody(ring, entropy=os.urandom, clock=clock or Clock(), cache_seconds=300.0, max_stale_seconds=900.0)


async def test_sealing_and_opening_ask_the_key_outside_and_then_go_through(elsewhere: Elsewhere) -> None:
    envelope = await sealed_by(custody_of(elsewhere.kek), b"secret", b"here")

    fresh = custody_of(elsewhere.kek)
    with pytest.raises(KeyNeededError):
        fresh.open(envelope, aad=b"here")
    assert await opened_by(fresh, envelope, b"here") == b"secret"
    assert fresh.open(envelope, aad=b"here") == b"secret"
    assert b"secret" not in envelope


async def test_a_kept_data_key_serves_its_own_row_alone(elsewhere: Elsewhere) -> None:
    custody = custody_of(elsewhere.kek)
    envelope = await sealed_by(custody, b"secret", b"here")

    with pytest.raises(UnopenableError):
        await opened_by(custody, envelope, b"there")


async def test_envelopes_move_from_a_file_to_a_key_elsewhere_and_back_without_being_opened(
    elsewhere: Elsewhere,
) -> None:
    custody = custody_of(elsewhere.kek, HELD)
    held = custody_of(HELD).seal(b"secret", aad=b"here").envelope

    there = await custody.rewrapped(held, aad=b"here", by=elsewhere.kek.id)
    back = await custody.rewrapped(there.envelope, aad=b"here", by=HELD.id)

    assert (there.kek_id, back.kek_id) == (elsewhere.kek.id, HELD.id)
    assert await opened_by(custody_of(elsewhere.kek), there.envelope, b"here") == b"secret"
    assert custody_of(HELD).open(back.envelope, aad=b"here") == b"secret"
    assert there.envelope[-18:] == held[-18:]  # the ciphertext itself is the same


async def test_a_rewrap_for_another_row_is_refused(elsewhere: Elsewhere) -> None:
    custody = custody_of(elsewhere.kek, HELD)
    held = custody_of(HELD).seal(b"secret", aad=b"here").envelope

    with pytest.raises(UnopenableError):
        await custody.rewrapped(held, aad=b"there", by=elsewhere.kek.id)


async def test_kept_data_keys_bridge_an_outage_for_a_while_and_then_nothing_opens(elsewhere: Elsewhere) -> None:
    clock = Clock()
    custody = custody_of(elsewhere.kek, clock=clock)
    envelope = await sealed_by(custody, b"secret", b"here")
    elsewhere.break_off()

    clock.now += 299
    assert custody.open(envelope, aad=b"here") == b"secret"
    clock.now += 800
    assert await opened_by(custody, envelope, b"here") == b"secret"
    clock.now += 200
    with pytest.raises(RefusedError) as refused:
        await opened_by(custody, envelope, b"here")
    elsewhere.come_back()
    clock.now += 3

    assert refused.value.refusal.code is RefusalCode.CREDENTIAL_UNAVAILABLE
    assert elsewhere.kek.provider in refused.value.refusal.detail
    assert await opened_by(custody, envelope, b"here") == b"secret"


async def test_a_cold_start_while_the_key_does_not_answer_opens_nothing(elsewhere: Elsewhere) -> None:
    envelope = await sealed_by(custody_of(elsewhere.kek), b"secret", b"here")
    elsewhere.break_off()

    with pytest.raises(RefusedError) as refused:
        await opened_by(custody_of(elsewhere.kek), envelope, b"here")

    assert refused.value.refusal.code is RefusalCode.CREDENTIAL_UNAVAILABLE


class DisabledKek:
    """Says no, as a key does that was disabled or whose policy was changed."""

    provider, place = "test", "nowhere"

    def __init__(self, kek: KekProvider) -> None:
        self.id = kek.id

    async def wrap(self, data_key: bytes, *, context: bytes) -> bytes:
        raise KekError(KekFailure.DENIED, "it is disabled")

    async def unwrap(self, wrapped: bytes, *, context: bytes) -> bytes:
        raise KekError(KekFailure.DENIED, "it is disabled")


@pytest.mark.guards(
    CUSTODY,
    "if error.failure is KekFailure.UNAVAILABLE and kept and kept.data_key and now < kept.stale_until:",
    "if kept and kept.data_key and now < kept.stale_until:",
)
async def test_a_key_that_says_no_is_not_bridged(elsewhere: Elsewhere) -> None:
    clock = Clock()
    custody = custody_of(elsewhere.kek, clock=clock)
    envelope = await sealed_by(custody, b"secret", b"here")
    custody.arrange([DisabledKek(elsewhere.kek)])
    clock.now += 301

    with pytest.raises(RefusedError) as refused:
        await opened_by(custody, envelope, b"here")

    assert "it is disabled" in refused.value.refusal.detail


async def test_a_key_that_left_the_ring_opens_nothing_although_its_data_keys_are_kept(elsewhere: Elsewhere) -> None:
    custody = custody_of(elsewhere.kek)
    envelope = await sealed_by(custody, b"secret", b"here")
    custody.arrange([HELD])

    with pytest.raises(UnopenableError):
        await opened_by(custody, envelope, b"here")


async def test_a_rotated_transit_key_opens_what_its_older_version_wrapped(
    ca: trustme.CA, ca_file: Path, tmp_path: Path
) -> None:
    with serving_vault(ca) as vault:
        vault.transit["coatcheck"] = [b"1" * 32]
        kek = transit(vault, ca_file, private_file(tmp_path / "token", vault.issue_token()), "coatcheck")
        wrapped = await kek.wrap(DATA_KEY, context=HERE)

        vault.transit["coatcheck"].append(b"2" * 32)

        assert await kek.unwrap(wrapped, context=HERE) == DATA_KEY
        assert (await kek.wrap(DATA_KEY, context=HERE)).startswith(b"vault:v2:")
