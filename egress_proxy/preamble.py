"""The header with which a *listener opened for one session* says whose connection this is.

Such a listener (the one of `coatcheck run`, or of a runtime's sandbox) is held by a trusted opener outside the sandbox.
For every connection it writes one PROXY protocol v2 header with a proxy credential in a TLV, then relays bytes both
ways. So the child holds no proxy credential, and every client works with it.

Form: the signature, `0x20` (version 2, LOCAL), `0x00` (AF_UNSPEC), a 2-byte length, then TLVs; type `0xE0` (the first
of the range for own use) holds the proxy credential in ASCII. Other TLVs are skipped. Rule: addresses in such a header
are never believed, because anybody who reaches the listener could write them; so PROXY commands are refused.
(PROXY protocol, section 2.2: https://www.haproxy.org/download/2.9/doc/proxy-protocol.txt)
"""

from typing import Final

SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"
_VERSION_2_LOCAL: Final = 0x20
_UNSPECIFIED: Final = 0x00
PROXY_CREDENTIAL_TLV: Final = 0xE0
_HEADER_LENGTH: Final = len(SIGNATURE) + 4
MAX_PAYLOAD_BYTES: Final = 1024


class MalformedPreambleError(ValueError):
    """Begins like a preamble and is none that we take."""


def preamble(proxy_credential: str) -> bytes:
    """What an opener writes first."""
    value = proxy_credential.encode("ascii")
    tlv = bytes((PROXY_CREDENTIAL_TLV,)) + len(value).to_bytes(2) + value
    return SIGNATURE + bytes((_VERSION_2_LOCAL, _UNSPECIFIED)) + len(tlv).to_bytes(2) + tlv


def may_begin_preamble(data: bytes) -> bool:
    """Whether `data`, the first bytes of a connection, is (the beginning of) the signature."""
    return data.startswith(SIGNATURE) or SIGNATURE.startswith(data)


def read_preamble(data: bytes) -> tuple[str, int] | None:
    """(proxy credential, bytes used), or None while it is incomplete. Raises `MalformedPreambleError`."""
    if len(data) < _HEADER_LENGTH:
        return None
    if data[len(SIGNATURE)] != _VERSION_2_LOCAL or data[len(SIGNATURE) + 1] != _UNSPECIFIED:
        raise MalformedPreambleError("only a LOCAL header of PROXY protocol version 2 is taken")
    length = int.from_bytes(data[_HEADER_LENGTH - 2 : _HEADER_LENGTH])
    if length > MAX_PAYLOAD_BYTES:
        raise MalformedPreambleError("the header is too long")
    end = _HEADER_LENGTH + length
    if len(data) < end:
        return None
    return _proxy_credential(data[_HEADER_LENGTH:end]), end


def _proxy_credential(tlvs: bytes) -> str:
    found: str | None = None
    while tlvs:
        length = int.from_bytes(tlvs[1:3])
        value = tlvs[3 : 3 + length]
        if len(tlvs) < 3 or len(value) != length:
            raise MalformedPreambleError("a TLV is cut short")
        if tlvs[0] == PROXY_CREDENTIAL_TLV:
            if found is not None or not value.isascii():
                raise MalformedPreambleError("one proxy credential, in ASCII")
            found = value.decode("ascii")
        tlvs = tlvs[3 + length :]
    if found is None:
        raise MalformedPreambleError("no proxy credential in it")
    return found
