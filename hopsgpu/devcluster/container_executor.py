"""A stand-in for Hadoop's setuid program `container-executor`, for the development cluster.

A NodeManager with LinuxContainerExecutor runs this program to initialise, start, signal and remove
containers, with and without Docker. The stand-in has the command line of Hadoop 3.3 to 3.5. It
checks images, mounts, networks and runtimes as the real program does, with the same messages. It
lacks setuid, the checks of files and users, and cgroups of devices.

The first argument is a file of properties: those of Hadoop's container-executor.cfg, and
`docker.host`. The program runs as root, as a script without other modules of hopsgpu.

Sources: Hadoop's PrivilegedOperation, DockerLinuxContainerRuntime and the C sources of
container-executor.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

# Exit codes of container-executor (util.h).
_UNABLE_TO_EXECUTE_SCRIPT, _UNABLE_TO_SIGNAL, _INVALID_DOCKER_COMMAND = 7, 8, 29
_NO_RESOURCES = "none"
_SIGNAL_BASE = 128
# Operations of the setuid program on cgroups and devices, which this stand-in does not need.
_IGNORED = (
    "--checksetup",
    "--mount-cgroups",
    *("--module-gpu", "--module-devices", "--module-fpga"),
)


class RefusedError(Exception):
    """A request that container-executor.cfg does not allow: the details, and the error's name."""


