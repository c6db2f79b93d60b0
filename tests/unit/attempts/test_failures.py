from __future__ import annotations

import dataclasses

import pytest

from hopsgpu.attempts.failures import (
    RankExit,
    exclusions_after,
    executor_lost_error,
    first_failure,
    rank_error,
    timeout_error,
)
from hopsgpu.attempts.retry_policy import (
    FailureCause,
    failure_cause,
    next_exclusions,
    should_retry,
    suspect_host,
)
from hopsgpu.core.gang import Exclusions, GangExecutor, RankPlacement
from hopsgpu.gpu.driver_events import GpuEvent

URL = "file:///runs/r/logs/rank-1.log"


def place(rank: int = 1, role: str = "worker") -> RankPlacement:
    container = GangExecutor(rank, f"container_{rank}", f"node{rank}", "10.0.0.1", (f"GPU-{rank}",))
    return RankPlacement(rank, 0, rank, container, container.gpus if role == "worker" else (), role)


def ended(rank: int = 1, at: float = 10.0, **known: object) -> RankExit:
    given = {
        "exit_code": 1,
        "signal": None,
        "outcome": {},
        "log_tail": (),
        "was_stopped": False,
        **known,
    }
    return RankExit(place=place(rank), at=at, **given)  # type: ignore[arg-type]


def raised(error: str, **known: object) -> RankExit:
    return ended(outcome={"status": "raised", "error": error, "traceback": "frames"}, **known)


def test_the_first_by_time_is_the_failure_and_not_what_we_stopped() -> None:
    ends = [
        raised("RuntimeError: connection closed by peer", rank=0, at=5.0),
        raised("ValueError: the cause", rank=2, at=4.0),
        ended(rank=3, at=1.0, was_stopped=True, signal="SIGTERM", exit_code=None),
        ended(rank=4, at=0.5, outcome={"status": "returned"}, exit_code=0),
    ]
    first = first_failure(ends)
    assert first is not None and first.place.rank == 2
    assert first_failure(ends[2:]) is None


def test_who_was_killed_comes_before_who_complains_of_it_in_the_same_moment() -> None:
    killed = ended(rank=0, at=4.01, signal="SIGKILL", exit_code=None)
    complaint = raised("RuntimeError: connection closed by peer", rank=1, at=4.0)
    earlier = raised("ValueError: the cause", rank=2, at=3.9)
    assert first_failure([complaint, killed]) is killed
    assert first_failure([complaint, killed, earlier]) is earlier


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (raised("ValueError: bad"), "raised ValueError: bad\nframes"),
        (ended(outcome={"status": "exited"}, exit_code=3), "called sys.exit: exit code 3\n"),
        (
            ended(outcome={"status": "exited", "error": "no data\nin /x"}, exit_code=1),
            "called sys.exit: exit code 1: no data\nin /x\n",
        ),
        (
            ended(exit_code=5),
            "ended with exit code 5 and without a value or an exception: a program",
        ),
        (ended(signal="SIGSEGV", exit_code=None), "ended by SIGSEGV: native code crashed"),
        (ended(signal="SIGBUS", exit_code=None), "most often because /dev/shm on node1 is full"),
        (ended(signal="SIGKILL", exit_code=None), "by SIGKILL, which hopsgpu did not send"),
        (
            ended(signal="SIGKILL", exit_code=None, oom_kills=1),
            "the kernel killed it because its container, or the node, had no memory left",
        ),
        (ended(signal="SIGTERM", exit_code=None), "by SIGTERM, which hopsgpu did not send"),
        (
            ended(outcome={"status": "over memory", "error": "9 MiB of 8 MiB"}),
            "exceeded its memory limit: 9 MiB of 8 MiB",
        ),
        (
            ended(outcome={"status": "not started", "error": "no such file"}),
            "could not be started: no such file",
        ),
        (
            ended(outcome={"status": "unpicklable", "error": "a lock that cannot be pickled"}),
            "returned a lock that cannot be pickled; return plain data, or leave it in model_dir",
        ),
        (
            ended(outcome={"status": "too large", "error": "9 bytes pickled"}),
            "returned a value of 9 bytes pickled; leave large results in model_dir",
        ),
        (
            raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
            "the memory of GPU GPU-1 is full: use smaller batches",
        ),
        (
            raised("RuntimeError: The NVIDIA driver on your system is too old (found 11040)"),
            "the NVIDIA driver or GPU of node1 does not support the CUDA",
        ),
        (
            raised("RuntimeError: CUDA error: uncorrectable ECC error encountered"),
            "GPU GPU-1 of node1 is broken or lost",
        ),
        (raised("RuntimeError: No CUDA GPUs are available"), "cannot open GPU GPU-1 of node1"),
        (raised("EOFError: EOF when reading a line"), "has no terminal: to debug the function"),
        (
            raised("ValueError: invalid literal for int() with base 10: 'GPU-99db41de-ff1e'"),
            "CUDA_VISIBLE_DEVICES contains UUIDs",
        ),
        (raised("BdbQuit: "), "call it without launch()"),
        (raised("RuntimeError: Gloo connectFullMesh failed with x"), "a store of its own"),
        (raised("MemoryError: Unable to allocate"), "raise memory_per_worker, or use less"),
        (raised("ModuleNotFoundError: No module named 'x'"), "Python (spark.pyspark.python)"),
    ],
)
def test_error_names_the_end_and_a_remedy(end: RankExit, words: str) -> None:
    failure = rank_error(end, URL)
    assert words in str(failure)
    assert "container_1, GPU GPU-1" in str(failure).splitlines()[0]
    assert str(failure).endswith(f"whole log: {URL}")
    assert (failure.rank, failure.host, failure.gpus) == (1, "node1", ("GPU-1",))
    assert (failure.exit_code, failure.signal) == (end.exit_code, end.signal)


