"""The `file` source: one folder of this machine, chosen by whoever runs the process.

Rule: read below that root without following a link (`beneath`). One line end at the end of a file (`\\n` or `\\r\\n`)
is not part of the secret, because editors and `echo` add it; everything else is.
"""

from pathlib import Path

from control_plane.adapters.sources.asking import in_thread
from control_plane.adapters.sources.beneath import MissingFileError, NotReadableError, read_beneath
from control_plane.contract.secret import MAX_SECRET_BYTES, Secret
from control_plane.core.records import Source
from control_plane.ports import SourceError, SourceFailure

_LINE_END_BYTES = 2


class FileReader:
    def __init__(self, root: Path | None) -> None:
        self._root = root

    async def read(self, source: Source, *, path: str, field: str | None) -> Secret:
        return await in_thread(lambda: self._read(path))

    def _read(self, path: str) -> Secret:
        if self._root is None:
            raise SourceError(SourceFailure.MISCONFIGURED, "COATCHECK_CONTROL_PLANE_SOURCES_FOLDER names no folder")
        try:
            return Secret(read_beneath(self._root, path, max_bytes=MAX_SECRET_BYTES + _LINE_END_BYTES).decode("utf-8"))
        except MissingFileError:
            raise SourceError(SourceFailure.NOT_FOUND, "there is no such file") from None
        except NotReadableError as error:
            raise SourceError(SourceFailure.UNUSABLE, str(error)) from None
        except UnicodeDecodeError:
            raise SourceError(SourceFailure.UNUSABLE, "it is not text (UTF-8)") from None
