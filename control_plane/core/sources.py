"""What a source may be, and which place a tenant's name means in it.

Rule: the platform's administrator writes the template, a tenant gives one name without separators, and the two parts
that vary never share a segment of the path. So no name, and no pair of tenant and name, means another tenant's place.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from control_plane.core.names import NAME_IN_SOURCE, TENANT_ID
from control_plane.core.records import Source, SourceKind
from control_plane.core.urls import InvalidUrlError, parse_outbound_url

MIN_TTL_SECONDS: Final = 1.0
MAX_TTL_SECONDS: Final = 86_400.0
MAX_STALE_SECONDS: Final = 86_400.0
DEFAULT_TTL_SECONDS: Final = 60.0

_TENANT: Final = "{tenant}"
_NAME: Final = "{name}"
_SEGMENT: Final = re.compile(r"[A-Za-z0-9._{}-]{1,128}")
_PLAIN: Final = re.compile(r"[A-Za-z0-9._-]*")
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FIELD: Final = re.compile(r"[A-Za-z0-9._{}-]{1,128}")
_MOUNT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,63}){0,3}")
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,63}){0,7}")
_REGION: Final = re.compile(r"[a-z]{2}(-[a-z]{2,12}){1,3}-[0-9]{1,2}")
_ROLE_ARN: Final = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[A-Za-z0-9+=,.@_/-]{1,128}")
_ROLE: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")

_OF_THE_PLATFORM_ALONE: Final = frozenset({SourceKind.FILE, SourceKind.KUBERNETES})
"""Kinds that read with the control plane's own rights."""

KUBERNETES_PARTS: Final = 3
"""`namespace/secret/key`."""


class InvalidSourceError(ValueError):
    """`field` is the one at fault; the message says what was expected and repeats nothing."""

    def __init__(self, field: str, expected: str) -> None:
        super().__init__(expected)
        self.field = field


@dataclass(frozen=True, slots=True)
class VaultAuth:
    """`token`, `kubernetes` (a projected token's file) or `approle`. Files are names inside the folder for these."""

    method: str
    mount: str
    role: str | None
    token_file: str | None
    role_id_file: str | None
    secret_id_file: str | None


@dataclass(frozen=True, slots=True)
class VaultPlace:
    address: str
    mount: str
    kv_version: int
    field: str
    namespace: str | None
    auth: VaultAuth


@dataclass(frozen=True, slots=True)
class AwsAuth:
    """`keys` (a file in the form of ~/.aws/credentials) or `web_identity` (a projected token and a role)."""

    method: str
    keys_file: str | None
    token_file: str | None
    role_arn: str | None


@dataclass(frozen=True, slots=True)
class AwsPlace:
    region: str
    endpoint: str | None
    field: str | None
    auth: AwsAuth


def may_name(source: Source, *, tenant: str, by_platform: bool) -> bool:
    """Whether a credential of that tenant may be made to read from it, by the platform's administrator or its own.

    `file` and `kubernetes` read with our own rights: a tenant's administrator may name them only where the platform's
    has listed that tenant. The platform's administrator may name whatever is open to the tenant at all.
    """
    if source.tenants is not None:
        return tenant in source.tenants
    return by_platform or source.kind not in _OF_THE_PLATFORM_ALONE


def path_of(source: Source, *, tenant: str, name: str) -> str:
    """The one place that this name of this tenant means. Raises `InvalidSourceError`."""
    if not re.fullmatch(TENANT_ID, tenant) or not re.fullmatch(NAME_IN_SOURCE, name):
        raise InvalidSourceError("name", "1 to 64 letters, digits, '_' and '-' are expected")
    return filled(source.path_template, tenant=tenant, name=name)


def filled(template: str, *, tenant: str, name: str) -> str:
    return template.replace(_TENANT, tenant).replace(_NAME, name)


def check_source(source: Source) -> None:
    """Raises `InvalidSourceError`."""
    if not MIN_TTL_SECONDS <= source.ttl_seconds <= MAX_TTL_SECONDS:
        raise InvalidSourceError("ttl_seconds", "1 to 86400 are expected")
    if source.tenants is not None and not source.tenants:
        raise InvalidSourceError("tenants", "at least one tenant is expected, or none of this field at all")
    _check_template(source)
    match source.kind:
        case SourceKind.VAULT:
            vault_place(source)
        case SourceKind.AWS_SECRETS_MANAGER:
            aws_place(source)
        case SourceKind.FILE | SourceKind.KUBERNETES:
            _Facts(source.settings, "settings").end()


