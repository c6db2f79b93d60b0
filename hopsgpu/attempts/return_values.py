"""The value that a rank returned, sent to the driver in a frame or through the run's directory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from hopsgpu.agent.rank_process import MAX_VALUE
from hopsgpu.control.channel import Message
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath


@dataclass(frozen=True)
class Value:
    """A pickled value.

    Attributes:
        inline: the bytes, if they arrived in a frame.
        file: otherwise the name of their file in the run's directory; else "".
        digest: SHA-256 of the file's content, which the agent sent on the control channel.
    """

    inline: bytes = b""
    file: str = ""
    digest: str = ""

    def content(self, directory: LakePath) -> bytes:
        """Return the pickled bytes; check that a file holds exactly what the agent wrote.

        Raises:
            StoreError: the file cannot be read, or its content has another digest.
        """
        if not self.file:
            return self.inline
        file = directory / self.file
        content = file.read(MAX_VALUE)
        digest = hashlib.sha256(content).hexdigest()
        if digest != self.digest:
            raise StoreError(
                f"{file.url}: SHA-256 mismatch: the rank wrote {self.digest}, found {digest}. The"
                " value was not unpickled; check who else can write to the run's directory"
            )
        return content


def value_of(ended: Message) -> Value:
    file = ended.fields.get("value")
    if file is None:
        return Value(ended.payload)
    return Value(file=file["name"], digest=file["digest"])
