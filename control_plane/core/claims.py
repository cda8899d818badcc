"""The claims table of an issuer: what is made of each claim of its tokens.

Rule: every claim is accounted for. It is checked for every issuer (`REGISTERED`), or the table derives something from
it, requires a value of it, or lists it as known and ignored. A table that says nothing is an error, an empty map too.
A value that does not fit is refused; it is never passed on as it is.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, TypeAdapter

from control_plane.contract.caller import SubjectId, TenantId
from control_plane.core.names import PRINTABLE, TENANT_ID
from control_plane.core.patterns import Pattern
from control_plane.core.policy import HeldRole, Role
from control_plane.core.tokens import InvalidTokenError

MAX_VALUE_CHARACTERS: Final = 1_024
MAX_ROLES: Final = 64

REGISTERED: Final = frozenset({"iss", "aud", "exp", "nbf", "iat", "jti", "act", "may_act"})
"""Claims that every token's verification looks at itself, or that say for whom it may be used (RFC 8693 §4)."""


def _path(text: str) -> str:
    """A claim's name, or a JSON pointer (RFC 6901) to what is inside one: `/realm_access/roles`."""
    if not text or len(text) > 255 or not text.isprintable():
        raise ValueError("a claim's name, or '/name/inside' for what is inside one")
    if text.startswith("/") and not all(_steps(text)):
        raise ValueError("a claim's name, or '/name/inside' for what is inside one")
    return text


def _pattern(text: str) -> str:
    Pattern(text)
    return text


ClaimPath = Annotated[str, AfterValidator(_path)]
PatternText = Annotated[str, AfterValidator(_pattern)]
_Tenant = Annotated[str, StringConstraints(pattern=TENANT_ID)]
_Printable = Annotated[str, StringConstraints(pattern=PRINTABLE)]
_Value = Annotated[str, StringConstraints(min_length=1, max_length=MAX_VALUE_CHARACTERS)]
_Expected = Annotated[str, StringConstraints(min_length=1, max_length=255)] | bool | int

_CLOSED: Final = ConfigDict(extra="forbid", hide_input_in_errors=True)


@dataclass(frozen=True, slots=True)
class TenantRule:
    """Whose token it is: always the same tenant's (`fixed`), or what a claim says, through a pattern and a map."""

    __pydantic_config__ = _CLOSED

    fixed: _Tenant | None = None
    claim: ClaimPath | None = None
    pattern: PatternText | None = None
    map: dict[_Value, _Tenant] | None = None

    def __post_init__(self) -> None:
        if (self.fixed is None) == (self.claim is None):
            raise ValueError("give either 'fixed' or 'claim'")
        if self.fixed is not None and (self.pattern is not None or self.map is not None):
            raise ValueError("'pattern' and 'map' are for a 'claim'")
        _require_meaning(self.map)


@dataclass(frozen=True, slots=True)
class SubjectRule:
    """Who it is. `prefix` keeps the subjects of two issuers of one tenant apart."""

    __pydantic_config__ = _CLOSED

    claim: ClaimPath = "sub"
    pattern: PatternText | None = None
    map: dict[_Value, _Printable] | None = None
    prefix: Annotated[str, StringConstraints(max_length=64)] = ""

    def __post_init__(self) -> None:
        _require_meaning(self.map)


@dataclass(frozen=True, slots=True)
class RolesRule:
    """Roles within the tenant, for grants by role. Without a map a value is a role as it stands."""

    __pydantic_config__ = _CLOSED

    claim: ClaimPath
    map: dict[_Value, list[_Printable]] | None = None

    def __post_init__(self) -> None:
        _require_meaning(self.map)


@dataclass(frozen=True, slots=True)
class AdminEntry:
    __pydantic_config__ = _CLOSED

    role: Role
    tenant: _Tenant | None = None
    """Of a tenant's role: which. None: the token's own tenant."""

    def __post_init__(self) -> None:
        if self.tenant is not None and not self.role.is_of_one_tenant:
            raise ValueError("a platform's role has no tenant")


@dataclass(frozen=True, slots=True)
class AdminRule:
    """Roles in the administrators' API. Only what the map names."""

    __pydantic_config__ = _CLOSED

    claim: ClaimPath
    map: dict[_Value, AdminEntry]

    def __post_init__(self) -> None:
        _require_meaning(self.map)


@dataclass(frozen=True, slots=True)
class ClaimsTable:
    """What is made of an issuer's claims. Raises `ValueError` where it says nothing."""

    __pydantic_config__ = _CLOSED

    subject: SubjectRule | None = None
    tenant: TenantRule | None = None
    roles: RolesRule | None = None
    admin: AdminRule | None = None
    require: dict[ClaimPath, Annotated[list[_Expected], Field(min_length=1, max_length=64)]] = field(
        default_factory=dict
    )
    """Claims that must have one of these values. Text may be a pattern; of a list one element must fit."""
    ignore: list[Annotated[str, StringConstraints(min_length=1, max_length=255)]] = field(default_factory=list)
    """Claims that are known and mean nothing here."""

    def __post_init__(self) -> None:
        if self.subject is None:
            raise ValueError("the table is empty: say at least who the subject is")
        for values in self.require.values():
            for value in values:
                if isinstance(value, str) and Pattern(value).takes_a_value:
                    raise ValueError("{value} has no meaning in 'require'")

    @property
    def accounted(self) -> frozenset[str]:
        """The names of the claims that the table says something about."""
        paths = [rule.claim for rule in (self.subject, self.tenant, self.roles, self.admin) if rule and rule.claim]
        return frozenset(_steps(path)[0] for path in (*paths, *self.require)) | frozenset(self.ignore)


