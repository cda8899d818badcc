"""What a workload says of its own token, for its own log: never who it is, only until when the token says it is good.

Rule: nothing is verified here and nothing is decided by it. Whoever receives the token judges it.
"""

import base64
import binascii
import json


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
