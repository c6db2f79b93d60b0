"""A rank's reports on its training, and how the driver sums them up.

A report is one line of JSON, appended to a file in the rank's directory beside its log. An append
takes some microseconds, waits for nobody, and survives if the rank is killed. Samples of the rank's
GPUs are written to the same file.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hopsgpu.core.gpu_usage import GpuSample, GpuUsage, idle_warning
from hopsgpu.errors import ConfigError

# The file's name in the rank's directory, beside its context.
FILE = "metrics.jsonl"
_MAX_STEP = 2**63 - 1
_MAX_NAMES = 1000
MAX_NAME_LENGTH = 200
# A character of a name takes up to 12 bytes in JSON, and a number up to 25.
_MAX_LINE = _MAX_NAMES * (12 * MAX_NAME_LENGTH + 32)


def report_line(step: object, metrics: Mapping[str, object], time: float) -> bytes:
    """Return a report as a line of the file.

    Args:
        step: an int in [0, 2**63), also one of NumPy or torch.
        metrics: at most 1,000 numbers by name: all values that `float()` accepts, except texts. For
            a tensor on a GPU, `float()` waits for the GPU.

    Raises:
        ConfigError: an argument is anything else.
    """
    if len(metrics) > _MAX_NAMES:
        raise ConfigError(f"report() of {len(metrics)} metrics: at most {_MAX_NAMES} are accepted")
    numbers = {_name(name): for_json(_number(name, value)) for name, value in metrics.items()}
    return _line({"time": time, "step": _step(step), "metrics": numbers})


def split_recordable(metrics: Mapping[str, object]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the metrics that `report_line` accepts, in their order up to its limit, and problems.

    Returns:
        The numbers by name; and for each kind of problem ("name", "value", "number") a message
        about the first metric that has the problem.
    """
    numbers: dict[str, float] = {}
    problems: dict[str, str] = {}
    for name, value in metrics.items():
        try:
            kind = "name"
            checked = _name(name)
            kind = "value"
            number = _number(checked, value)
        except ConfigError as error:
            problems.setdefault(kind, str(error))
            continue
        if len(numbers) < _MAX_NAMES or checked in numbers:
            numbers[checked] = number
        else:
            problems.setdefault(
                "number",
                f"{checked!r} is one of {len(metrics)} metrics at a step, of which the first"
                f" {_MAX_NAMES} are recorded",
            )
    return numbers, problems


def for_json(number: float) -> float | str:
    """Return a number for JSON: NaN and the infinities, which JSON lacks, as strings.

    `float()` reads these strings, which the JSON mapping of Protocol Buffers uses too.
    """
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def sample_line(sample: GpuSample) -> bytes:
    return _line({"time": sample.time, "gpu": sample.fields()})