_TABLE: Final = TypeAdapter(ClaimsTable)


def _require_meaning(mapping: Mapping[str, Any] | None) -> None:
    if mapping is not None and not mapping:
        raise ValueError("an empty 'map' lets nothing through; leave it out or fill it")


def table_to_json(table: ClaimsTable) -> dict[str, Any]:
    """Without what is absent."""
    shown: dict[str, Any] = _TABLE.dump_python(table, mode="json", exclude_none=True)
    return shown


def first_step(path: str | None) -> str | None:
    """The claim in which a path begins."""
    return _steps(path)[0] if path is not None else None


def unknown_claims(payload: Mapping[str, Any], table: ClaimsTable) -> list[str]:
    return sorted(payload.keys() - REGISTERED - table.accounted)


def require_claims(payload: Mapping[str, Any], table: ClaimsTable) -> None:
    """Raises `InvalidTokenError`."""
    for path, expected in table.require.items():
        if not _is_among(_at(payload, path), expected):
            raise InvalidTokenError(f"claims: '{path}' has none of the required values")


def derived_tenant(payload: Mapping[str, Any], rule: TenantRule) -> TenantId:
    """Raises `InvalidTokenError`."""
    if rule.claim is None:
        return TenantId(str(rule.fixed))
    value = _taken(_text(payload, rule.claim), rule.claim, rule.pattern, rule.map)
    if re.fullmatch(TENANT_ID, value) is None:
        raise InvalidTokenError(f"claims: '{rule.claim}' gives no name of a tenant")
    return TenantId(value)


def derived_subject(payload: Mapping[str, Any], rule: SubjectRule | None) -> SubjectId:
    """Raises `InvalidTokenError`."""
    if rule is None:
        raise InvalidTokenError("subject: the table does not say who it is")
    value = rule.prefix + _taken(_text(payload, rule.claim), rule.claim, rule.pattern, rule.map)
    if re.fullmatch(PRINTABLE, value) is None:
        raise InvalidTokenError(f"claims: '{rule.claim}' gives no name of a subject")
    return SubjectId(value)


def derived_roles(payload: Mapping[str, Any], rule: RolesRule | None) -> tuple[str, ...]:
    """Raises `InvalidTokenError`. A claim that is not there gives no roles."""
    if rule is None:
        return ()
    values = _texts(payload, rule.claim)
    roles = values if rule.map is None else [role for value in values for role in rule.map.get(value, ())]
    if len(roles) > MAX_ROLES or not all(re.fullmatch(PRINTABLE, role) for role in roles):
        raise InvalidTokenError(f"claims: '{rule.claim}' gives no roles, or too many")
    return tuple(dict.fromkeys(roles))


def admin_roles(payload: Mapping[str, Any], rule: AdminRule | None, tenant: TenantId | None) -> frozenset[HeldRole]:
    entries = [rule.map[value] for value in _texts(payload, rule.claim) if value in rule.map] if rule else []
    held = set()
    for entry in entries:
        of_tenant = (TenantId(entry.tenant) if entry.tenant else tenant) if entry.role.is_of_one_tenant else None
        if entry.role.is_of_one_tenant and of_tenant is None:
            raise InvalidTokenError("admin: a tenant's role, and no tenant")
        held.add(HeldRole(entry.role, of_tenant))
    return frozenset(held)


def _steps(path: str) -> list[str]:
    if not path.startswith("/"):
        return [path]
    return [step.replace("~1", "/").replace("~0", "~") for step in path[1:].split("/")]


def _at(payload: Mapping[str, Any], path: str) -> Any:
    """None where nothing is there. (A claim that is null is as good as none.)"""
    found: Any = payload
    for step in _steps(path):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _text(payload: Mapping[str, Any], path: str) -> str:
    found = _at(payload, path)
    if not _is_text(found):
        raise InvalidTokenError(f"claims: '{path}' is missing, or not text")
    return str(found)


def _texts(payload: Mapping[str, Any], path: str) -> list[str]:
    found = _at(payload, path)
    if found is None:
        return []
    values = [found] if isinstance(found, str) else found
    if not isinstance(values, list) or not all(_is_text(value) for value in values):
        raise InvalidTokenError(f"claims: '{path}' is neither text nor a list of texts")
    return values


def _is_text(value: Any) -> bool:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_VALUE_CHARACTERS:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which no database takes
        return False
    return True


def _taken(value: str, path: str, pattern: str | None, mapping: Mapping[str, str] | None) -> str:
    taken = Pattern(pattern).value(value) if pattern is not None else value
    if taken is None:
        raise InvalidTokenError(f"claims: '{path}' does not fit its pattern")
    if mapping is None:
        return taken
    if taken not in mapping:
        raise InvalidTokenError(f"claims: '{path}' has a value that the map does not know")
    return mapping[taken]


def _is_among(found: Any, expected: Sequence[str | bool | int]) -> bool:
    values = found if isinstance(found, list) else [found]
    return any(_equals(value, each) for value in values for each in expected)


def _equals(value: Any, expected: str | bool | int) -> bool:
    if isinstance(expected, str):
        return _is_text(value) and Pattern(expected).fits(value)
    return type(value) is type(expected) and bool(value == expected)