def test_error_without_an_exception_has_the_end_of_the_log() -> None:
    failure = rank_error(ended(exit_code=2, log_tail=("one", "two")), URL)
    assert ":\n  one\n  two\n" in str(failure)
    assert failure.log_tail == ("one", "two")


def test_first_line_of_an_abort_has_the_cause_and_the_last_lines_the_source() -> None:
    frame = f'  File "{__file__}", line 1 in step'
    said = ("  what():  the shard is broken", "Fatal Python error: Aborted", frame)
    thrown = "terminate called after throwing an instance of 'std::runtime_error'"
    end = ended(signal="SIGABRT", exit_code=None, log_tail=(thrown, *said))
    first, *rest = str(rank_error(end, URL)).splitlines()
    assert " SIGABRT: std::runtime_error: the shard is broken; " in first
    assert rest[-3:-1] == [f"  {frame}", "      from __future__ import annotations"]


def test_crash_of_a_child_process_is_added_to_the_error_of_the_rank() -> None:
    outcome = {
        "status": "raised",
        "error": "RuntimeError: DataLoader worker (pid 7) is killed by signal: Aborted.",
        "traceback": "frames",
        "besides": "a process that it had started crashed:\nfree(): invalid pointer\n"
        "Fatal Python error: Aborted",
    }
    message = str(rank_error(ended(outcome=outcome), URL))
    assert "crashed:\n  free(): invalid pointer\n" in message
    # A list of trials shows the last line of the traceback.
    assert message.endswith(f"  Fatal Python error: Aborted\nframes\nwhole log: {URL}")


def test_error_of_many_lines_is_shown_once() -> None:
    words = "KeyError: Caught KeyError in DataLoader worker process 0.\n" + "frame\n" * 20
    outcome = {"status": "raised", "error": words, "traceback": f"Traceback:\n{words}"}
    message = str(rank_error(ended(outcome=outcome), URL))
    assert message.count("frame\n") == 20
    assert "Caught KeyError in DataLoader worker process 0. ...\n" in message


def test_timeout_counts_the_ranks_and_has_the_stack_of_the_first() -> None:
    end = ended(was_stopped=True, signal="SIGKILL", exit_code=None, log_tail=("  File x in wait",))
    failure = timeout_error(place(1), 90.0, list(range(1, 31)), end, URL)
    assert "run_timeout=90 s; 30 ranks" in str(failure)
    assert ", 20, ...)" in str(failure)
    assert "File x in wait" in str(failure)
    assert failure.signal == "SIGKILL"


# Spark's words (YarnAllocator) for YARN's exit code -104.
OVER = "Container killed by YARN for exceeding physical memory limits. 5 GB of 4 GB used"


def test_error_of_a_lost_executor_has_yarns_reason_and_the_command_for_its_log() -> None:
    failure = executor_lost_error(place(1), f"{OVER}.", URL)
    assert "rank 1 on node1 " in str(failure) and "container_1)" in str(failure)
    assert f"{OVER}; raise memory_per_worker. " in str(failure)
    assert "yarn logs -cont" in str(failure)
    assert "memory_per_worker" not in str(executor_lost_error(place(1), "Container preempted", URL))


