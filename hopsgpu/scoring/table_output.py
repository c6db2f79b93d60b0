"""The output of a score on the lake: parts kept one by one, and visible all together or not at all.

Beside the output is a hidden directory with two others. Ranks write to `drafts`, each under a name
of its own; the driver alone renames what is complete into `parts`, which becomes the output by a
strict rename. So a rank that is believed to be lost, and still writes, changes nothing. If a score
ends early, the parts stay for a run that resumes it: until that run publishes them, until another
score publishes the same output, or until the run is removed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.error_messages import EXISTS
from hopsgpu.storage.lake import LakePath
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

_DRAFTS = "drafts"
_PARTS = "parts"
_NAME = re.compile(r"part-(\d+)\.parquet")


class TableOutput:
    """The output of one score."""

    def __init__(self, target: LakePath, run_id: str) -> None:
        self.target = target
        self._prefix = f".{target.url.rpartition('/')[2]}-"
        self._home = target.parent / f"{self._prefix}{run_id}"
        self._parts = self._home / _PARTS
        self.drafts = self._home / _DRAFTS

    def check(self) -> None:
        """Check that nothing is in the output's place.

        Raises:
            ConfigError: something is.
            StoreError: the lake refused.
        """
        if self.target.exists():
            raise ConfigError(
                f"output={self.target.url!r} exists: name another directory, or remove it; a score"
                " does not replace a table"
            )

    def prepare(self) -> None:
        """Create the directories that the ranks and the driver write to.

        Raises:
            StoreError: the lake refused.
        """
        self.drafts.make()
        self._parts.make()

    def kept_parts(self) -> frozenset[int]:
        """Return the numbers of the parts that are kept, also by an earlier run of the score."""
        matches = map(_NAME.fullmatch, self._parts.names())
        return frozenset(int(match[1]) for match in matches if match)

    def keep(self, number: int, draft: str) -> None:
        """Keep a rank's file as that of a part.

        Raises:
            StoreError: the lake refused, or the part has a file already.
        """
        place = self.part(number)
        if not (self.drafts / draft).rename(place):
            raise StoreError(f"{place.url} exists: another driver writes to {self._home.url}")

    def part(self, number: int) -> LakePath:
        """Return the file of a part."""
        return self._parts / f"part-{number:06d}.parquet"

    def publish(self, parts: Collection[int]) -> None:
        """Make the parts the output, at once.

        Args:
            parts: numbers of the parts that the output must have.

        Raises:
            StoreError: the lake refused, parts are missing, or something is in the output's place.
        """
        missing = sorted(set(parts) - self.kept_parts())
        if missing:
            raise StoreError(
                f"{count_of(len(missing), 'part')} of the output, the first of them"
                f" {self.part(missing[0]).url}, were removed during the score: resume the score"
            )
        if not self._parts.rename(self.target):
            raise StoreError(
                f"{self.target.url} exists, which it did not when the score began: the scored parts"
                f" stay in {self._parts.url}",
                EXISTS,
            )
        log.info("the output is %s", self.target.url)
        self._home.remove()

    def remove_unneeded(self) -> bool:
        """Remove what a run that resumes the score does not need; return whether parts are kept.

        Raises:
            StoreError: the lake refused.
        """
        has_parts = bool(self.kept_parts())
        (self.drafts if has_parts else self._home).remove()
        return has_parts

    def others(self) -> Mapping[str, str]:
        """Return the URLs of directories like this one, of scores with the same output.

        Returns:
            The URL by the id of the score, as far as the name tells.

        Raises:
            StoreError: the lake refused.
        """
        above = self.target.parent
        names = (n for n in above.names(only_directories=True) if n.startswith(self._prefix))
        return {name.removeprefix(self._prefix): (above / name).url for name in names}

    @property
    def where(self) -> str:
        """The URL of the directory in which the parts are kept until the output is complete."""
        return self._home.url
