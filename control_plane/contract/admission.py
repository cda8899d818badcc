"""What a caller may reach, with and without a credential: the rules of every request, as a policy and grants have them.

Rule: pure, and the one place where they stand. The egress proxy decides by them, and the control plane answers by them
what a request would get (`coatcheck access check`), so that the two cannot drift apart. What is not clearly admitted is
refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NoReturn

from control_plane.contract.address import is_public
from control_plane.contract.destination import DEFAULT_PORTS, AllowRule, Destination, Endpoint, authority, is_ip_literal
from control_plane.contract.grant import GrantScope
from control_plane.contract.placement import BasicPlacement, HeaderPlacement, PathPlacement, Placement, QueryPlacement
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.wire import BoundLimit, Measure, Policy


@dataclass(frozen=True, slots=True)
class Handling:
    """How a request is treated on its way and back, as its destination has it (see `contract.destination`)."""

    allow_private: bool = False
    websocket: bool = False
    ranges: bool = False
    unsearchable: bool = False
    strict: bool = False
    ca_pem: str | None = None

    @classmethod
    def of(cls, admitting: Sequence[Destination]) -> "Handling":
        """Of the destinations that each admit the request: what one of them allows is allowed, what one demands is
        demanded."""
        return cls(
            allow_private=any(d.allow_private for d in admitting),
            websocket=any(d.websocket for d in admitting),
            ranges=any(d.ranges for d in admitting),
            unsearchable=any(d.unsearchable for d in admitting),
            strict=any(d.strict for d in admitting),
            ca_pem=next((d.ca_pem for d in admitting if d.ca_pem is not None), None),
        )

    @classmethod
    def of_all(cls, each: Sequence["Handling"]) -> "Handling":
        """Of several credentials in one request: only what all of them allow. Raises `RefusedError`."""
        if len({handling.ca_pem for handling in each}) > 1:
            _refuse(
                RefusalCode.DESTINATION_DENIED,
                "Two credentials of the request trust different certificates for this destination.",
                "Give both the same ca_pem, or send them in requests of their own.",
            )
        return cls(
            allow_private=all(handling.allow_private for handling in each),
            websocket=all(handling.websocket for handling in each),
            ranges=all(handling.ranges for handling in each),
            unsearchable=all(handling.unsearchable for handling in each),
            strict=any(handling.strict for handling in each),
            ca_pem=each[0].ca_pem,
        )


def admit_tunnel(policy: Policy, endpoint: Endpoint) -> AllowRule | None:
    """Whether a CONNECT to this place may be answered; the rule by which it goes through unopened, None where it is
    intercepted. A place that has a credential is never left unopened. Raises `RefusedError`."""
    bound = any(d.endpoint == endpoint for route in policy.routes for d in route.destinations)
    rules = [
        rule
        for rule in policy.allow
        if rule.host == endpoint.host and (rule.port or DEFAULT_PORTS["https"]) == endpoint.port
    ]
    if not bound and not rules:
        _refuse_destination(endpoint)
    return None if bound else next((rule for rule in rules if rule.tunnel and rule.methods is None), None)


def admit_bare(policy: Policy, endpoint: Endpoint, method: str, raw_path: str, now: float) -> Handling:
    """Whether a request without a credential may go, and how. Raises `RefusedError`."""
    here = [route for route in policy.routes if any(d.endpoint == endpoint for d in route.destinations)]
    if any(route.credential_required for route in here):
        _refuse(
            RefusalCode.CREDENTIAL_REQUIRED,
            "This destination takes no request without its credential.",
            "Send the placeholder in the credential's placement.",
        )
    for rule in policy.allow:
        if rule.admits(endpoint, method):
            return Handling(
                allow_private=rule.allow_private,
                strict=any(d.strict for route in here for d in route.destinations if d.endpoint == endpoint),
            )
    if not here:
        if endpoint.scheme == "http" and _has_credential(policy, endpoint.host):
            _refuse_plaintext()
        if any(rule.host == endpoint.host and rule.methods is not None for rule in policy.allow):
            _refuse(RefusalCode.METHOD_DENIED, "The rule for this host does not allow this method.")
        _refuse_destination(endpoint)
    denied: RefusedError | None = None
    for route in here:
        try:
            return _admit(route.destinations, route.scopes, endpoint, method, raw_path, now)
        except RefusedError as refused:
            denied = refused
    assert denied is not None
    raise denied


def admit_swap(
    destinations: Sequence[Destination],
    scopes: Sequence[GrantScope],
    endpoint: Endpoint,
    method: str,
    raw_path: str,
    now: float,
) -> Handling:
    """Whether a request with a credential of these destinations may go, under these grants. Raises `RefusedError`."""
    here = [d.endpoint.scheme for d in destinations if d.endpoint.host == endpoint.host]
    if endpoint.scheme == "http" and here and "http" not in here:
        _refuse_plaintext()
    return _admit(destinations, scopes, endpoint, method, raw_path, now)


def _admit(
    destinations: Sequence[Destination],
    scopes: Sequence[GrantScope],
    endpoint: Endpoint,
    method: str,
    raw_path: str,
    now: float,
) -> Handling:
    """One destination and one grant must admit endpoint, path and method."""
    here = [d for d in destinations if d.endpoint == endpoint]
    live = [scope for scope in scopes if scope.is_live(now) and scope.admits_endpoint(endpoint)]
    if not here:
        _refuse(
            RefusalCode.DESTINATION_DENIED,
            "The credential is not for this destination.",
            "See 'coatcheck credential show' for the destinations it has.",
        )
    if not live:
        _refuse(
            RefusalCode.DESTINATION_DENIED,
            "No grant of this caller is for this destination (any more).",
            "See 'coatcheck grant list'.",
        )
    on_path = [d for d in here if d.admits_path(raw_path)]
    in_path = [scope for scope in live if scope.admits_path(raw_path)]
    if not on_path or not in_path:
        _refuse(
            RefusalCode.PATH_DENIED,
            "The path is outside what the credential or its grant covers, or is not in plain form.",
            "Send the path without dot segments, '//', ';', '\\' or encoded slashes.",
        )
    admitting = [d for d in on_path if d.admits_method(method)]
    if not admitting or not any(scope.admits_method(method) for scope in in_path):
        _refuse(RefusalCode.METHOD_DENIED, "The credential or its grant does not cover this method.")
    return Handling.of(admitting)


def admit_placement(placements: Sequence[Placement], placement: Placement) -> None:
    """Whether a credential's placeholder may stand there. Raises `RefusedError`."""
    if placement not in placements:
        refuse_placement(placement_in_words(placement))