def test_error_names_a_parameter_server() -> None:
    end = RankExit(place(2, "ps"), 0.0, 1, None, {}, (), was_stopped=False)
    assert str(rank_error(end, URL)).startswith("parameter server 2 on node2")


def test_cause_of_a_failure() -> None:
    bug = [raised("KeyError: 'x'", rank=rank) for rank in range(3)]
    assert failure_cause(bug[0], bug) is FailureCause.CODE
    assert failure_cause(bug[0], bug[:1]) is FailureCause.RANK
    assert failure_cause(bug[0], [*bug[:2], raised("OSError: gone", rank=2)]) is FailureCause.RANK
    assert failure_cause(bug[0], [*bug[:2], ended(was_stopped=True)]) is FailureCause.RANK
    killed = ended(signal="SIGKILL", exit_code=None)
    assert failure_cause(killed, [killed]) is FailureCause.RANK
    not_started = ended(outcome={"status": "not started", "error": "no memory"})
    assert failure_cause(not_started, [not_started, *bug]) is FailureCause.INFRASTRUCTURE
    assert failure_cause(bug[0], [bug[0], not_started]) is FailureCause.RANK
    lock = ended(outcome={"status": "unpicklable"})
    assert failure_cause(lock, [lock]) is FailureCause.CODE


def test_complaints_of_peers_are_no_errors_of_the_code() -> None:
    broken = raised("RuntimeError: CUDA error: unspecified launch failure", rank=1)
    complaint = raised("RuntimeError: [pair.cc:547] Connection closed by peer [10.0.0.2]:5", rank=0)
    assert failure_cause(broken, [broken, complaint]) is FailureCause.RANK


def test_errors_that_differ_in_numbers_are_the_same() -> None:
    bug = [
        raised(f"ValueError: shard {rank} at 0x7f{rank}a is empty", rank=rank) for rank in (0, 1)
    ]
    assert failure_cause(bug[0], bug) is FailureCause.CODE


def test_same_message_from_another_line_is_another_error() -> None:
    def at(line: int) -> RankExit:
        text = f'Traceback:\n  File "/a/b.py", line {line}, in train\n    x\nValueError: bad\n'
        outcome = {"status": "raised", "error": "ValueError: bad", "traceback": text}
        return ended(rank=line, outcome=outcome)

    assert failure_cause(at(1), [at(1), at(2)]) is FailureCause.RANK
    assert failure_cause(at(1), [at(1), at(1)]) is FailureCause.CODE


def test_broken_gpu_is_no_error_of_the_code() -> None:
    errors = [raised("RuntimeError: CUDA error: uncorrectable ECC error", rank=r) for r in (0, 1)]
    assert failure_cause(errors[0], errors) is FailureCause.RANK


def test_log_excludes_nothing_and_explains_no_kill() -> None:
    line = ("probe: No CUDA GPUs are available in a helper", "step 9")
    crashed = ended(signal="SIGABRT", exit_code=None, log_tail=line)
    assert "cannot open GPU GPU-1" in str(rank_error(crashed, URL))
    assert not exclusions_after(crashed).is_any
    killed = ended(signal="SIGKILL", exit_code=None, log_tail=line)
    assert "cannot open" not in str(rank_error(killed, URL))
    error = raised("RuntimeError: No CUDA GPUs are available")
    assert exclusions_after(error) == Exclusions(gpus=frozenset({("node1", "GPU-1")}))


def test_error_of_a_process_without_gpu_says_so() -> None:
    server = dataclasses.replace(
        raised("RuntimeError: No CUDA GPUs are available"), place=place(role="ps")
    )
    assert "has no GPU" in str(rank_error(server, URL))
    assert not exclusions_after(server).is_any


@pytest.mark.parametrize(
    ("reason", "suspected"),
    [
        ("Container container_1 on host: node1 was preempted.", None),
        ("Container killed by YARN for exceeding physical memory limits. 2.0 GB of 2 GB", None),
        ("Container killed by YARN for exceeding virtual memory limits.", None),
        ("Container from a bad node: container_1 on host: node1. Exit status: 134.", "node1"),
        ("no heartbeat for 30 s", "node1"),
    ],
)
def test_node_of_a_lost_executor_is_not_always_suspect(reason: str, suspected: str | None) -> None:
    assert suspect_host("node1", reason) == suspected


def test_node_that_loses_two_executors_is_excluded() -> None:
    assert next_exclusions(Exclusions(), ["node1", "node2"]) == Exclusions()
    assert next_exclusions(Exclusions(), ["node1", "node2", "node1"]) == Exclusions(
        hosts=frozenset({"node1"})
    )