def append(file: str | os.PathLike[str], line: bytes) -> None:
    """Append a line to a file to which other processes append too; raise OSError on a full disk."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


class MetricsChunk:
    """Combines reports for one message: the last value of each metric, and all samples."""

    def __init__(self) -> None:
        self._rest = b""
        self._step: int | None = None
        self._metrics: dict[str, float | str] = {}
        self._samples: list[Mapping[str, Any]] = []

    def __bool__(self) -> bool:
        return self._step is not None or bool(self._samples)

    def add(self, content: bytes) -> None:
        """Add the next bytes of the file of `append`; they may end within a line."""
        *lines, rest = (self._rest + content).split(b"\n")
        # The user's code may write to the file too: a longer line is no report.
        self._rest = rest[-_MAX_LINE:]
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                # A full disk cut the line off.
                continue
            if "gpu" in record:
                self._samples.append({"time": record["time"], **record["gpu"]})
            else:
                self._step = record["step"]
                self._metrics |= record["metrics"]

    def flush(self) -> bytes:
        """Return the reports and samples since the last call, for `Metrics.add_chunk`."""
        content = {"step": self._step, "metrics": self._metrics, "gpus": self._samples}
        self._step, self._metrics, self._samples = None, {}, []
        return _line(content)


class _RankMetrics:
    """The metrics of one rank at the driver.

    Attributes:
        last: the last values; a new mapping at each change, so callers may keep the mapping.
        refused: number of values whose names exceed the bound.
        usage: the use of each of the rank's GPUs, by UUID.
    """

    def __init__(self) -> None:
        self.last: Mapping[str, float] = {}
        self.refused = 0
        self.usage: dict[str, GpuUsage] = {}
        self._step: dict[str, float] = {}
        self._reported: dict[str, float] = {}
        self._sampled: dict[str, GpuSample] = {}

    def add_chunk(self, content: Mapping[str, Any]) -> Sequence[GpuSample]:
        if content["step"] is not None:
            self._step = {"step": content["step"]}
        for name, value in content["metrics"].items():
            if name in self._reported or len(self._reported) < _MAX_NAMES:
                self._reported[name] = float(value)
            else:
                self.refused += 1
        samples = [GpuSample(**fields) for fields in content["gpus"]]
        for sample in samples:
            self._sampled[sample.uuid] = sample
            self.usage[sample.uuid] = self.usage.get(sample.uuid, GpuUsage()).with_sample(sample)
        readings = {
            f"gpu.{number}.{name}": value
            for number, uuid in enumerate(self.usage)
            for name, value in self._readings(uuid).items()
        }
        # Set the step again: a metric may be named "step" too.
        self.last = self._step | self._reported | readings | self._step
        return samples

    def _readings(self, uuid: str) -> dict[str, float]:
        peak = self.usage[uuid].peak_memory
        return self._sampled[uuid].readings() | ({} if peak is None else {"memory_peak": peak})


class Metrics:
    """The last values of each rank, at the driver, in bounded memory."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = {rank: _RankMetrics() for rank in ranks}

    def add_chunk(self, rank: int, chunk: bytes) -> Sequence[GpuSample]:
        """Add the result of `MetricsChunk.flush` for a rank; return its samples of GPUs."""
        return self._ranks[rank].add_chunk(json.loads(chunk))

    def last_values(self) -> tuple[Mapping[str, float], ...]:
        """Return the last values of each rank, by name.

        "step" is the step of the last report, even if a metric has this name. The rank's n-th GPU
        has, as far as NVML reports them, "gpu.n.utilisation" (share in [0, 1]),
        "gpu.n.memory_used", "gpu.n.memory_peak", "gpu.n.memory_total" (bytes), "gpu.n.power" (W)
        and "gpu.n.temperature" (°C).
        """
        return tuple(metrics.last for metrics in self._ranks.values())

    def utilisation(self, rank: int) -> float | None:
        """Return the mean share in [0, 1] over a rank's GPUs, or None if nothing was sampled."""
        utilisations = (usage.utilisation for usage in self._ranks[rank].usage.values())
        means = [mean for mean in utilisations if mean is not None]
        return sum(means) / len(means) if means else None

    def unused_seconds(self, rank: int) -> float:
        """Return the seconds in which a rank's GPUs were not used, on average; 0 if unknown."""
        usage = self._ranks[rank].usage.values()
        return sum(gpu.unused for gpu in usage) / len(usage) if usage else 0.0

    def warnings(self, rank: int, host: str) -> list[str]:
        """Return warnings for users about a rank that has ended."""
        metrics = self._ranks[rank]
        idle = (
            idle_warning(rank, host, gpu, usage.idle_share, usage.seconds)
            for gpu, usage in metrics.usage.items()
        )
        warnings = [warning for warning in idle if warning is not None]
        if metrics.refused:
            warnings.append(
                f"rank {rank} reported more than {_MAX_NAMES} different metrics; later ones"
                f" are only in {record_name(rank)}, beside its log"
            )
        return warnings


def record_name(rank: int) -> str:
    """Return the name of a rank's record of reports and samples, in the run's log directory."""
    return f"metrics-{rank}.jsonl"


def _name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise ConfigError(
            f"report() of a metric named {_short_repr(name)}: must be a name of 1 to"
            f" {MAX_NAME_LENGTH} characters"
        )
    # A name with lone surrogates cannot be printed.
    return name.encode(errors="backslashreplace").decode()


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError("a string")
        if hasattr(value, "detach"):
            # torch warns if a tensor that still has a gradient, such as a loss, becomes a number.
            value = value.detach()
            if value.numel() != 1:
                raise TypeError(f"a tensor of {value.numel()} elements")
            # float() raises RuntimeError for these tensors, but also after a failure of the GPU.
            is_complex = getattr(getattr(value, "dtype", None), "is_complex", False)
            if getattr(value, "is_meta", False) or is_complex:
                raise TypeError("a tensor without a real number")
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"report({name}={_short_repr(value)}): must be a number, or a value that float()"
            f" accepts ({error})"
        ) from error
    return number


def _step(step: object) -> int:
    try:
        if isinstance(step, bool):
            raise TypeError("a bool")
        number = operator.index(step)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"report(step={_short_repr(step)}): must be an int ({error})") from error
    if not 0 <= number <= _MAX_STEP:
        raise ConfigError(f"report(step={_short_repr(number)}): must be an int in [0, 2**63)")
    return number


def _short_repr(value: object) -> str:
    try:
        return f"{value!r:.99}"
    except ValueError:  # an int with more digits than Python converts to text
        return f"an {type(value).__name__} that is too long to show"


def _line(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, allow_nan=False).encode() + b"\n"
