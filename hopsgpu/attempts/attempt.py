"""One attempt on a whole gang: the messages to its agents, and the handling of their answers."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hopsgpu.agent import sent_log
from hopsgpu.attempts.attempt_request import run_messages
from hopsgpu.attempts.attempt_watcher import AttemptWatcher, Step, WatchBounds
from hopsgpu.attempts.checkpoint_request import (
    AgentMessage,
    Agreed,
    AgreedCheckpoint,
    CheckpointRequest,
    NotAgreed,
)
from hopsgpu.attempts.failures import RankExit
from hopsgpu.attempts.outcome import (
    AttemptFailure,
    IdleEnd,
    RankEnds,
    rank_exit,
    unusual_exit_warnings,
)
from hopsgpu.attempts.publisher import Agents, Publisher
from hopsgpu.attempts.rank_call import Call
from hopsgpu.attempts.rank_output import Outputs
from hopsgpu.attempts.rank_table import FunctionEntry, RankTable
from hopsgpu.attempts.rendezvous import Rendezvous, RendezvousFailure, arrange_rendezvous
from hopsgpu.attempts.retry_policy import FailureCause
from hopsgpu.attempts.return_values import Value, value_of
from hopsgpu.backends.agent_registration import check_data
from hopsgpu.backends.gang_allocation import GangAllocation, refuse_duplicates
from hopsgpu.backends.spark.token_renewal import TokenSender
from hopsgpu.control.channel import Message
from hopsgpu.control.events import Event
from hopsgpu.control.subscriptions import Subscription
from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.gang import GangExecutor, RankPlacement, World
from hopsgpu.core.gpu_idle import GpuIdleWatch, IdleStep
from hopsgpu.display.progress import Progress
from hopsgpu.errors import Cancelled, HopsGpuError
from hopsgpu.storage.background import Background, Work

log = logging.getLogger(__name__)

_EVENT_SECONDS = 0.2
# Wait for the reason of a loss: Spark asks YARN first, and only then fails the job.
_REASON_SECONDS = 5.0
_PENDING_SECONDS = 30.0
# Samples of GPUs come every second.
_IDLE_POLL_SECONDS = 1.0
_MAX_LISTED = 8


class AttemptListener:
    """A listener to the progress of an attempt, called in the attempt's thread."""

    def on_placement(self, ranks: RankTable) -> None:
        """Called before any rank starts."""

    def on_start(self, rank: int) -> None: ...

    def on_entry(self, entered: FunctionEntry) -> None:
        """Called when the user's function runs in one more rank."""

    def on_metrics(self, metrics: Sequence[Mapping[str, float]]) -> None:
        """Called with the last metrics of each rank."""

    def on_record(self, rank: int, chunk: bytes) -> None:
        """Called with a chunk of a rank's file of reports, which may begin and end anywhere."""

    def on_save(self, rank: int, step: int, complete: bool, agreed: int | None) -> None:
        """Called when a rank's part of a checkpoint is on the lake.

        Args:
            complete: whether all ranks that are known to save had saved the step. At least the last
                rank to save the step reports so. In the first world of a run, a rank that is not
                known to save yet may save later.
            agreed: the last step at which the rank had been told that all ranks save, or None.
        """

    def on_checkpoint_agreed(self, step: int) -> None:
        """Called when all ranks have agreed to save a requested checkpoint.

        Args:
            step: the step at which `should_checkpoint` is true in all ranks; if they do not ask
                about this step, the first one after it.
        """

    def on_checkpoint_passed(self, step: int) -> None:
        """Called when all ranks have passed an agreed step, or have ended.

        The agents have the ranks' parts, and upload them even if the ranks are stopped now. If the
        ranks are stopped earlier, the checkpoint may count as complete without the part of a rank
        that has never saved before.
        """

    def on_checkpoint_given_up(self, reason: str) -> None:
        """Called when the ranks do not agree on a checkpoint."""

    def on_end(self, end: RankExit) -> None: ...

    def on_warning(self, text: str) -> None: ...


