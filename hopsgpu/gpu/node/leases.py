"""Leases of a node's GPUs: locks in a directory that all users of the node share.

YARN grants a count of GPUs and no device, and without container isolation every container of a
node sees all of them. So a GPU is given out under an flock (flock(2)) on a file of its own. The
kernel drops a lock with the last process that has it, whatever ended that process, and knows
nothing of pids: no kill, crash, reboot, reused pid or hidden process table leaves a GPU locked, and
containers with process tables of their own exclude each other as soon as they share the directory.
Two processes have each lock (`hopsgpu.gpu.node.lease_keeper`): the kill of one frees no GPU in use.

A GPU and a MIG device of it are different addresses, but never both there: a GPU that has MIG
enabled is not an address.
"""

import contextlib
import errno
import fcntl
import getpass
import json
import os
import re
import stat
import time
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional

DIRECTORY = Path("/tmp/hopsgpu-gpu-leases")
VARIABLE = "HOPSGPU_LEASE_DIR"
_MODE = 0o1777
_FILE_MODE = 0o666
_NAME = re.compile(r"(GPU|MIG|PCI)-[0-9A-Za-z:./-]+")
_OWNER = ("pid", "container", "user", "since")
_LONGEST = 4096
_LONGEST_VALUE = 100


class LeaseError(Exception):
    """The node's directory of leases, or a file in it, is not what it has to be."""


class Lease(NamedTuple):
    """What a lease's file says, for people: whoever may write it may have written anything.

    Attributes:
        address: of the GPU.
        held: whether somebody has it.
        owner: of the last one who had it, as `owner` gives it.
    """

    address: str
    held: bool
    owner: Mapping[str, str]


def lease_directory(environ: Mapping[str, str]) -> Path:
    """The node's directory of locks, made for all users where it is not there yet.

    Whoever comes first makes it, unless the administrator has: it may belong to any user. Its
    owner could remove locks that are in use; `Leases.refresh` has them back.

    Raises:
        LeaseError: it is something else, or not for all users, or named by a relative path.
        OSError: it cannot be made.
    """
    path = _place(environ)
    _make_directory(path)
    with _opened(path) as directory:
        found = os.fstat(directory)
        mode = stat.S_IMODE(found.st_mode)
        if mode & _MODE != _MODE:
            # The sticky bit keeps users from removing each other's locks.
            if os.geteuid() not in (0, found.st_uid):
                raise LeaseError(
                    f"{path} belongs to user {found.st_uid} and has mode {mode:o}, but all users"
                    f" of this node share it: chown root {path}; chmod 1777 {path}"
                )
            os.fchmod(directory, _MODE)
    return path


def _place(environ: Mapping[str, str]) -> Path:
    # A fixed one: a TMPDIR of their own would have two applications share nothing.
    path = Path(environ.get(VARIABLE) or DIRECTORY)
    if not path.is_absolute():
        raise LeaseError(
            f"{VARIABLE} is {str(path)!r}, another directory in each container: give an absolute"
            " path, the same for all of the node"
        )
    return path


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """The directory itself: its owner may put a link to another in its place at any time.

    Raises:
        LeaseError: it is none.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise LeaseError(f"{directory} is not a directory: remove it") from None
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _make_directory(path: Path) -> None:
    with _for_everybody(), contextlib.suppress(FileExistsError):
        path.mkdir(_MODE)


@contextlib.contextmanager
def _for_everybody() -> Iterator[None]:
    # With its mode from the start: another user may come before a chmod.
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


class Leases:
    """The leases of this process, and of those that it forks while it has them.

    Attributes:
        held: addresses, in the order in which they were taken.
        refused: address → why its file cannot be locked at all.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptors: Dict[str, int] = {}
        self.refused: Dict[str, str] = {}

    def __enter__(self) -> "Leases":
        return self

    def __exit__(self, *_: object) -> None:
        for address in self.held:
            self.release(address)

    @property
    def held(self) -> List[str]:
        return list(self._descriptors)

    @property
    def descriptors(self) -> List[int]:
        """What has the locks."""
        return list(self._descriptors.values())

    def take(self, address: str) -> bool:
        """Takes a GPU that nobody has; says whether it did."""
        self.refused.pop(address, None)
        try:
            descriptor = try_lock(self._path(address))
        except (LeaseError, OSError) as error:
            # Another user's trap or accident must not cost the node's other GPUs.
            self.refused[address] = str(error)
            return False
        if descriptor is None:
            return False
        self._descriptors[address] = descriptor
        return True

    def release(self, address: str) -> None:
        """Gives a GPU back, as far as this process has it."""
        os.close(self._descriptors.pop(address))

    def sign(self, owner: Mapping[str, str]) -> None:
        """Writes into the files whose they are; a full disk does not cost the lease."""
        said = json.dumps(dict(owner)).encode() + b"\n"
        for descriptor in self._descriptors.values():
            # also one that could be opened for reading only
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, said, 0)

    def refresh(self) -> None:
        """Keeps cleaners of old files off, and takes anew what was removed all the same."""
        for address, descriptor in list(self._descriptors.items()):
            with contextlib.suppress(OSError):
                os.utime(descriptor)
            if _is_at(descriptor, self._path(address)):
                continue
            with contextlib.suppress(OSError):
                _make_directory(self._directory)
            if self.take(address):
                os.close(descriptor)

    def _path(self, address: str) -> Path:
        return self._directory / file_name(address)


