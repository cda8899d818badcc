"""Who asks: proven wrongly, by somebody else, or not at all; and placeholders that are good no more."""

import base64
import json
from collections.abc import Callable, Iterable
from dataclasses import replace

from tests.attacks.attack import Attack, Verdict, attacks, refuses
from tests.attacks.ways import Way, head

_CLAIMED = (
    "X-Forwarded-For: 127.0.0.1",
    "X-Real-IP: 127.0.0.1",
    "Forwarded: for=127.0.0.1",
    "X-Forwarded-Client-Cert: Hash=0;URI=spiffe://cluster.local/ns/agents/sa/runtime",
    "X-Client-Cert: MIIB",
    "X-Forwarded-User: alice",
    "X-Tenant: acme",
)


def _proven(lines: Callable[[Way], Iterable[str]]) -> Callable[[Way], Verdict]:
    """The request that may go, with this instead of the caller's proof."""

    def run(way: Way) -> Verdict:
        proof = tuple(lines(way))
        if way.is_tunnel:
            authority = way.origin.authority
            return refuses(way, head(f"CONNECT {authority} HTTP/1.1", f"Host: {authority}", *proof), line=way.dial())
        lines_of_request = [f"Host: {way.host}", *proof, *way.slot()]
        return refuses(way, head(f"GET {way.target()} HTTP/1.1", *lines_of_request))

    return run


def _said(line: str) -> Callable[[Way], Iterable[str]]:
    return lambda way: (line,)


def _altered(way: Way) -> Iterable[str]:
    """The proof with its last letter changed."""
    for line in way.proof:
        name, _, value = line.partition(": ")
        scheme, _, text = value.partition(" ")
        if scheme.lower() == "basic":
            user, _, password = base64.b64decode(text).decode().partition(":")
            yield f"{name}: {scheme} " + base64.b64encode(f"{user}:{_turned(password)}".encode()).decode()
        else:
            yield f"{name}: {scheme} {_turned(text)}"


def _turned(text: str) -> str:
    return text[:-1] + ("A" if text[-1] != "A" else "B")


def _jwt(algorithm: str, **claims: object) -> str:
    parts = [{"alg": algorithm, "typ": "JWT", "kid": "../../dev/null", "jku": "https://example.com/keys"}, claims]
    encoded = [base64.urlsafe_b64encode(json.dumps(each).encode()).decode().rstrip("=") for each in parts]
    return ".".join([*encoded, "" if algorithm == "none" else "AAAA"])


_TOKENS = {
    "alg none": _jwt("none", sub="alice", aud="coatcheck-proxy", exp=4102444800),
    "alg None": _jwt("None", sub="alice", aud="coatcheck-proxy", exp=4102444800),
    "HS256": _jwt("HS256", sub="alice", aud="coatcheck-proxy", exp=4102444800),
    "without an end": _jwt("RS256", sub="alice", aud="coatcheck-proxy"),
    "aud as a prefix": _jwt("RS256", sub="alice", aud="coatcheck-proxy.example.com", exp=4102444800),
    "two parts": "e30.e30",
    "four parts": "e30.e30.e30.e30",
    "not JSON": "AAAA.AAAA.AAAA",
    "very long": "A" * 12_000,
}

_PROOFS: list[tuple[str, Callable[[Way], Verdict]]] = [
    ("none", _proven(lambda way: ())),
    ("altered", _proven(_altered)),
    ("twice", _proven(lambda way: (*way.proof, *way.proof))),
    ("another scheme", _proven(lambda way: ("Proxy-Authorization: Digest username=x",))),
    ("empty", _proven(lambda way: ("Proxy-Authorization: ",))),
    ("bad base64", _proven(lambda way: ("Proxy-Authorization: Basic %%%",))),
    ("the placeholder itself", _proven(lambda way: (f"Proxy-Authorization: Bearer {way.placeholder}",))),
    *((f"claimed by {line.partition(':')[0]}", _proven(_said(line))) for line in _CLAIMED),
]


def _by_a_stranger(way: Way) -> Verdict:
    """Somebody else who may go there, with a placeholder that is not theirs."""
    other = replace(way, proof=way.stranger)
    return refuses(way, other.request(), line=other.open())


def _dead(way: Way) -> Verdict:
    for name, placeholder in way.dead.items():
        if verdict := refuses(way, way.request(placeholder=placeholder)):
            return f"{name}: {verdict}"
    return ""


ATTACKS: list[Attack] = [
    *attacks("identity of the caller", _PROOFS),
    *attacks("identity of the caller", [("another tenant's caller", _by_a_stranger)]),
    *attacks(
        "token confusion",
        [(name, _proven(_said(f"Proxy-Authorization: Bearer {token}"))) for name, token in _TOKENS.items()],
    ),
    *attacks("stale or expired secret", [("expired, revoked, unknown, forged", _dead)]),
]