def test_gpu_event_of_the_driver_explains_the_error() -> None:
    fell = GpuEvent("GPU-1", "bad", "XID 79, GPU has fallen off the bus: reboot the node")
    end = raised("RuntimeError: CUDA error: unspecified launch failure", gpu_events=[fell, fell])
    message = str(rank_error(end, URL))
    assert message.count("XID 79") == 1 and "GPU-1 of node1: XID 79" in message
    assert exclusions_after(end) == Exclusions(gpus=frozenset({("node1", "GPU-1")}))
    assert failure_cause(end, [end, raised("RuntimeError: other", rank=0)]) is FailureCause.RANK
    assert exclusions_after(ended(signal="SIGKILL", exit_code=None, gpu_events=[fell])).is_any


def test_errors_distinguish_a_stop_for_a_gpu_from_a_crash() -> None:
    event = GpuEvent("GPU-1", "bad", "XID 48, double-bit ECC error: nvidia-smi --gpu-reset")
    known = {"exit_code": None, "gpu_events": [event]}
    killed = ended(outcome={"status": "gpu failed", "error": "x"}, signal="SIGKILL", **known)
    stopped = str(rank_error(killed, URL))
    assert "stopped by hopsgpu: its GPU" in stopped
    crashed = str(rank_error(ended(signal="SIGSEGV", **known), URL))
    assert "ended by SIGSEGV" in crashed
    for message in (stopped, crashed):
        assert "GPU-1 of node1: XID 48" in message and "lost" not in message


def test_an_event_that_the_program_caused_blames_nobody() -> None:
    caused = [GpuEvent("GPU-1", "healthy", "XID 31, GPU memory page fault: look for the cause")]
    end = raised("RuntimeError: CUDA error: an illegal memory access", gpu_events=caused)
    assert "XID 31" in str(rank_error(end, URL)) and not exclusions_after(end).is_any
    full = raised("RuntimeError: CUDA out of memory", gpu_events=caused)
    assert "XID" not in str(rank_error(full, URL))


def test_what_is_tried_again() -> None:
    assert should_retry(FailureCause.RANK, retried=0, retries=1, retry_user_errors=False)
    assert not should_retry(FailureCause.RANK, retried=1, retries=1, retry_user_errors=False)
    assert should_retry(FailureCause.INFRASTRUCTURE, retried=2, retries=3, retry_user_errors=False)
    assert not should_retry(FailureCause.CODE, retried=0, retries=3, retry_user_errors=False)
    assert should_retry(FailureCause.CODE, retried=0, retries=3, retry_user_errors=True)
    assert not should_retry(FailureCause.RANK, retried=0, retries=0, retry_user_errors=True)


def test_a_rank_that_exits_shows_what_it_wrote_before_its_traceback() -> None:
    usage = (
        "usage: train.py [-h] --lr LR",
        "train.py: error: the following ... required: --lr",
        "",
    )
    exited = {"status": "exited", "traceback": "frames"}
    lines = tuple(f"step {n}" for n in range(17))
    failure = rank_error(ended(exit_code=2, outcome=exited, log_tail=(*lines, *usage)), URL)
    told = str(failure).splitlines()
    assert told[0].endswith(f" called sys.exit: exit code 2: {usage[1]}")
    assert told[1:-2] == [
        "the last lines of its log:",
        *(f"  {line}" for line in (*lines[-7:], *usage[:-1])),
    ]
    assert told[-2] == "frames"


@pytest.mark.parametrize(
    ("end", "summary"),
    [
        (raised("ValueError: bad batch\nof 7 rows"), "ValueError: bad batch"),
        (ended(signal="SIGTERM", exit_code=None), "rank 1 was ended by SIGTERM, which hopsgpu did"),
        (ended(outcome={"status": "exited"}, exit_code=3), "rank 1 called sys.exit: exit code 3"),
    ],
)
def test_a_failure_in_short_begins_with_what_failed(end: RankExit, summary: str) -> None:
    error = rank_error(end, URL)
    assert error.summary.startswith(summary) and "container" not in error.summary
    assert "\n" not in error.summary


def test_a_lost_executor_in_short() -> None:
    error = executor_lost_error(place(), "Container released on a *lost* node.", URL)
    assert error.summary == "the executor of rank 1 was lost: Container released on a *lost* node"
    assert timeout_error(place(), 5.0, [1, 2], None, URL).summary == (
        "run_timeout=5 s: rank 1 was still running"
    )