@dataclass
class AttemptResult:
    """The results of an attempt."""

    values: dict[int, Value] = field(default_factory=dict)
    failure: AttemptFailure | None = None


class AttemptRunner:
    """Drives the agents through one attempt; use `open_attempt`.

    Attributes:
        should_drop_saves: whether ranks that are stopped abandon checkpoints that are not on the
            lake yet.
        rendezvous: the addresses at which the ranks connect, once they are known.
    """

    def __init__(
        self,
        allocation: GangAllocation,
        agents: Subscription,
        world: World,
        call: Call,
        outputs: Outputs,
        listener: AttemptListener,
        cancelled: threading.Event,
        bounds: WatchBounds,
    ) -> None:
        self._allocation = allocation
        self._agents = agents
        self._world = world
        self._call = call
        self._outputs = outputs
        self._listener = listener
        self._cancelled = cancelled
        self.should_drop_saves = False
        self._bounds = bounds
        self._ranks = RankTable(world)
        self._ends = RankEnds(world, call.log_url)
        self._watcher = AttemptWatcher(self._ends, call.plan.spec.run_timeout, bounds)
        gpus_by_rank = {place.rank: place.gpus for place in world.places}
        self._idle = GpuIdleWatch(gpus_by_rank, bounds.idle, time.monotonic())
        self._idle_end: IdleEnd | None = None
        self._idle_checked_at = float("-inf")
        self._tokens = TokenSender(allocation, call.run_id, listener.on_warning)
        self.result = AttemptResult()
        self.rendezvous: Rendezvous | None = None
        self._pending_logged_at = time.monotonic()
        self._is_checkpoint_wanted = threading.Event()
        self._request: CheckpointRequest | None = None
        self._last_proposed = -1
        self._agreed: AgreedCheckpoint | None = None
        listener.on_placement(self._ranks)

    def run(self, reused: Rendezvous | None = None) -> AttemptResult:
        """Start all ranks, wait for all, and stop them at the first failure.

        Args:
            reused: the rendezvous of an earlier rank in the same slot, which saves a round trip to
                the agent. It is for a single rank only: several ranks meet in a store that serves
                one attempt.

        Raises:
            DiscoveryError: two containers were given the same GPU; nothing was started.
            Cancelled: the run was cancelled; its ranks have been stopped.
            ConfigError: a node lacks the configured interface, or modules that the call needs.
        """
        refuse_duplicates(self._allocation.containers)
        if reused is not None and self._cancelled.is_set():
            raise Cancelled(f"{self._call.run_id} was cancelled before its ranks started")
        rendezvous = reused or arrange_rendezvous(
            self._world,
            self._call,
            self._agents.send,
            self._send_modules,
            self._next_event,
            self._cancelled,
        )
        if isinstance(rendezvous, RendezvousFailure):
            self._conclude_without_rendezvous(rendezvous)
            return self.result
        self.rendezvous = rendezvous
        try:
            self._tokens.poll()
            self._world = rendezvous.world
            for message in run_messages(self._call, rendezvous):
                self._send_modules(message.key)
                log.debug(
                    "%s: sends agent %d its ranks, %d bytes",
                    self._call.run_id,
                    message.key,
                    len(message.payload),
                )
                self._agents.send(message.key, "run", message.payload, **message.fields)
            self._await_ends()
        except BaseException:
            # Otherwise the ranks would continue on a held gang.
            self._stop_all()
            raise
        if self._cancelled.is_set():
            raise Cancelled(f"{self._call.run_id} was cancelled; its ranks were stopped")
        self._conclude()
        return self.result

    @property
    def has_returned(self) -> bool:
        return len(self.result.values) == self._world.size

    def request_checkpoint(self) -> None:
        """Ask all ranks to save a checkpoint at the same step soon; callable from any thread.

        The listener learns within two minutes whether the ranks agree on a step, unless the attempt
        ends first. During a request, another request has no effect.
        """
        self._is_checkpoint_wanted.set()
        self.wake()

    def wake(self) -> None:
        """Have the attempt check at once for cancellation; callable from any thread."""
        self._agents.wake()

    def _await_ends(self) -> None:
        """Process events until all ranks have ended, and stop the ranks when it is due."""
        self._watcher.start_timeout(time.monotonic())
        while self._ends.pending:
            now = time.monotonic()
            self._check_idle_gpus(now)
            step = self._watcher.decide(
                is_cancelled=self._cancelled.is_set(),
                now=now,
                have_gpus_idled=self._idle_end is not None,
            )
            if step is Step.GIVE_UP:
                self._give_up()
                break
            if step is not Step.WAIT:
                self._stop_remaining(dump_stacks=step is Step.DUMP_AND_STOP)
            self._tokens.poll()
            self._advance_request()
            event = self._next_event()
            if event is None:
                self._outputs.refresh()
                self._log_pending()
                continue
            self._watcher.record_message(event.message, time.monotonic())
            self._handle_event(event)

    def _check_idle_gpus(self, now: float) -> None:
        """Warn of idle GPUs, and decide whether they end the run."""
        if now < self._idle_checked_at + _IDLE_POLL_SECONDS or self._watcher.has_failed:
            return
        if self._watcher.has_only_uploads:
            return
        self._idle_checked_at, run_id, timeout = now, self._call.run_id, self._bounds.idle.timeout
        if ranks := self._idle.unwatched_ranks(now):
            self._listener.on_warning(
                f"gpu_idle_timeout={timeout:g} s does not watch the GPUs of rank"
                f"{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MAX_LISTED]))}: NVML gives"
                " no utilisation for them"
            )
        verdict = self._idle.verdict(now)
        if verdict.step is IdleStep.WARN:
            log.info("%s: %s", run_id, verdict)
            text = (
                f"{verdict} while the function runs. Does it wait for data or for a lock, or"
                f" compute on the CPU alone? `hopsgpu runs cancel {run_id}` ends the run;"
                " gpu_idle_timeout= of a launch does so by itself"
            )
            self._listener.on_warning(text)
            self._outputs.note(verdict.ranks[0], text)
        elif verdict.step is IdleStep.END and timeout is not None and self._idle_end is None:
            log.info("%s: %s: ends the run", run_id, verdict)
            self._idle_end = IdleEnd(verdict, timeout, min(self._ends.pending))

    def _advance_request(self) -> None:
        """Begin a requested agreement on a checkpoint, or continue the present one."""
        now = time.monotonic()
        if self._is_checkpoint_wanted.is_set():
            self._is_checkpoint_wanted.clear()
            if self._request is None:
                workers = range(self._world.size)
                log.info("%s: asks the ranks to save a checkpoint", self._call.run_id)
                self._request = CheckpointRequest(workers, now, self._last_proposed)
                for rank in set(workers) - self._ends.pending:
                    self._drop_from_request(rank)
        if self._request is not None:
            self._send_orders(self._request, self._request.tick(now))

    def _send_orders(self, request: CheckpointRequest, orders: Sequence[AgentMessage]) -> None:
        """Send what a request for a checkpoint orders, and notify the listener of its outcome."""
        for order in orders:
            for container in self._allocation.containers:
                self._agents.send(container.key, order.kind, **order.fields)
        if request.outcome is not None:
            self._last_proposed = request.last
            self._request = None
        match request.outcome:
            case Agreed(step):
                self._agreed = AgreedCheckpoint(step, range(self._world.size))
                self._listener.on_checkpoint_agreed(step)
            case NotAgreed(reason):
                self._listener.on_checkpoint_given_up(reason)

    def _handle_answer(self, message: Message) -> None:
        request, now = self._request, time.monotonic()
        if message.kind == "passed":
            self._record_passed(message["rank"], message["step"])
            return
        if request is None:
            return
        if message.kind == "steps":
            orders = request.handle_steps(message["number"], dict(message["asked"]), now)
        else:
            accepted = message.kind == "accepted"
            orders = request.handle_answer(
                message["rank"], message["step"], now, is_accepted=accepted
            )
        self._send_orders(request, orders)

    def _drop_from_request(self, rank: int) -> None:
        """Update a request for a checkpoint after the end or the loss of a rank."""
        if self._agreed is not None:
            self._record_passed(rank, self._agreed.step)
        if self._request is not None:
            self._send_orders(self._request, self._request.handle_end(rank))

    def _record_passed(self, rank: int, step: int) -> None:
        """Record that a rank has nothing more to save at an agreed step."""
        agreed = self._agreed
        if agreed is not None and step == agreed.step and agreed.record_pass(rank):
            self._agreed = None
            log.info("%s: all ranks have passed step %d", self._call.run_id, step)
            self._listener.on_checkpoint_passed(step)

    def _log_pending(self) -> None:
        """Log every 30 s which ranks have not ended: nothing else shows a hang."""
        now = time.monotonic()
        if now >= self._pending_logged_at + _PENDING_SECONDS:
            self._pending_logged_at = now
            log.debug("%s: waits for ranks %s", self._call.run_id, sorted(self._ends.pending))

    def grown_logs(self) -> list[tuple[str, Work]]:
        """Return for each log that has grown its URL, and a function that appends the new part."""
        return self._outputs.pending_appends(self._call.logs)

    def log_sizes(self) -> dict[str, int]:
        """Return the bytes of each log so far, by its path in the run's directory."""
        below = self._call.logs.url.removeprefix(f"{self._call.directory.url}/")
        return {f"{below}/{name}": size for name, size in self._outputs.sizes().items()}

    def queue_log_uploads(self, background: Background, seconds: float) -> None:
        """Have the logs written to the lake; wait at most `seconds` for room in a full queue."""
        background.put_all(self._outputs.take_over().uploads(self._call.logs), seconds)

    def publisher(self, name: str) -> Publisher:
        """Return a publisher of the files that the returned workers left, for this model name."""
        returned = [
            report.rank
            for report in self._ranks.reports
            if report.rank < self._world.size and not report.stopped
        ]
        agents = Agents(
            self._world, self._agents, self._next_event, self._cancelled, self._explain_loss
        )
        return Publisher(name, agents, returned, self._listener.on_warning)

    def _place(self, rank: int) -> RankPlacement:
        return self._world.processes[rank]

    def _next_event(self) -> Event | None:
        """Return the next event, or None; presume lost agents, and store the agents' own logs."""
        event = self._agents.next_event(_EVENT_SECONDS)
        lost = self._watcher.find_presumed_lost(
            self._allocation.keys_without_job, has_event=event is not None, now=time.monotonic()
        )
        if lost is not None:
            log.info("%s: presumes agent %d lost: its job has ended", self._call.run_id, lost)
            self._agents.disconnect([lost])
            return Event(lost, None)
        if event is not None and event.message and event.message.kind == sent_log.KIND:
            index = self._world.of_container(event.peer)[0].node_rank
            self._outputs.set_agent_log(index, event.message.payload)
            return None
        return event

    def _send_modules(self, key: int) -> None:
        """Send an agent the user's modules, unless it has them."""
        modules = self._call.function.modules
        self._agents.keep(key, modules.digest, modules.archive)

    def _stop_remaining(self, *, dump_stacks: bool) -> None:
        if dump_stacks:
            log.info(
                "%s: dumps the stacks; overdue ranks: %s, run_timeout %s s, idle: %s",
                self._call.run_id,
                self._watcher.overdue,
                self._call.plan.spec.run_timeout,
                self._idle_end,
            )
        log.info("%s: stops ranks %s", self._call.run_id, sorted(self._ends.pending))
        self._stop_all(dump_stacks=dump_stacks)

    def _stop_all(self, *, dump_stacks: bool = False) -> None:
        for container in self._allocation.containers:
            self._agents.send(
                container.key, "stop", dump_stacks=dump_stacks, drop_saves=self.should_drop_saves
            )

    def _give_up(self) -> None:
        """Disconnect the agents that do not answer; they serve no further attempt."""
        self._disconnect({self._place(rank).container.key for rank in self._ends.pending})
        for rank in sorted(self._ends.pending):
            self._outputs.record_loss(rank, "its agent did not answer")
            self._listener.on_warning(
                f"the end of rank {rank} is unknown: its agent did not answer for"
                f" {self._bounds.stop:g} s"
            )

    def _disconnect(self, silent: Collection[int]) -> None:
        for key in silent:
            log.info("%s: agent %d does not answer: closes its connection", self._call.run_id, key)
        self._agents.disconnect(silent)

    def _handle_event(self, event: Event) -> None:
        message = event.message
        if message is None:
            self._handle_loss(event)
            return
        match message.kind:
            case "started" | "entered":
                self._handle_start(message)
            case "output" | "record" | "reports" | "blocked":
                self._handle_output(message)
            case "warning":
                self._listener.on_warning(message["text"])
            case "saved":
                self._handle_save(message)
            case "steps" | "accepted" | "rejected" | "passed":
                self._handle_answer(message)
            case "kept-tokens":
                self._tokens.record_kept(event.peer, message)
            case "failing":
                self._watcher.record_failure(time.monotonic(), has_raised=bool(message["raised"]))
            case "ended":
                self._handle_end(message)

    def _handle_start(self, message: Message) -> None:
        rank = int(message["rank"])
        log.debug("%s: rank %d has %s", self._call.run_id, rank, message.kind)
        if message.kind == "started":
            self._ranks.record_start(rank, message["pid"])
            self._listener.on_start(rank)
        else:
            self._idle.record_function_start(rank, time.monotonic())
            self._listener.on_entry(self._ranks.record_entry(rank, float(message["time"])))

    def _handle_save(self, message: Message) -> None:
        rank, step, complete = int(message["rank"]), int(message["step"]), bool(message["complete"])
        log.debug(
            "%s: rank %d has saved step %d%s",
            self._call.run_id,
            rank,
            step,
            ", which is complete" if complete else "",
        )
        agreed = None if message["agreed"] is None else int(message["agreed"])
        self._listener.on_save(rank, step, complete, agreed)

    def _handle_output(self, message: Message) -> None:
        rank, payload = int(message["rank"]), message.payload
        if message.kind == "output":
            self._outputs.add(rank, payload)
        elif message.kind == "record":
            self._outputs.add_record(rank, payload)
            self._listener.on_record(rank, payload)
        elif message.kind == "blocked":
            self._ranks.record_blocked(rank, float(message["data"]), float(message["checkpoints"]))
        else:
            samples = self._outputs.add_reports(rank, payload)
            if samples:
                self._idle.add_samples(rank, samples, time.monotonic())
                self._ranks.record_unused(rank, self._outputs.unused_seconds(rank))
            self._listener.on_metrics(self._outputs.metrics())

    def _handle_end(self, message: Message) -> None:
        end = rank_exit(self._place(int(message["rank"])), message)
        rank = end.place.rank
        is_first_failure = self._watcher.record_end(end, time.monotonic())
        log.debug(
            "%s: rank %d ended: %s%s",
            self._call.run_id,
            rank,
            end.signal or f"exit code {end.exit_code}",
            ", stopped" if end.was_stopped else "",
        )
        self._outputs.record_end(rank)
        self._idle.record_rank_end(rank, time.monotonic())
        self._drop_from_request(rank)
        self._ranks.record_end(
            rank,
            exit_code=end.exit_code,
            signal=end.signal,
            peak_memory=message["peak_memory"],
            gpu_utilisation=self._outputs.utilisation(rank),
            was_stopped=end.was_stopped and not end.has_returned,
        )
        for text in (*self._outputs.warnings(rank), *unusual_exit_warnings(end)):
            self._listener.on_warning(text)
        if end.has_returned and rank < self._world.size:
            self.result.values[rank] = value_of(message)
        if is_first_failure:
            log.info(
                "%s: first failure: rank %d on %s (%s)",
                self._call.run_id,
                rank,
                end.place.container.host,
                end.status or end.signal or f"exit code {end.exit_code}",
            )
        self._listener.on_end(end)

    def _handle_loss(self, event: Event) -> None:
        """Record that an executor was lost, and with it those of its ranks that still ran."""
        for place in self._world.of_container(event.peer):
            if self._watcher.record_loss(place, event.reason, at=time.time(), now=time.monotonic()):
                log.info(
                    "%s: rank %d and its executor on %s were lost: %s",
                    self._call.run_id,
                    place.rank,
                    place.container.host,
                    event.reason or "its connection ended",
                )
                self._outputs.record_loss(place.rank, event.reason)
                self._idle.record_rank_end(place.rank, time.monotonic())
                self._drop_from_request(place.rank)

    def _conclude_without_rendezvous(self, failed: RendezvousFailure) -> None:
        log.info(
            "%s: attempt %d: the rendezvous failed at the executor on %s%s",
            self._call.run_id,
            self._call.attempt,
            failed.error.host,
            ", whose agent does not answer" if failed.silent else "",
        )
        self._disconnect(failed.silent)
        suspect_host = None if failed.exclusions.is_any else failed.error.host
        self.result.failure = AttemptFailure(
            failed.error,
            FailureCause.INFRASTRUCTURE,
            failed.exclusions,
            suspect_host,
            is_loss=True,
            reason=EndReason.NOT_STARTED,
        )
        self._outputs.request_agent_log_upload()

    def _conclude(self) -> None:
        """Determine the first failure and its cause, or complete the values.

        Raises:
            HopsGpuError: ranks have neither a value nor a failure.
        """
        timeout = self._call.plan.spec.run_timeout
        failure = self._ends.conclude(
            self._explain_loss, self._watcher.overdue, timeout, self._idle_end
        )
        if failure is not None:
            self._outputs.request_agent_log_upload()
            self.result.failure = failure
            log.info(
                "%s: attempt %d failed: rank %s on %s failed first; cause: %s",
                self._call.run_id,
                self._call.attempt,
                failure.error.rank,
                failure.error.host,
                failure.cause.value,
            )
        elif self._ends.chief_has_returned:
            # The others were stopped as successful; only the chief has a value.
            none = Value(pickle.dumps(None))
            for rank in range(self._world.size):
                self.result.values.setdefault(rank, none)
        elif len(self.result.values) != self._world.size:
            missing = sorted(set(range(self._world.size)) - self.result.values.keys())
            raise HopsGpuError(f"ranks {missing} ended without a value and without a failure")

    def _explain_loss(self, container: GangExecutor) -> str:
        """Return why an executor was lost; "" if neither Spark nor the cluster manager knows."""
        return self._allocation.explain_loss(self._allocation.job.loss(_REASON_SECONDS), container)


@contextlib.contextmanager
def open_attempt(
    allocation: GangAllocation,
    world: World,
    call: Call,
    show: Progress,
    listener: AttemptListener,
    cancelled: threading.Event,
    bounds: WatchBounds = WatchBounds(),  # noqa: B008 - frozen
) -> Iterator[AttemptRunner]:
    """Provide the `AttemptRunner` of one attempt; on exit, discard its output unless taken over.

    Raises:
        ConfigError: the executors' Python lacks what ranks with data need.
    """
    for container in allocation.containers:
        # A held gang was requested without knowing whether its launches have data.
        check_data(container, call.needs)
    keys = [container.key for container in allocation.containers]
    with (
        allocation.server.subscribe(call.run_id, keys, call.attempt) as agents,
        Outputs(world, show, log_limit=call.log_limit) as outputs,
    ):
        yield AttemptRunner(allocation, agents, world, call, outputs, listener, cancelled, bounds)