def vault_place(source: Source) -> VaultPlace:
    """Raises `InvalidSourceError`."""
    facts = _Facts(source.settings, "vault")
    auth = _Facts(facts.take("auth", dict), "vault.auth")
    method = auth.one_of("method", "token", "kubernetes", "approle")
    place = VaultPlace(
        address=facts.checked("address", is_https_origin, "https://host[:port] is expected"),
        mount=facts.matching("mount", _MOUNT, default="secret"),
        kv_version=2 if facts.one_of("kv_version", "1", "2", default="2") == "2" else 1,
        field=facts.matching("field", _FIELD, default="value"),
        namespace=facts.optional("namespace", _NAMESPACE),
        auth=VaultAuth(
            method=method,
            mount=auth.matching("mount", _MOUNT, default=method),
            role=auth.matching("role", _ROLE) if method == "kubernetes" else None,
            token_file=auth.matching("token_file", _FILE_NAME) if method in ("token", "kubernetes") else None,
            role_id_file=auth.matching("role_id_file", _FILE_NAME) if method == "approle" else None,
            secret_id_file=auth.matching("secret_id_file", _FILE_NAME) if method == "approle" else None,
        ),
    )
    auth.end()
    facts.end()
    return place


def aws_place(source: Source) -> AwsPlace:
    """Raises `InvalidSourceError`."""
    facts = _Facts(source.settings, "aws")
    auth = _Facts(facts.take("auth", dict), "aws.auth")
    method = auth.one_of("method", "keys", "web_identity")
    place = AwsPlace(
        region=facts.matching("region", _REGION),
        endpoint=facts.checked("endpoint", is_https_origin, "https://host[:port] is expected", needed=False) or None,
        field=facts.optional("field", _FIELD),
        auth=AwsAuth(
            method=method,
            keys_file=auth.matching("keys_file", _FILE_NAME) if method == "keys" else None,
            token_file=auth.matching("token_file", _FILE_NAME) if method == "web_identity" else None,
            role_arn=auth.matching("role_arn", _ROLE_ARN) if method == "web_identity" else None,
        ),
    )
    auth.end()
    facts.end()
    return place


def is_https_origin(url: str) -> bool:
    try:
        return parse_outbound_url(url).target == "/" and not url.endswith("/")
    except InvalidUrlError:
        return False


def _check_template(source: Source) -> None:
    segments = source.path_template.split("/")
    if len(source.path_template) > 512 or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        raise InvalidSourceError(
            "path_template", "segments of letters, digits, '.', '_' and '-', separated by '/', are expected"
        )
    for segment in segments:
        rest = segment.replace(_TENANT, "", 1) if _TENANT in segment else segment.replace(_NAME, "", 1)
        # Two parts that vary in one segment would let "a-b" and "c" mean what "a" and "b-c" do.
        if not _PLAIN.fullmatch(rest) or set(segment) <= {"."}:
            raise InvalidSourceError("path_template", "each segment holds {tenant} or {name} at most once, never both")
    if source.path_template.count(_TENANT) != 1:
        raise InvalidSourceError("path_template", "{tenant} is expected exactly once")
    if _NAME not in source.path_template and _NAME not in str(source.settings.get("field", "")):
        raise InvalidSourceError("path_template", "{name} is expected at least once")
    if source.kind is SourceKind.KUBERNETES and len(segments) != KUBERNETES_PARTS:
        raise InvalidSourceError("path_template", "namespace/secret/key is expected")


class _Facts:
    """Settings of one kind, each taken once; what is left at the end is nobody's."""

    def __init__(self, facts: Mapping[str, Any], where: str) -> None:
        self._left = dict(facts)
        self._where = where

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        value = self._left.pop(name, default)
        if not isinstance(value, kind):
            raise InvalidSourceError(f"{self._where}.{name}", "it is needed" if value is None else "another type")
        return value

    def checked(self, name: str, right: Callable[[str], bool], expected: str, *, needed: bool = True) -> str:
        value: str = self.take(name, str, default=None if needed else "")
        if (value or needed) and not right(value):
            raise InvalidSourceError(f"{self._where}.{name}", expected)
        return value

    def matching(self, name: str, pattern: re.Pattern[str], default: str | None = None) -> str:
        value: str = self.take(name, str, default)
        if not pattern.fullmatch(value):
            raise InvalidSourceError(f"{self._where}.{name}", f"something like {pattern.pattern} is expected")
        return value

    def optional(self, name: str, pattern: re.Pattern[str]) -> str | None:
        return self.matching(name, pattern) if self._left.get(name) is not None else self._left.pop(name, None)

    def one_of(self, name: str, *values: str, default: str | None = None) -> str:
        value: str = self.take(name, str, default)
        if value not in values:
            raise InvalidSourceError(f"{self._where}.{name}", f"one of {', '.join(values)} is expected")
        return value

    def end(self) -> None:
        if self._left:
            raise InvalidSourceError(f"{self._where}.{min(self._left)}", "there is no such setting")
