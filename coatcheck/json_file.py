"""JSON that a command is given as a file, or on standard input.

Rule: a mistake is one line that names the file and never quotes what is in it.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from coatcheck.terminal import CommandError

STANDARD_INPUT: Final = Path("-")
_MAX_BYTES: Final = 256 * 1024


def read_text(file: Path) -> str:
    """Raises `CommandError`."""
    try:
        raw = sys.stdin.buffer.read(_MAX_BYTES + 1) if file == STANDARD_INPUT else file.read_bytes()[: _MAX_BYTES + 1]
    except OSError as error:
        raise CommandError(f"cannot read {file} ({error.strerror})", "give the path of a file") from None
    if len(raw) > _MAX_BYTES:
        raise CommandError(f"{file} is larger than {_MAX_BYTES // 1024} KiB")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise CommandError(f"{file} is not text (UTF-8)") from None


def read_object(file: Path) -> dict[str, Any]:
    """Raises `CommandError`."""
    try:
        found = json.loads(read_text(file))
    except (ValueError, RecursionError):
        raise CommandError(f"{file} is not JSON") from None
    if not isinstance(found, dict):
        raise CommandError(f"{file} holds no JSON object")
    return found


def read_keys(file: Path) -> list[Any]:
    """The keys of a key set (RFC 7517), or one key by itself. Raises `CommandError`."""
    found = read_object(file)
    keys = found.get("keys", [found])
    if not isinstance(keys, list):
        raise CommandError(f"{file} holds no key set: 'keys' is no list")
    return keys