class ContainerExecutor:
    """The commands of a NodeManager.

    Args:
        settings: properties of container-executor.cfg.
        cgroup: memory cgroup of this process, in which containers of Docker also run.
    """

    def __init__(self, settings: Mapping[str, str], cgroup: str) -> None:
        self._settings = settings
        self._docker = [settings["docker.binary"], "--host", settings["docker.host"]]
        self._cgroup = cgroup

    def run(self, arguments: Sequence[str]) -> int:
        """Run one command, and return its exit code."""
        first = arguments[0]
        if first in _IGNORED:
            return 0
        if first == "--run-docker":
            return self._run_docker(_read(arguments[1]))
        if first == "--inspect-docker-container":
            return self._pass_on("inspect", *arguments[1:])
        if first == "--remove-docker-container":
            return self._pass_on("rm", "--force", arguments[-1])
        who = pwd.getpwnam(first)
        user, operation, *rest = arguments[1:]
        operations: dict[str, Callable[..., int]] = {
            "0": self._initialize,
            "1": self._launch,
            "2": self._signal,
            "3": self._delete,
            "4": self._launch_in_docker,
            "5": self._list,
        }
        return operations[operation](who, user, *rest)

    def _initialize(
        self,
        who: pwd.struct_passwd,
        user: str,
        app: str,
        container: str,
        tokens: str,
        local_dirs: str,
        log_dirs: str,
        *command: str,
    ) -> NoReturn:
        """Create an application's directories, and run the localizer as its user."""
        for root in local_dirs.split("%"):
            for part in ("", "appcache", "filecache"):
                _make(f"{root}/usercache/{user}/{part}", who)
            _make(f"{root}/usercache/{user}/appcache/{app}", who, 0o710)
        for root in log_dirs.split("%"):
            _make(f"{root}/{app}", who)
        home = Path(local_dirs.split("%")[0], "usercache", user, "appcache", app)
        _copy(tokens, home / Path(tokens).name, who, 0o600)
        _become(who)
        os.chdir(home)
        os.execv(command[0], command)

    def _launch(
        self,
        who: pwd.struct_passwd,
        user: str,
        app: str,
        container: str,
        work: str,
        script: str,
        tokens: str,
        *rest: str,
    ) -> int:
        """Run a container's script as a process of this machine, and wait for its end."""
        pid_file, resources = _prepare(who, user, app, container, work, script, tokens, rest)
        _, _, tasks = resources.partition("=")
        pid = os.fork()
        if not pid:
            os.setsid()
            _write_atomically(pid_file, str(os.getpid()))
            for file in tasks.split("%"):
                if file and file != _NO_RESOURCES:
                    Path(file).write_text(str(os.getpid()))
            _become(who)
            os.chdir(work)
            os.execv("/bin/bash", ["bash", f"{work}/launch_container.sh"])
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return _record_exit(pid_file, code if code >= 0 else _SIGNAL_BASE - code)

    def _launch_in_docker(
        self,
        who: pwd.struct_passwd,
        user: str,
        app: str,
        container: str,
        work: str,
        script: str,
        tokens: str,
        *rest: str,
    ) -> int:
        """Run a container's script in a container of Docker, and wait for its end."""
        pid_file, file = _prepare(who, user, app, container, work, script, tokens, rest)
        command = _read(file)
        is_trusted = self._is_trusted(command["image"])
        self._check_requests(command, is_trusted=is_trusted)
        if code := self._pass_on(*self._run_arguments(command, is_trusted=is_trusted)):
            print(f"Docker container exit code was not zero: {code}", file=sys.stderr)
            return _UNABLE_TO_EXECUTE_SCRIPT
        pid = self._output("inspect", "--format={{.State.Pid}}", container)
        if pid != "0":
            _write_atomically(pid_file, pid)
        return _record_exit(pid_file, int(self._output("wait", container)))

    def _is_trusted(self, image: str) -> bool:
        """Return whether an image is trusted: the containers of another image get no mounts."""
        trusted = self._values_of("docker.trusted.registries")
        is_top_level = "/" not in image and "library" in trusted
        is_trusted = is_top_level or any(image.startswith(f"{name}/") for name in trusted)
        if not is_trusted:
            print(f"image: {image} is not trusted.", file=sys.stderr)
        return is_trusted

    def _check_requests(self, command: Mapping[str, str], *, is_trusted: bool) -> None:
        """Raise RefusedError, with the real program's message, for what is not allowed."""
        if command.get("net") not in (None, *self._values_of("docker.allowed.networks")):
            raise RefusedError(
                f"Invalid param '{command['net']}' requested\n"
                "Could not find requested network in allowed networks",
                "Invalid docker network",
            )
        runtimes = self._values_of("docker.allowed.runtimes") if is_trusted else ()
        if command.get("runtime") not in (None, *runtimes):
            raise RefusedError(
                f"Invalid param '{command['runtime']}' requested\n"
                "Could not find requested runtime in allowed runtimes",
                "Invalid docker runtime",
            )
        if is_trusted:
            self._check_mounts(command)

    def _check_mounts(self, command: Mapping[str, str]) -> None:
        writable = self._values_of("docker.allowed.rw-mounts")
        readable = (*writable, *self._values_of("docker.allowed.ro-mounts"))
        for mount in _list(command, "mounts"):
            source, _, rest = mount.partition(":")
            kind = "read-only" if rest.partition(":")[2].startswith("ro") else "read-write"
            accepted = readable if kind == "read-only" else writable
            path = os.path.realpath(source)
            if not any(f"{path}/".startswith(f"{place.rstrip('/')}/") for place in accepted):
                raise RefusedError(
                    f"Configuration does not allow docker mount '{mount}', realpath={path}",
                    f"Invalid docker {kind} mount",
                )

    def _values_of(self, name: str) -> tuple[str, ...]:
        return tuple(filter(None, self._settings.get(name, "").split(",")))

    def _run_arguments(self, command: Mapping[str, str], *, is_trusted: bool) -> list[str]:
        arguments = [
            "run",
            "--detach",
            f"--name={command['name']}",
            f"--cgroup-parent={self._cgroup}",
        ]
        for key in ("net", "user", "workdir", "hostname", "runtime", "pid"):
            if key in command:
                arguments.append(f"--{key}={command[key]}")
        flags = {
            "cap-add": "--cap-add",
            "group-add": "--group-add",
            "devices": "--device",
            **({"mounts": "--volume"} if is_trusted else {}),
            "tmpfs": "--tmpfs",
        }
        for key, flag in flags.items():
            arguments += [f"{flag}={value}" for value in _list(command, key)]
        arguments.append("--cap-drop=ALL")
        if "environ" in command:
            arguments.append(f"--env-file={command['environ']}")
        return [*arguments, command["image"], *_list(command, "launch-command")]

    def _run_docker(self, command: Mapping[str, str]) -> int:
        name, kind = command.get("name", ""), command["docker-command"]
        arguments = {
            "inspect": ["inspect", f"--format={command.get('format', '')}", name],
            "kill": ["kill", f"--signal={command.get('signal', 'KILL')}", name],
            "stop": ["stop", f"--time={command.get('time', '10')}", name],
            "start": ["start", name],
            "rm": ["rm", "--force", name],
            "images": ["images", *_list(command, "image")],
            "pull": ["pull", command.get("image", "")],
            "volume": ["volume", command.get("sub-command", "ls")],
        }
        return self._pass_on(*arguments[kind])

    def _pass_on(self, *arguments: str) -> int:
        """Run a command of Docker with this program's output; return its exit code."""
        return subprocess.run([*self._docker, *arguments], check=False).returncode

    def _output(self, *arguments: str) -> str:
        command = [*self._docker, *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    def _signal(self, who: pwd.struct_passwd, user: str, pid: str, number: str) -> int:
        for send in (os.killpg, os.kill):
            try:
                send(int(pid), int(number))
            except ProcessLookupError:
                continue
            return 0
        return _UNABLE_TO_SIGNAL

    def _delete(self, who: pwd.struct_passwd, user: str, directory: str, *bases: str) -> int:
        if bases:
            paths = [Path(base, directory) if directory else Path(base) for base in bases]
        else:
            paths = [Path(directory)]
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return 0

    def _list(self, who: pwd.struct_passwd, user: str, directory: str) -> int:
        print("\n".join(path.name for path in Path(directory).iterdir()))
        return 0


def _prepare(
    who: pwd.struct_passwd,
    user: str,
    app: str,
    container: str,
    work: str,
    script: str,
    tokens: str,
    rest: Sequence[str],
) -> tuple[str, str]:
    """Create a container's directories; return the path of its pid file and the next argument."""
    # After "--http", or "--https" with two key stores.
    pid_file, local_dirs, log_dirs, following = rest[3 if rest[0] == "--https" else 1 :][:4]
    for root in local_dirs.split("%"):
        home = f"{root}/usercache/{user}/appcache/{app}"
        _make(home, who, 0o710)
        _make(f"{home}/{container}", who)
    for root in log_dirs.split("%"):
        _make(f"{root}/{app}", who)
        _make(f"{root}/{app}/{container}", who)
    _copy(script, Path(work, "launch_container.sh"), who, 0o700)
    _copy(tokens, Path(work, "container_tokens"), who, 0o600)
    return pid_file, following


def _make(path: str, who: pwd.struct_passwd, mode: int = 0o750) -> None:
    Path(path).mkdir(parents=True, exist_ok=True)
    os.chown(path, who.pw_uid, who.pw_gid)
    Path(path).chmod(mode)


def _copy(source: str, target: Path, who: pwd.struct_passwd, mode: int) -> None:
    shutil.copyfile(source, target)
    os.chown(target, who.pw_uid, who.pw_gid)
    target.chmod(mode)


def _become(who: pwd.struct_passwd) -> None:
    if os.getuid() != who.pw_uid:
        os.initgroups(who.pw_name, who.pw_gid)
        os.setgid(who.pw_gid)
        os.setuid(who.pw_uid)


def _write_atomically(path: str, text: str) -> None:
    new = Path(f"{path}.tmp")
    new.write_text(text)
    new.replace(path)


def _record_exit(pid_file: str, code: int) -> int:
    _write_atomically(f"{pid_file}.exitcode", str(code))
    return code


def _list(command: Mapping[str, str], key: str) -> list[str]:
    return [value for value in command.get(key, "").split(",") if value]


def _read(path: str) -> dict[str, str]:
    """Return the properties of a file: `name=value` in each line, besides a section's header."""
    lines = (line.strip().partition("=") for line in Path(path).read_text().splitlines())
    return {name.strip(): value for name, equals, value in lines if equals}


def _memory_cgroup(text: str) -> str:
    """Return the memory cgroup in the text of /proc/self/cgroup; "/" if there is none."""
    lines = (line.split(":", 2) for line in text.splitlines())
    return next((path for _, kinds, path in lines if "memory" in kinds.split(",")), "/")


def main(arguments: Sequence[str]) -> int:
    cfg, *rest = arguments
    program = ContainerExecutor(_read(cfg), _memory_cgroup(Path("/proc/self/cgroup").read_text()))
    try:
        return program.run(rest)
    except RefusedError as error:
        details, name = error.args
        print(
            f"{details}\nError constructing docker command, error message='{name}'", file=sys.stderr
        )
        return _INVALID_DOCKER_COMMAND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