def placement_in_words(placement: Placement) -> str:
    """As the proxy says it of a request, without a format."""
    match placement:
        case HeaderPlacement(name=name):
            return f"the header {name}"
        case BasicPlacement():
            return "the Basic credentials in the header authorization"
        case QueryPlacement(parameter=parameter):
            return f"the query parameter {parameter}"
        case PathPlacement():
            return "a path segment"


def refuse_placement(seen: str) -> NoReturn:
    """`seen` says where it stands, without what stands there."""
    _refuse(
        RefusalCode.PLACEMENT_DENIED,
        f"The placeholder was seen in {seen}, and that is not just as its credential declares its place.",
        "Send it once, as it is, in the placement that the exchange answer names.",
    )


def refuse_websocket() -> NoReturn:
    """Of a destination that does not allow it (`Handling.websocket`)."""
    _refuse(
        RefusalCode.PROTOCOL_DENIED,
        "The credential's destination allows no WebSocket: what its frames carry cannot be searched.",
        "Have the operator allow it for this destination (coatcheck credential add … --websocket).",
    )


def refuse_foreign_key() -> NoReturn:
    """Of a strict destination (`Handling.strict`)."""
    _refuse(
        RefusalCode.FOREIGN_CREDENTIAL,
        "The request carries a key that is not a placeholder, and this destination takes none.",
        "Send the placeholder of the credential for it, and no other key, in whatever field.",
    )


def refuse_used_up(limit: BoundLimit, *, resets_in_seconds: float) -> NoReturn:
    """Of a limit of which nothing is left in this window."""
    raise RefusedError(
        Refusal(
            RefusalCode.RATE_LIMITED if limit.measure is Measure.REQUESTS else RefusalCode.SPEND_LIMIT_EXCEEDED,
            f"The limit of {limit.amount} {limit.measure.value} in {limit.window_seconds} s is used up.",
            "Wait for the next window; an operator sees limits with: coatcheck limit list",
            max(1, ceil(resets_in_seconds)),
        )
    )


def _has_credential(policy: Policy, host: str) -> bool:
    return any(d.endpoint.host == host for route in policy.routes for d in route.destinations)


def _refuse_plaintext() -> NoReturn:
    _refuse(
        RefusalCode.PLAINTEXT_CREDENTIAL,
        "This host has a credential, and a credential does not travel over plain http.",
        "Use https://.",
    )


def _refuse_destination(endpoint: Endpoint) -> NoReturn:
    place = authority(endpoint.host, endpoint.port, endpoint.scheme)
    if is_ip_literal(endpoint.host) and not is_public(endpoint.host):
        _refuse(
            RefusalCode.DESTINATION_DENIED,
            f"{place} is an internal address, and nobody named it as a destination.",
            "If it is meant, an operator adds it as a credential's destination with --allow-private.",
        )
    _refuse(
        RefusalCode.DESTINATION_DENIED,
        f"{place} has no credential granted to this caller, and no rule allows it.",
        f"To allow it without a credential: coatcheck allow add {place}",
    )


def _refuse(code: RefusalCode, detail: str, hint: str = "") -> NoReturn:
    raise RefusedError(Refusal(code, detail, hint))
