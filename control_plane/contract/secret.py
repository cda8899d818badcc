"""A value that does not show itself.

Rule: carry `Secret`; open it with `reveal()` on the line that uses it, and put the opened value in no field, f-string,
log, label or exception.
"""

import hmac
from typing import Final, NoReturn

MAX_SECRET_BYTES: Final = 16_384
_FIRST_PRINTABLE: Final = 0x20
_DELETE: Final = 0x7F


class UnusableSecretError(ValueError):
    """The value cannot be carried in a request; the message says why and never quotes it."""


class Secret:
    """A tenant's real key, or any other value that must not appear in logs, errors or representations."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    @classmethod
    def submitted(cls, value: str) -> "Secret":
        """The secret that somebody typed, piped or posted.

        One trailing line end (`\\n` or `\\r\\n`) is dropped, because files and `echo` add it; every other control
        character, surrounding white space, an empty value and more than 16 KiB raise `UnusableSecretError`.
        """
        if value.endswith("\n"):
            value = value.removesuffix("\n").removesuffix("\r")
        if not value:
            raise UnusableSecretError("the secret is empty")
        if len(value.encode("utf-8", "surrogatepass")) > MAX_SECRET_BYTES:
            raise UnusableSecretError(f"the secret is longer than {MAX_SECRET_BYTES} bytes")
        if value != value.strip():
            raise UnusableSecretError("the secret begins or ends with white space")
        # CR, LF and NUL would end a header line at the upstream; other controls have no place in a key either.
        if any(ord(char) < _FIRST_PRINTABLE or ord(char) == _DELETE or 0xD800 <= ord(char) <= 0xDFFF for char in value):
            raise UnusableSecretError("the secret contains a control character (line break, NUL, tab or alike)")
        return cls(value)

    @classmethod
    def document(cls, value: str) -> "Secret":
        """The same for a secret that is a document of several lines (a key file, PEM): line ends and tabs may be in it.

        It stands in no request as it is.
        """
        value = value.strip(" \t\r\n")
        if not value:
            raise UnusableSecretError("the secret is empty")
        if len(value.encode("utf-8", "surrogatepass")) > MAX_SECRET_BYTES:
            raise UnusableSecretError(f"the secret is longer than {MAX_SECRET_BYTES} bytes")
        cls.submitted("".join(value.split()))
        return cls(value)

    def reveal(self) -> str:
        """The value itself. Use it on this line and let it go."""
        return self._value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(
            self._value.encode("utf-8", "surrogatepass"), other._value.encode("utf-8", "surrogatepass")
        )

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is not pickled")
