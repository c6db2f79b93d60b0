"""Leases of a node's GPUs: locks in a directory that all users of the node share.

YARN grants a number of GPUs and no particular devices. Without container isolation, every container
of a node sees all GPUs. Therefore a GPU is given out under an flock (flock(2)) on a file of its
own. The kernel drops a lock when the last process that holds it ends, whatever ended that process:
no kill, crash, reboot, reused pid or hidden process table leaves a GPU locked. Containers in
different PID namespaces exclude each other if they share the directory. Two processes hold each
lock (`hopsgpu.gpu.node.lease_keeper`), so killing one of them frees no GPU in use.

A GPU and its MIG devices are never leased at the same time: a GPU in MIG mode has no address of its
own.
"""

import contextlib
import errno
import fcntl
import getpass
import json
import os
import pwd
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
_MAX_BYTES = 4096
_MAX_VALUE_LENGTH = 100


class LeaseError(Exception):
    """The node's directory of leases, or a file in it, is not as it must be."""


class GpuLease(NamedTuple):
    """A lease as its file describes it, for people: all users of the node may write the file.

    Attributes:
        owner: the last holder, as `owner` describes it.
    """

    address: str
    is_held: bool
    owner: Mapping[str, str]


def lease_directory(environ: Mapping[str, str]) -> Path:
    """Return the node's directory of locks; create it for all users if it does not exist.

    Any user may own the directory, because the first process that needs it creates it. The owner
    could remove locks that are in use; `Leases.refresh` restores them.

    Raises:
        LeaseError: the path is not a directory, not all users may use it, or it is relative.
        OSError: the directory cannot be created.
    """
    path = _directory_path(environ)
    _make_directory(path)
    with _open_directory(path) as directory:
        status = os.fstat(directory)
        mode = stat.S_IMODE(status.st_mode)
        if mode & _MODE != _MODE:
            # The sticky bit keeps users from removing each other's locks.
            if os.geteuid() not in (0, status.st_uid):
                raise _closed_directory(path, status)
            os.fchmod(directory, _MODE)
    return path


def _closed_directory(path: Path, status: os.stat_result) -> LeaseError:
    return LeaseError(
        f"{path} belongs to {_describe_owner(status)} and has mode"
        f" {stat.S_IMODE(status.st_mode):o}, but all users of this node share it: as root, run"
        f" chown root {path}; chmod 1777 {path}"
    )


def _describe_owner(status: os.stat_result) -> str:
    try:
        name = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:  # in a container, the user may have no name
        return f"user {status.st_uid}"
    return f"user {name} ({status.st_uid})"


def _directory_path(environ: Mapping[str, str]) -> Path:
    # A fixed path: applications may have different TMPDIRs, and would not share a directory there.
    path = Path(environ.get(VARIABLE) or DIRECTORY)
    if not path.is_absolute():
        raise LeaseError(
            f"{VARIABLE}={str(path)!r}: must be an absolute path, the same for all containers of"
            " the node"
        )
    return path


@contextlib.contextmanager
def _open_directory(directory: Path) -> Iterator[int]:
    """Open the directory, and yield its descriptor.

    Raise LeaseError if it is a link or a file, or if its owner keeps other users out. The owner may
    replace the directory by a link at any time.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EACCES):
            raise
        status = os.lstat(directory)  # may raise an OSError if a directory above is closed
        if error.errno == errno.EACCES:
            raise _closed_directory(directory, status) from None
        raise LeaseError(
            f"{directory} is not a directory, and belongs to {_describe_owner(status)}: remove it"
        ) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _make_directory(path: Path) -> None:
    with _no_umask(), contextlib.suppress(FileExistsError):
        path.mkdir(_MODE)


@contextlib.contextmanager
def _no_umask() -> Iterator[None]:
    # The file or directory has its mode from the start: another user may need it before a chmod.
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


class Leases:
    """The leases of this process, and of the processes that it forks while it holds them.

    Attributes:
        refused: address → why the GPU's file cannot be locked at all.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptors: Dict[str, int] = {}
        self.refused: Dict[str, str] = {}

    def __enter__(self) -> "Leases":
        return self

    def __exit__(self, *_: object) -> None:
        for address in self.addresses:
            self.release(address)

    @property
    def addresses(self) -> List[str]:
        """The addresses of the leased GPUs, in the order in which they were taken."""
        return list(self._descriptors)

    @property
    def descriptors(self) -> List[int]:
        return list(self._descriptors.values())

    def take(self, address: str) -> bool:
        """Take the lease of a GPU if nobody holds it; return whether that succeeded."""
        self.refused.pop(address, None)
        try:
            descriptor = try_lock(self._path(address))
        except (LeaseError, OSError) as error:
            # Another user may have made this file unusable: go on with the other GPUs.
            self.refused[address] = str(error)
            return False
        if descriptor is None:
            return False
        self._descriptors[address] = descriptor
        return True

    def release(self, address: str) -> None:
        """Close this process's descriptor of a lease; forked processes still hold theirs."""
        os.close(self._descriptors.pop(address))

    def write_owner(self, owner: Mapping[str, str]) -> None:
        """Write the owner into the files of the held leases; ignore a full disk."""
        content = json.dumps(dict(owner)).encode() + b"\n"
        for descriptor in self._descriptors.values():
            # The file may be open for reading only.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, content, 0)

    def refresh(self) -> None:
        """Touch the files, so that cleaners of old files spare them; take removed files again."""
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
    """Return the name of a GPU's file; raise LeaseError if the text is not the address of a GPU.

    Underscores replace slashes, which old drivers have in the UUIDs of MIG devices.
    """
    if not _NAME.fullmatch(address):
        raise LeaseError(f"{address!r} is not the address of a GPU")
    return address.replace("/", "_")


