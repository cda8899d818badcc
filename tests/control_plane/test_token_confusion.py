"""Token confusion: one table of forgeries, tried at every place where a token comes in (RFC 8725).

Rule: wherever it is tried a forgery hears what plain nonsense hears there, byte for byte but for the request's id, and
nothing is fetched on its account.
"""

import base64
import hmac
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.issuing import Provider, SigningKey, bearer
from tests.control_plane.serving import ControlPlane, control_plane_in
from tests.control_plane.test_client_authentication import JWT_BEARER, add_client
from tests.control_plane.workspace import GRANT_TYPE, JWT, Json, Workspace
from tests.support.upstream import Upstream

ID_TOKEN = "urn:ietf:params:oauth:token-type:id_token"
TOKENS = "control_plane/core/tokens.py"

_numbers = count(1)


@dataclass(frozen=True)
class Place:
    """A door, the key that its good tokens are signed by, and what they say."""

    key: SigningKey
    claims: Callable[[], Json]
    present: Callable[[str], httpx.Response]
    good: frozenset[int]


class Doors:
    """One control plane with every place where a token comes in."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.workspace = Workspace(plane, "confusion")
        self.workspace.add_credential()
        self.workspace.grant()
        self.people = Provider("people")
        self.people.register(plane, tenant="confusion")
        self.staff = Provider("staff")
        admin = {"claim": "groups", "map": {"admins": {"role": "platform_admin"}}}
        self.staff.register(plane, tenant="", uses=["admin"], claims={"subject": {}, "admin": admin})
        self.cluster = Provider("cluster")
        self.cluster.register(plane, tenant="", uses=["client"], audiences=None, claims={"subject": {}})
        self.keyed_by = SigningKey("own")
        self.keyed = add_client(self.workspace, proofs={"keys": [self.keyed_by.jwk]})
        add_client(self.workspace, proofs={"workload": {"issuer": "cluster", "subject": "system:serviceaccount:a:b"}})
        self.session = self.workspace.open_session()
        self.places = {
            "POST /v1/sessions": Place(self.people.key, self.people.claims, self._opens, frozenset({201})),
            "GET /v1/tenants": Place(
                self.staff.key, lambda: self.staff.claims(groups=["admins"]), self._administers, frozenset({200})
            ),
            "client_assertion of its own": Place(self.keyed_by, self._own_claims, self._asserts, frozenset({400})),
            "client_assertion of a workload": Place(
                self.cluster.key,
                lambda: self.cluster.claims("system:serviceaccount:a:b", aud=plane.url),
                self._asserts,
                frozenset({400}),
            ),
            "subject_token": Place(self.people.key, self.people.claims, self._exchanges, frozenset({200})),
            "subject_token, an ID token": Place(
                self.people.key,
                self.people.claims,
                lambda token: self._exchanges(token, ID_TOKEN),
                frozenset({200}),
            ),
        }

    def _own_claims(self) -> Json:
        now = int(time.time())
        return {
            "iss": self.keyed,
            "sub": self.keyed,
            "aud": self.plane.url,
            "iat": now,
            "exp": now + 60,
            "jti": f"n-{next(_numbers)}",
        }

    def _opens(self, token: str) -> httpx.Response:
        body = {"runtime": self.workspace.runtime}
        return self.plane.http.post("/v1/sessions", json=body, headers=bearer(token))

    def _administers(self, token: str) -> httpx.Response:
        return self.plane.http.get("/v1/tenants", headers=bearer(token))

    def _asserts(self, token: str) -> httpx.Response:
        form = {"grant_type": GRANT_TYPE, "client_assertion_type": JWT_BEARER, "client_assertion": token}
        return self.plane.http.post("/oauth/token", data=form)

    def _exchanges(self, token: str, kind: str = JWT) -> httpx.Response:
        return self.workspace.token(subject_token=token, subject_token_type=kind, audience="example")


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    with control_plane_in(tmp_path_factory.mktemp("doors")) as plane:
        yield Doors(plane)


PLACES = (
    *("POST /v1/sessions", "GET /v1/tenants", "client_assertion of its own", "client_assertion of a workload"),
    *("subject_token", "subject_token, an ID token"),
)

# --- the table -------------------------------------------------------------------------------------------------------

Forge = Callable[[SigningKey, Json], str]


def segment(value: Any) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def signed(key: SigningKey, header: Any, payload: Any) -> str:
    """Whatever header and payload, truly signed."""
    signing_input = f"{segment(header)}.{segment(payload)}"
    algorithm = jwt.get_algorithm_by_name(key.algorithm)
    return f"{signing_input}.{segment(algorithm.sign(signing_input.encode(), key.private))}"


def header(key: SigningKey, **fields: Any) -> Json:
    made: Json = {"alg": key.algorithm, "typ": "JWT", "kid": key.id} | fields
    return {name: value for name, value in made.items() if value is not None}


def with_claims(**claims: Any) -> Forge:
    """Truly signed, and saying this. None takes a claim out; a function is given the right value."""

    def forge(key: SigningKey, payload: Json) -> str:
        changed = {
            name: claim(payload.get(name)) if callable(claim := claims.get(name, value)) else claim
            for name, value in (payload | dict.fromkeys(claims)).items()
        }
        return signed(key, header(key), {name: value for name, value in changed.items() if value is not None})

    return forge


def with_header(**fields: Any) -> Forge:
    return lambda key, payload: signed(key, header(key, **fields), payload)


def public_pem(key: SigningKey) -> bytes:
    return bytes(
        key.private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )


def hs256(secret: Callable[[SigningKey], bytes]) -> Forge:
    def forge(key: SigningKey, payload: Json) -> str:
        signing_input = f"{segment(header(key, alg='HS256'))}.{segment(payload)}"
        # By hand: no library makes this mistake any more.
        return f"{signing_input}.{segment(hmac.new(secret(key), signing_input.encode(), 'sha256').digest())}"

    return forge


STRANGER = SigningKey("stranger")
LATER = int(time.time()) + 10 * 365 * 86_400


def by_a_stranger(**fields: Any) -> Forge:
    return lambda key, payload: signed(STRANGER, header(key, **fields), payload)


FORGERIES: dict[str, Forge] = {
    # the algorithm
    "alg none": lambda key, payload: f"{segment(header(key, alg='none'))}.{segment(payload)}.",
    "alg None in other letters": lambda key, payload: f"{segment(header(key, alg='nOnE'))}.{segment(payload)}.",
    "alg none with a signature": with_header(alg="none"),
    "no alg": with_header(alg=None),
    "alg that is a list": with_header(alg=["ES256"]),
    "HS256 with the public key as PEM": hs256(public_pem),
    "HS256 with the public key as JWK": hs256(lambda key: json.dumps(key.jwk).encode()),
    "HS256 with nothing": hs256(lambda _: b""),
    "another algorithm of the same family": with_header(alg="ES512"),
    "RS256 in name": with_header(alg="RS256"),
    # the key
    "another key under the right name": by_a_stranger(),
    "no signature": lambda key, payload: ".".join(signed(key, header(key), payload).split(".")[:2]) + ".",
    "a cut signature": lambda key, payload: signed(key, header(key), payload)[:-4],
    "another token's signature": lambda key, payload: ".".join(
        [segment(header(key)), segment(payload | {"x": 1}), signed(key, header(key), payload).split(".")[2]]
    ),
    "an unknown kid": with_header(kid="unheard-of"),
    "a kid that is a path": with_header(kid="../../../../dev/null"),
    "a kid that is a URL": with_header(kid="https://localhost:1/keys"),
    "a kid that is SQL": with_header(kid="x' UNION SELECT 'secret' --"),
    "a kid that is a number": with_header(kid=1),
    "a kid that is huge": with_header(kid="k" * 4_000),
    "its own key in jwk": by_a_stranger(jwk=STRANGER.jwk, kid=STRANGER.id),
    "its own key in jwk, truly signed": with_header(jwk=STRANGER.jwk),
    "a place for keys in jku": by_a_stranger(jku="JKU", kid=STRANGER.id),
    "a place for keys in jku, truly signed": with_header(jku="JKU"),
    "a place for certificates in x5u": by_a_stranger(x5u="JKU"),
    "a place for certificates in x5u, truly signed": with_header(x5u="JKU"),
    "certificates in x5c": with_header(x5c=["AAAA"]),
    # what must be understood
    "a critical extension": with_header(crit=["exp"], exp=LATER),
    "an empty crit": with_header(crit=[]),
    "an unencoded payload": with_header(b64=False, crit=["b64"]),
    # the type
    "typ of a session token": with_header(typ="coatcheck-session+jwt"),
    "typ of a client token": with_header(typ="coatcheck-client+jwt"),
    "typ of a logout token": with_header(typ="logout+jwt"),
    "typ of a proof of possession": with_header(typ="dpop+jwt"),
    "typ that is a list": with_header(typ=["JWT"]),
    # from whom
    "no iss": with_claims(iss=None),
    "an iss with more at its end": with_claims(iss=lambda iss: iss + ".evil.test"),
    "an iss with a slash at its end": with_claims(iss=lambda iss: iss + "/"),
    "an iss with less": with_claims(iss=lambda iss: iss[:-1]),
    "an iss in capitals": with_claims(iss=lambda iss: iss.upper()),
    "an iss that is a list": with_claims(iss=lambda iss: [iss]),
    "an issuer that nobody trusts": with_claims(iss="https://evil.test"),
    # for whom
    "no aud": with_claims(aud=None),
    "an aud that holds ours": with_claims(aud=lambda aud: f"{aud}.evil.test"),
    "an aud that ours holds": with_claims(aud=lambda aud: aud[:-1]),
    "an aud of several in one text": with_claims(aud=lambda aud: f"{aud} https://evil.test"),
    "an empty list of audiences": with_claims(aud=lambda _: []),
    "a list with somebody else too": with_claims(aud=lambda aud: [aud, "https://evil.test"]),
    "a list in a list": with_claims(aud=lambda aud: [[aud]]),
    "a list with a number": with_claims(aud=lambda aud: [aud, 1]),
    "an object as aud": with_claims(aud=lambda aud: {aud: True}),
    "for the egress proxy": with_claims(aud="coatcheck-proxy"),
    "for us and for the egress proxy": with_claims(aud=lambda aud: [aud, "coatcheck-proxy"]),
    # when
    "no exp": with_claims(exp=None),
    "over": with_claims(exp=int(time.time()) - 1),
    "over long ago": with_claims(exp=0),
    "good for ten years": with_claims(exp=LATER),
    "exp as text": with_claims(exp=lambda exp: str(exp)),
    "exp that is true": with_claims(exp=lambda _: True),
    "exp in a list": with_claims(exp=lambda exp: [exp]),
    "exp that is no number": lambda key, payload: signed(
        key, header(key), json.dumps(payload | {"exp": "N"}).replace('"N"', "NaN").encode()
    ),
    "exp that is infinite": lambda key, payload: signed(
        key, header(key), json.dumps(payload | {"exp": "N"}).replace('"N"', "Infinity").encode()
    ),
    "exp beyond all numbers": lambda key, payload: signed(
        key, header(key), json.dumps(payload | {"exp": "N"}).replace('"N"', "9" * 400).encode()
    ),
    "not before tomorrow": with_claims(nbf=int(time.time()) + 86_400),
    "issued tomorrow": with_claims(iat=int(time.time()) + 86_400),
    "nbf as text": with_claims(nbf="now"),
    # who
    "no sub": with_claims(sub=None),
    "an empty sub": with_claims(sub=""),
    "a sub that is a number": with_claims(sub=7),
    "a sub that is a list": with_claims(sub=lambda sub: [sub]),
    "half a character in sub": with_claims(sub=lambda sub: sub + "\ud800"),
    # the form
    "a claim twice": lambda key, payload: signed(
        key, header(key), (json.dumps(payload)[:-1] + f', "sub": {json.dumps(payload["sub"])}}}').encode()
    ),
    "a header twice": lambda key, payload: signed(
        key, (json.dumps(header(key))[:-1] + ', "alg": "none"}').encode(), payload
    ),
    "a payload that is a list": lambda key, payload: signed(key, header(key), [payload]),
    "a payload that is no JSON": lambda key, payload: signed(key, header(key), b"{"),
    "a payload that is deep": lambda key, payload: signed(key, header(key), b'{"a":' * 3_000 + b"1" + b"}" * 3_000),
    "padding": lambda key, payload: signed(key, header(key), payload) + "==",
    "four parts": lambda key, payload: signed(key, header(key), payload) + ".AAAA",
    "five parts, encrypted": lambda key, payload: f"{segment({'alg': 'dir', 'enc': 'A128GCM'})}..AA.AA.AA",
    "JSON serialization": lambda key, payload: json.dumps({"payload": segment(payload), "signatures": []}),
    "characters that are not base64url": lambda key, payload: signed(key, header(key), payload).replace("e", "+", 1),
}


def told(answer: httpx.Response) -> tuple[int, Json]:
    return answer.status_code, {name: value for name, value in answer.json().items() if name != "request_id"}


@pytest.mark.parametrize("place", PLACES)
def test_a_good_token_opens_its_door(doors: Doors, place: str) -> None:
    door = doors.places[place]

    for kind in ("JWT", "jwt", "application/jwt", None):
        answer = door.present(signed(door.key, header(door.key, typ=kind), door.claims()))
        assert answer.status_code in door.good, (kind, answer.text)


@pytest.mark.guards(TOKENS, "if not all(_BASE64URL.fullmatch(part) for part in parts):", "if False:")
@pytest.mark.guards(TOKENS, "if any(name in header for name in _FOREIGN_KEYS):", "if False:")
@pytest.mark.guards(TOKENS, "if _token_type(header) not in token_types:", "if False:")
@pytest.mark.guards(TOKENS, "if not set(named_in_token) & set(audiences):", "if False:")
@pytest.mark.guards(TOKENS, "if expires_at > now + max_lifetime_seconds + CLOCK_SKEW_SECONDS:", "if False:")
@pytest.mark.guards(TOKENS, "if len(found) != len(pairs):", "if False:")
@pytest.mark.parametrize("place", PLACES)
def test_every_forgery_hears_what_nonsense_hears(doors: Doors, place: str) -> None:
    door = doors.places[place]
    nonsense = told(door.present("nonsense"))

    opened = {
        name: answer
        for name, forge in FORGERIES.items()
        if (answer := told(door.present(forge(door.key, door.claims())))) != nonsense
    }

    assert nonsense[0] in (400, 401)
    assert opened == {}


BELONGS_TOO = {
    ("a session token", "subject_token"),
    # An administrator may open sessions, in a tenant that it names.
    ("GET /v1/tenants", "POST /v1/sessions"),
    # A workload's token is its client's there, too; this one may not name subjects, and hears that.
    ("client_assertion of a workload", "POST /v1/sessions"),
}


def test_a_token_for_one_door_opens_no_other(doors: Doors) -> None:
    """Session token, client token, IdP token, assertion: each is good where it belongs, and nowhere else."""
    alike = (
        {"subject_token", "subject_token, an ID token", "POST /v1/sessions"},
        {"client_assertion of its own", "client_assertion of a workload"},
    )
    tokens = {name: signed(door.key, header(door.key), door.claims()) for name, door in doors.places.items()}
    tokens["a session token"] = doors.session["session_token"]
    for place, door in doors.places.items():
        for origin, token in tokens.items():
            if any({origin, place} <= doors_alike for doors_alike in alike) or origin == place:
                continue
            if (origin, place) in BELONGS_TOO:
                continue
            answer = door.present(token)
            assert told(answer) == told(door.present("nonsense")), (origin, place, answer.text)


def test_nothing_is_fetched_on_a_forgerys_account(tmp_path: Path, own_control_plane: OwnControlPlane) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    with Upstream(ca) as elsewhere:
        # Even where the place that a token names could be reached.
        plane = own_control_plane(
            outbound_ca_files=(tmp_path / "ca.pem",), outbound_allow=(f"localhost:{elsewhere.port}",)
        )
        doors = Doors(plane)
        for door in doors.places.values():
            for fields in (
                {"jku": f"{elsewhere.url}/keys"},
                {"x5u": f"{elsewhere.url}/c"},
                {"kid": f"{elsewhere.url}/k"},
            ):
                for key in (door.key, STRANGER):
                    assert door.present(signed(key, header(door.key, **fields), door.claims())).status_code in (
                        400,
                        401,
                    )
            named = with_claims(iss=elsewhere.url)(door.key, door.claims())
            assert door.present(named).status_code in (400, 401)

        assert elsewhere.requests == []


def test_an_issuer_is_believed_for_its_own_keys_alone(doors: Doors) -> None:
    """Signed by one trusted issuer, in the name of another."""
    for place, door in doors.places.items():
        for key in (doors.people.key, doors.staff.key, doors.cluster.key, doors.keyed_by):
            if key is not door.key:
                answer = door.present(signed(key, header(key), door.claims()))
                assert told(answer) == told(door.present("nonsense")), place
