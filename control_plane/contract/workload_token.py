"""What a workload says of its own proof, for its own log: never who it is, only until when the proof says it is good.

Rule: nothing is verified here and nothing is decided by it. Whoever receives the token judges it.
"""

import base64
import binascii
import json
from datetime import UTC, datetime
from typing import Final

MAX_TOKEN_BYTES: Final = 16_384


def is_one_token(text: str) -> bool:
    """Whether a file's text, stripped, can be sent as one token."""
    return 0 < len(text) <= MAX_TOKEN_BYTES and text.isascii() and text.isprintable() and " " not in text


def described_token(what: str, token: str, *, now: float) -> str:
    """`what` names the token, such as by its file; added is what can be seen to be wrong with it."""
    end = unverified_end(token)
    return f"{what}, which is no JWT with an end" if end is None else described_until(what, end, now=now)


def described_until(what: str, end: float, *, now: float) -> str:
    """`end` and `now` are Unix seconds."""
    if end > now:
        return what
    return f"{what}, which ended at {datetime.fromtimestamp(end, UTC).strftime('%Y-%m-%dT%H:%M:%SZ')}"


def unverified_end(token: str) -> float | None:
    """`exp` (RFC 7519 §4.1.4) in Unix seconds; None where the text does not say."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        payload = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return None
    end = payload.get("exp") if isinstance(payload, dict) else None
    return float(end) if isinstance(end, int | float) and not isinstance(end, bool) else None
