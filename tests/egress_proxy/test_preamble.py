"""The header of a listener opened for one session."""

import pytest

from egress_proxy.preamble import SIGNATURE, MalformedPreambleError, may_begin_preamble, preamble, read_preamble

CREDENTIAL = "coatprx1" + "a" * 28


def test_what_an_opener_writes_is_read_back_however_it_is_cut() -> None:
    whole = preamble(CREDENTIAL)

    assert read_preamble(whole + b"GET /") == (CREDENTIAL, len(whole))
    assert all(read_preamble(whole[:end]) is None for end in range(len(whole)))
    assert all(may_begin_preamble(whole[:end]) for end in range(len(whole)))


def test_other_tlvs_are_skipped() -> None:
    tlvs = b"\x04\x00\x02xx\xe0\x00\x03abc"

    assert read_preamble(SIGNATURE + b"\x20\x00" + len(tlvs).to_bytes(2) + tlvs) == ("abc", 16 + len(tlvs))


@pytest.mark.parametrize(
    "after_signature",
    [
        b"\x21\x11\x00\x0c" + bytes(12),  # PROXY over IPv4: an address that anybody may write
        b"\x20\x11\x00\x0c" + bytes(12),
        b"\x10\x00\x00\x00",
        b"\x20\x00\x00\x00",
        b"\x20\x00\x00\x02\xe0\x00",
        b"\x20\x00\x00\x05\xe0\x00\x09ab",
        b"\x20\x00\x00\x08\xe0\x00\x01a\xe0\x00\x01b",
        b"\x20\x00\x00\x04\xe0\x00\x01\xff",
        b"\x20\x00\xff\xff",
    ],
)
def test_any_other_form_is_refused(after_signature: bytes) -> None:
    with pytest.raises(MalformedPreambleError):
        read_preamble(SIGNATURE + after_signature)


def test_a_request_is_no_preamble() -> None:
    assert not may_begin_preamble(b"GET / HTTP/1.1\r\n")