def owner(environ: Mapping[str, str], pid: int) -> Dict[str, str]:
    """Return what a lease's file says about its holder, the executor with this pid; the time is
    UTC.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())  # in a container, the user may have no name
    return {
        "pid": str(pid),
        "container": environ.get("CONTAINER_ID", ""),
        "user": user,
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def read_leases(environ: Mapping[str, str]) -> List[GpuLease]:
    """Return the leases of this node; none if there is no directory of leases.

    Reading a lease holds its lock for a moment; a process that takes the lease then must retry.

    Raises:
        LeaseError: the path is not a directory, its owner keeps others out, or it is relative.
    """
    directory = _directory_path(environ)
    names: List[str] = []
    with contextlib.suppress(FileNotFoundError), _open_directory(directory) as descriptor:
        names = sorted(os.listdir(descriptor))  # noqa: PTH208 - a Path has no descriptor
    leases = []
    for name in names:
        address = name.replace("_", "/")
        # The file is not a lease, or we may not read it.
        with contextlib.suppress(OSError, LeaseError):
            leases.append(_read_lease(directory / file_name(address), address))
    return leases


def _read_lease(path: Path, address: str) -> GpuLease:
    descriptor = _open(path, os.O_RDONLY)
    is_held = True
    try:
        owner_fields = _owner_of(os.pread(descriptor, _MAX_BYTES, 0))
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_held = False
    finally:
        os.close(descriptor)
    return GpuLease(address, is_held, owner_fields)


def _owner_of(content: bytes) -> Dict[str, str]:
    try:
        fields = json.loads(content.decode("utf-8", "replace"))
    except (ValueError, RecursionError):  # another user's file may contain anything
        return {}
    if not isinstance(fields, dict):
        return {}
    # For a terminal: without control characters, and of limited length.
    return {
        key: "".join(filter(str.isprintable, str(fields[key])))[:_MAX_VALUE_LENGTH]
        for key in _OWNER
        if key in fields
    }


def try_lock(path: Path) -> Optional[int]:
    """Return a descriptor that holds a file's lock, or None if another process holds it."""
    descriptor = _open_or_make(path)
    is_locked = False
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock of a file that was just removed excludes nobody: the caller retries.
            is_locked = _is_at(descriptor, path)
    finally:
        if not is_locked:
            os.close(descriptor)
    return descriptor if is_locked else None


def _open_or_make(path: Path) -> int:
    while True:
        # Without O_CREAT: with fs.protected_regular the kernel refuses that flag for another
        # user's file in a sticky directory.
        with contextlib.suppress(FileNotFoundError):
            try:
                return _open(path, os.O_RDWR)
            except PermissionError:
                return _open_for_reading(path)
        with contextlib.suppress(FileExistsError):  # another process created it first: open it
            return _create(path)


def _open_for_reading(path: Path) -> int:
    """Open another user's file; a descriptor for reading suffices for flock(2)."""
    try:
        return _open(path, os.O_RDONLY)
    except PermissionError:
        status = os.lstat(path)
        mode = stat.S_IMODE(status.st_mode)
        raise LeaseError(
            f"{path} belongs to {_describe_owner(status)} and has mode {mode:o}, but all users of"
            f" this node lock it: as root, run chmod 666 {path}"
        ) from None


def _create(path: Path) -> int:
    with _no_umask():
        return _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def _open(path: Path, flags: int) -> int:
    """Open a regular file that has no other name, and return its descriptor.

    Otherwise raise LeaseError: another user may have hard-linked one of our files here.
    """
    safely = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    with _open_directory(path.parent) as directory:
        try:
            descriptor = os.open(path.name, flags | safely, _FILE_MODE, dir_fd=directory)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                status = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
                raise LeaseError(
                    f"{path} is not a file, and belongs to {_describe_owner(status)}: remove it"
                ) from None
            raise
    status = os.fstat(descriptor)
    # A file without a name was removed meanwhile; `try_lock` notices that.
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise LeaseError(
        f"{path} of {_describe_owner(status)} is not a file, or has several hard links: remove it"
    )


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        with _open_directory(path.parent) as directory:
            named_file = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
    except (LeaseError, OSError):
        return False
    return os.path.samestat(os.fstat(descriptor), named_file)
