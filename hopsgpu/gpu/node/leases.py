"""Leases of a node's GPUs: locks in a directory that all users of the node share.

YARN grants a number of GPUs and no particular devices, and without container isolation every
container of a node sees all of them. So a GPU is given out under an flock (flock(2)) on a file of
its own. The kernel drops a lock with the last process that holds it, whatever ended that process,
and pids play no part: no kill, crash, reboot, reused pid or hidden process table leaves a GPU
locked, and containers with process tables of their own exclude each other as soon as they share the
directory. Two processes hold each lock (`hopsgpu.gpu.node.lease_keeper`), so that killing one of
them frees no GPU in use.

A GPU and a MIG device of it have different addresses, but never both at a time: a GPU that has MIG
enabled has no address of its own.
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
    """The node's directory of leases, or a file in it, is not as it must be."""


class Lease(NamedTuple):
    """A lease, and what its file says, for people: whoever may write it may have written anything.

    Attributes:
        address: address of the GPU.
        held: whether somebody holds the lease.
        owner: the last holder, as `owner` describes it.
    """

    address: str
    held: bool
    owner: Mapping[str, str]


def lease_directory(environ: Mapping[str, str]) -> Path:
    """Return the node's directory of locks; create it for all users if it does not exist.

    The first process that needs it creates it, unless the administrator has: it may belong to any
    user. Its owner could remove locks that are in use; `Leases.refresh` restores them.

    Raises:
        LeaseError: the path is not a directory, not all users may use it, or it is relative.
        OSError: the directory cannot be created.
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
    # A fixed one: two applications that each have a TMPDIR of their own would share nothing there.
    path = Path(environ.get(VARIABLE) or DIRECTORY)
    if not path.is_absolute():
        raise LeaseError(
            f"{VARIABLE}={str(path)!r}: must be an absolute path, the same for all containers of"
            " the node"
        )
    return path


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """Open the directory, and yield its descriptor; refuse a link.

    The directory's owner may put a link to another directory in its place at any time.

    Raises:
        LeaseError: the path is not a directory.
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
    # Created with its mode: another user may need it before a chmod.
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


class Leases:
    """The leases of this process, and of the processes that it forks while it holds them.

    Attributes:
        held: addresses of the leased GPUs, in the order in which they were taken.
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
        """Return the descriptors that hold the locks."""
        return list(self._descriptors.values())

    def take(self, address: str) -> bool:
        """Take the lease of a GPU if nobody holds it; return whether that succeeded."""
        self.refused.pop(address, None)
        try:
            descriptor = try_lock(self._path(address))
        except (LeaseError, OSError) as error:
            # Another user's trap or accident must not make the node's other GPUs unavailable.
            self.refused[address] = str(error)
            return False
        if descriptor is None:
            return False
        self._descriptors[address] = descriptor
        return True

    def release(self, address: str) -> None:
        """Release the lease of a GPU, as far as this process holds it."""
        os.close(self._descriptors.pop(address))

    def sign(self, owner: Mapping[str, str]) -> None:
        """Write the owner into the files of the held leases; ignore a full disk."""
        said = json.dumps(dict(owner)).encode() + b"\n"
        for descriptor in self._descriptors.values():
            # also a file that could be opened for reading only
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, said, 0)

    def refresh(self) -> None:
        """Touch the files, so that cleaners of old files spare them; take removed ones anew."""
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
    """Return the name of a GPU's file, in which underscores replace slashes.

    Old drivers have slashes in the UUIDs of MIG devices.

    Raises:
        LeaseError: the text is not the address of a GPU.
    """
    if not _NAME.fullmatch(address):
        raise LeaseError(f"{address!r} is not the address of a GPU")
    return address.replace("/", "_")


def owner(environ: Mapping[str, str], pid: int) -> Dict[str, str]:
    """Return what a lease's file says of its holder: pid, container, user and since (UTC).

    Args:
        pid: pid of the executor.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())  # in containers a user id may have no name
    return {
        "pid": str(pid),
        "container": environ.get("CONTAINER_ID", ""),
        "user": user,
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def read_leases(environ: Mapping[str, str]) -> List[Lease]:
    """Return the leases of this node; none if there is no directory of leases.

    Reading a lease holds its lock for a moment: whoever wants it meanwhile must try again.

    Raises:
        LeaseError: the directory is named by a relative path.
    """
    directory = _place(environ)
    leases = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted(directory.iterdir()):
            address = path.name.replace("_", "/")
            # the file is not a lease, or we may not read it
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
        fields = json.loads(said.decode("utf-8", "replace"))
    except (ValueError, RecursionError):  # another user's file may hold anything
        return {}
    if not isinstance(fields, dict):
        return {}
    # Shown on a terminal: without control characters, and of limited length.
    return {
        key: "".join(filter(str.isprintable, str(fields[key])))[:_LONGEST_VALUE]
        for key in _OWNER
        if key in fields
    }


def try_lock(path: Path) -> Optional[int]:
    """Return a descriptor that holds a file's lock, or None if another process holds it."""
    descriptor = _open_or_make(path)
    locked = False
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock of a file that was just removed excludes nobody: the caller tries again.
            locked = _is_at(descriptor, path)
    finally:
        if not locked:
            os.close(descriptor)
    return descriptor if locked else None


def _open_or_make(path: Path) -> int:
    while True:
        # Without O_CREAT: with fs.protected_regular the kernel refuses that flag for another
        # user's file in a sticky directory.
        with contextlib.suppress(FileNotFoundError):
            try:
                return _open(path, os.O_RDWR)
            except PermissionError:
                # flock(2) needs no more than a descriptor for reading
                return _open(path, os.O_RDONLY)
        with contextlib.suppress(FileExistsError):  # somebody else created it first: open that one
            return _make(path)


def _make(path: Path) -> int:
    with _for_everybody():
        return _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def _open(path: Path, flags: int) -> int:
    """Open a regular file that has no other name, and return its descriptor.

    The other name of a hard link may be that of a file that its owner needs.

    Raises:
        LeaseError: the path is not such a file.
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
    # No name: it was removed meanwhile, which is noticed when it is locked.
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise LeaseError(f"{path} is not a file, or has several hard links: remove it")


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        with _opened(path.parent) as directory:
            there = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
    except (LeaseError, OSError):
        return False
    return os.path.samestat(os.fstat(descriptor), there)