def file_name(address: str) -> str:
    """The name of a GPU's file; old drivers have slashes in the UUIDs of MIG devices.

    Raises:
        LeaseError: it is not an address.
    """
    if not _NAME.fullmatch(address):
        raise LeaseError(f"{address!r} is not the address of a GPU")
    return address.replace("/", "_")


def owner(environ: Mapping[str, str], pid: int) -> Dict[str, str]:
    """What a lease's file says of who has it: pid, container, user and since (UTC).

    Args:
        pid: of the executor.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())  # a user id without a name, as containers have them
    return {
        "pid": str(pid),
        "container": environ.get("CONTAINER_ID", ""),
        "user": user,
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def read_leases(environ: Mapping[str, str]) -> List[Lease]:
    """The leases of this node; none where there is no directory of them.

    To look at one takes its lock for a moment: who wants it meanwhile asks again.

    Raises:
        LeaseError: the directory is named by a relative path.
    """
    directory = _place(environ)
    leases = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted(directory.iterdir()):
            address = path.name.replace("_", "/")
            # what is no lease, or not for us to read
            with contextlib.suppress(OSError, LeaseError):
                leases.append(_read_lease(directory / file_name(address), address))
    return leases


def _read_lease(path: Path, address: str) -> Lease:
    descriptor = _open(path, os.O_RDONLY)
    held = True
    try:
        said = _owner_of(os.pread(descriptor, _LONGEST, 0))
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            held = False
    finally:
        os.close(descriptor)
    return Lease(address, held, said)


def _owner_of(said: bytes) -> Dict[str, str]:
    try:
        told = json.loads(said.decode("utf-8", "replace"))
    except (ValueError, RecursionError):  # another user's file may hold anything
        return {}
    if not isinstance(told, dict):
        return {}
    # For a terminal: no control characters, and not for ever.
    return {
        key: "".join(filter(str.isprintable, str(told[key])))[:_LONGEST_VALUE]
        for key in _OWNER
        if key in told
    }


def try_lock(path: Path) -> Optional[int]:
    """A descriptor that has a file's lock, or None where another has it."""
    descriptor = _open_or_make(path)
    locked = False
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A file that somebody has just removed is no lock: asked for again if need be.
            locked = _is_at(descriptor, path)
    finally:
        if not locked:
            os.close(descriptor)
    return descriptor if locked else None


def _open_or_make(path: Path) -> int:
    while True:
        # Without O_CREAT: with fs.protected_regular the kernel refuses it for a file that is
        # another user's, in a sticky directory.
        with contextlib.suppress(FileNotFoundError):
            try:
                return _open(path, os.O_RDWR)
            except PermissionError:
                # flock(2) is content with a descriptor to read from
                return _open(path, os.O_RDONLY)
        with contextlib.suppress(FileExistsError):  # another was quicker: open that one
            return _make(path)


def _make(path: Path) -> int:
    with _for_everybody():
        return _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def _open(path: Path, flags: int) -> int:
    """Opens a regular file, no other name of which may be someone's dear one.

    Raises:
        LeaseError: it is something else.
    """
    safely = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    with _opened(path.parent) as directory:
        try:
            descriptor = os.open(path.name, flags | safely, _FILE_MODE, dir_fd=directory)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise LeaseError(f"{path} is not a file: remove it") from None
            raise
    found = os.fstat(descriptor)
    # None: removed since; that it is no lock is seen when it is locked.
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise LeaseError(f"{path} is not a file, or has other names: remove it")


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        with _opened(path.parent) as directory:
            there = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
    except (LeaseError, OSError):
        return False
    return os.path.samestat(os.fstat(descriptor), there)
