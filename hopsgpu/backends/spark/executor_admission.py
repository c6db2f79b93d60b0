"""The admission of executors by a queue besides hopsgpu's own, such as Kueue's on Kubernetes.

The classes of this module admit all executors at once: most cluster managers have no such queue.
"""

from __future__ import annotations

from collections.abc import Callable

from hopsgpu.backends.gang_request import Request
from hopsgpu.cluster_managers.flavors import NO_FLAVORS, Flavors
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason


class ExecutorAdmission:
    """The right of a gang, or of a growth, to request executors.

    Attributes:
        executors: how many executors it admits; None for any number.
        flavors: the nodes on which the executors must run.
    """

    executors: int | None = None
    flavors: Flavors = NO_FLAVORS

    def poll(self) -> WaitReason:
        """Request the admission, or poll it; return why it is missing, or `NO_WAIT`.

        An admission that was revoked is requested again.

        Raises:
            HopsGpuError: it can never be granted.
        """
        return NO_WAIT

    @property
    def is_valid(self) -> bool:
        """Return whether executors may be requested now."""
        return True

    def close(self) -> None:
        """Give the admission back; never raise."""


class ExecutorAdmissions:
    """Opens the admissions of one allocator; all of them are closed at the allocator's end."""

    def open(
        self, request: Request, on_revoked: Callable[[str], None], *, is_growth: bool = False
    ) -> ExecutorAdmission:
        """Return an admission for the executors of a request, without requesting it yet.

        Args:
            on_revoked: called in another thread with the reason when a granted admission was
                revoked; it ends the executors.
            is_growth: whether a running search or gang requests more executors.
        """
        return ExecutorAdmission()
