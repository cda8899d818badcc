"""What `scope` of an exchange means: a placeholder that may do less than its grants (RFC 6749 §3.3, RFC 8693 §2.1).

    read            the methods GET, HEAD and OPTIONS
    method:POST     that method
    path:/v1/chat   paths under that prefix

Methods add up, and so do paths; a kind that is not named is not narrowed. Rule: what is issued admits exactly what was
asked for, and where the grants do not cover all of it nothing is issued. A scope never widens anything.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from control_plane.contract.destination import (
    Destination,
    InvalidDestinationError,
    check_methods,
    check_path_prefix,
    path_is_within,
)
from control_plane.contract.grant import GrantScope

READ: Final = "read"
READ_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
METHOD: Final = "method:"
PATH: Final = "path:"
MAX_SCOPE_CHARACTERS: Final = 1_024

_TOKENS: Final = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]+(?: [\x21\x23-\x5b\x5d-\x7e]+)*")  # RFC 6749 §3.3


class InvalidScopeError(ValueError):
    """Not a scope of ours; the message says which form one has."""


@dataclass(frozen=True, slots=True)
class Narrowing:
    """What a placeholder is narrowed to, beyond its grants. None: not narrowed in that respect."""

    methods: frozenset[str] | None = None
    path_prefixes: frozenset[str] | None = None


def read_scope(scope: str) -> Narrowing:
    """Raises `InvalidScopeError`. An empty text narrows nothing."""
    if not scope:
        return Narrowing()
    if len(scope) > MAX_SCOPE_CHARACTERS or _TOKENS.fullmatch(scope) is None:
        raise InvalidScopeError("a scope is words separated by single spaces")
    methods: set[str] = set()
    paths: set[str] = set()
    for word in scope.split(" "):
        if word == READ:
            methods |= READ_METHODS
        elif word.startswith(METHOD):
            methods.add(word[len(METHOD) :])
        elif word.startswith(PATH):
            paths.add(word[len(PATH) :])
        else:
            raise InvalidScopeError(f"a scope is '{READ}', '{METHOD}NAME' or '{PATH}/prefix'")
    try:
        check_methods(frozenset(methods) or None)
        for path in paths:
            check_path_prefix(path)
    except InvalidDestinationError as error:
        raise InvalidScopeError(str(error)) from None
    return Narrowing(frozenset(methods) or None, frozenset(paths) or None)


def covers(narrowing: Narrowing, *, grants: Sequence[GrantScope], destinations: Sequence[Destination]) -> bool:
    """Whether every request that the narrowing speaks of is admitted by a grant, and by a destination."""
    return all(
        any(_grant_covers(grant, method, path) for grant in grants)
        and any(_destination_covers(destination, method, path) for destination in destinations)
        for method in narrowing.methods or (None,)
        for path in narrowing.path_prefixes or (None,)
    )


def narrowed(grants: Iterable[GrantScope], narrowing: Narrowing) -> tuple[GrantScope, ...]:
    """The grants, each with what the narrowing leaves of it. One of which nothing is left is gone."""
    left = []
    for grant in grants:
        methods = _both(grant.methods, narrowing.methods)
        prefixes = _common_prefixes(grant.path_prefixes, narrowing.path_prefixes)
        if methods != frozenset() and prefixes != frozenset():
            left.append(GrantScope(grant.endpoints, methods, prefixes, grant.until))
    return tuple(left)


def narrowed_by_token(grants: Iterable[GrantScope], scope: str) -> tuple[GrantScope, ...]:
    """What a placeholder of that scope may do under these grants. A scope that cannot be read leaves nothing."""
    try:
        return narrowed(grants, read_scope(scope))
    except InvalidScopeError:
        return ()


def _grant_covers(grant: GrantScope, method: str | None, path: str | None) -> bool:
    if method is not None and not grant.admits_method(method):
        return False
    return path is None or grant.path_prefixes is None or any(_is_under(path, own) for own in grant.path_prefixes)


def _destination_covers(destination: Destination, method: str | None, path: str | None) -> bool:
    if method is not None and not destination.admits_method(method):
        return False
    return path is None or _is_under(path, destination.path_prefix)


def _is_under(prefix: str, other: str) -> bool:
    """Whether every path under `prefix` is under `other` too."""
    if other == "/" or prefix == other:
        return True
    # `/v1/` is under `/v1`, and not the other way round: `/v1` itself is no path of `/v1/`.
    return path_is_within(prefix, other)


def _both(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    if one is None or other is None:
        return one if other is None else other
    return one & other


def _common_prefixes(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    if one is None or other is None:
        return one if other is None else other
    under = {a for a in one for b in other if _is_under(a, b)} | {b for a in one for b in other if _is_under(b, a)}
    return frozenset(under)
