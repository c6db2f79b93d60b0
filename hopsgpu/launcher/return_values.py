"""What a rank returned, on its way to the driver: in a frame, or by the run's directory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from hopsgpu.control.channel import Message
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import Lake


@dataclass(frozen=True)
class Value:
    """A pickled value.

    Attributes:
        inline: the bytes, where they came in a frame.
        file: its name in the run's directory otherwise, else "".
        digest: SHA-256 of the file's content, as its agent told on the control channel.
    """

    inline: bytes = b""
    file: str = ""
    digest: str = ""

    def content(self, directory: Lake) -> bytes:
        """The pickled bytes; of a file those that its agent wrote, and no others.

        Raises:
            StoreError: the lake refused, or holds something else.
        """
        if not self.file:
            return self.inline
        place = directory / self.file
        found = place.read()
        if hashlib.sha256(found).hexdigest() != self.digest:
            raise StoreError(
                f"{place.url} is not what the rank wrote: digest mismatch. It was"
                " not unpickled; who else can write to the run's directory?"
            )
        return found


def value_of(ended: Message) -> Value:
    """The value that a rank's `ended` brings or names."""
    file = ended.fields.get("value")
    if file is None:
        return Value(ended.payload)
    return Value(file=file["name"], digest=file["digest"])
