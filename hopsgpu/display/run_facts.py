"""The facts that people want to know about a run, a search or a score. Pure.

Only `view_of` turns them into text: live displays, cards, the command line and the pages render its
`RunView`. To add a fact for all of them, add it to `RunSubject` and to `_general_facts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hopsgpu.core.formats import local_time, size
from hopsgpu.core.gpu_losses import time_not_training
from hopsgpu.core.run_record import APPLICATION_ID, LOST, DataRecord
from hopsgpu.core.run_values import GpuSeconds, Timeline, WorldReport
from hopsgpu.core.trials import COMPLETE, PRUNED, Best
from hopsgpu.display import phrases, score_phrases, search_phrases
from hopsgpu.display.phrases import NOT_TRAINING
from hopsgpu.units import count_of

# Tones of a fact; a renderer chooses the colours.
GOOD, BAD, WARNING, STRONG, PLAIN = "good", "bad", "warning", "strong", ""
TONES = {"succeeded": GOOD, COMPLETE: GOOD, "failed": BAD, LOST: BAD, "unreadable": BAD}
TONES |= {"cancelled": WARNING, PRUNED: WARNING}
# Names of facts that renderers place apart from the others.
RUN, NOW, DETAILS, TIME, GPU_SECONDS = "run", "now", "details", "time", "GPU seconds"
BEST, MODEL, VALUE = "best", "model", "value"
_RESULTS = (BEST, MODEL, VALUE)
_APART = (RUN, NOW, DETAILS, TIME, GPU_SECONDS, NOT_TRAINING, *_RESULTS)
_FIRST = ("state", "took")
# The remedy of what ended these runs is another.
_WITHOUT_ADVICE = ("failed", "cancelled", LOST)
_LONGEST_PARAMS = 200


@dataclass(frozen=True)
class RunFact:
    """A fact about a run.

    Attributes:
        text: the value, with its unit.
        tone: GOOD, BAD, WARNING, STRONG or PLAIN.
        url: page that says more, or "".
        phrase: what stands for name and text where a display shows no names.
    """

    name: str
    text: str
    tone: str = PLAIN
    url: str = ""
    phrase: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "phrase", self.phrase or self.text)


@dataclass(frozen=True)
class SearchSubject:
    """The known facts of a search; values of its arguments are "" if they are unknown.

    Attributes:
        states: number of trials by state.
    """

    wanted: int
    states: Mapping[str, int]
    best: Best | None
    metric: str | None
    direction: str = ""
    sampler: str = ""
    pruner: str = ""
    at_a_time: str = ""


@dataclass(frozen=True)
class ScoreSubject:
    """The known facts of a score; 0, "" and None for what is unknown.

    Attributes:
        parts: number of parts; `parts_done` of them are on the lake.
        failed: number of parts that are left out.
        rate: rows scored in a second.
        is_complete: whether the output is there.
    """

    rows: int
    scored: int
    failed: int = 0
    parts: int = 0
    parts_done: int = 0
    rate: float | None = None
    seconds_left: float | None = None
    model: str | None = None
    at_a_time: str = ""
    output: str = ""
    is_complete: bool = False
    columns: str = ""


@dataclass(frozen=True)
class RunSubject:
    """The known facts of a run, from its record, its status or its result; others are defaults.

    Attributes:
        state: value of a GangState, or "lost".
        state_before: the last recorded state of a run that is lost.
        sizes: the smallest and the largest world size of an elastic gang.
        requested: seconds since the epoch.
        took: seconds until the end or until now.
        gang: ranks and GPUs that were requested, in words.
        held: executors that are here, in words.
        model: URL of the version that it published; or None.
        value: rank 0's value in words.
        waiting_for: why it waits, as one sentence; "" if it does not wait.
        left_out: number of entries by name that the record lacks.
    """

    run_id: str
    state: str = ""
    state_before: str = ""
    attempt: int = 0
    sizes: tuple[int, int] | None = None
    worlds: tuple[WorldReport, ...] = ()
    user: str = ""
    requested: float | None = None
    took: float | None = None
    gang: str = ""
    held: str = ""
    application: str = ""
    queue: str = ""
    model: str | None = None
    value: str = ""
    directory: str = ""
    environment: str = ""
    waiting_for: str = ""
    waiting_details: tuple[str, ...] = ()
    data: Mapping[str, DataRecord] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    search: SearchSubject | None = None
    score: ScoreSubject | None = None
    timeline: Timeline = Timeline()
    gpu_seconds: GpuSeconds = GpuSeconds()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunView:
    """The facts of a run, in the order in which people want them; none is empty.

    Attributes:
        state: value of a GangState, or "lost"; "" if it is unknown.
        progress: how far it is: facts about the executors, the trials or the rows.
        costs: facts about its time and its GPUs.
    """

    run_id: str
    state: str
    about: tuple[RunFact, ...]
    progress: tuple[RunFact, ...]
    costs: tuple[RunFact, ...]
    warnings: tuple[str, ...]

    @property
    def facts(self) -> tuple[RunFact, ...]:
        return (*self.about, *self.progress, *self.costs)

    def phrase(self, name: str) -> str:
        """Return the phrase of a fact; "" if the view does not have it."""
        return next((fact.phrase for fact in self.facts if fact.name == name), "")

    @property
    def results(self) -> list[str]:
        """Return the phrases about what the run has found or made."""
        return [*filter(None, map(self.phrase, _RESULTS))]

    @property
    def headline(self) -> list[str]:
        """Return the phrases that live displays show first: the state, the time, the progress."""
        first = [fact for fact in self.about if fact.name in _FIRST]
        rest = (*self.progress, *(fact for fact in self.about if fact not in first), *self.costs)
        return [fact.phrase for fact in (*first, *rest) if fact.name not in _APART]

    @property
    def details(self) -> tuple[list[str], str]:
        """Return details of why the run waits, or its phases' durations, with their separator."""
        details, time = self.phrase(DETAILS), self.phrase(TIME)
        between = "; " if details else ", "
        return [*filter(None, (details or time).split(between))], between


@dataclass(frozen=True)
class ManagerPages:
    """The web pages of a cluster manager.

    Attributes:
        application: returns the URL of the page of an application, by its ID; "" for none.
        queues: URL of the page of the queues; "" for none.
    """

    application: Callable[[str], str] = lambda application_id: ""
    queues: str = ""


def view_of(subject: RunSubject, pages: ManagerPages = ManagerPages()) -> RunView:  # noqa: B008 - frozen
    """Return the view of a run.

    Args:
        subject: the known facts.
        pages: the cluster manager's pages, for links.
    """
    groups = (
        _general_facts(subject, pages),
        _progress_facts(subject),
        _cost_facts(subject),
    )
    about, progress, costs = (tuple(fact for fact in group if fact.text) for group in groups)
    return RunView(subject.run_id, subject.state, about, progress, costs, subject.warnings)


def _general_facts(subject: RunSubject, pages: ManagerPages) -> Iterator[RunFact]:
    state, took = subject.state, subject.took
    is_on_cluster = APPLICATION_ID.fullmatch(subject.application) is not None
    before = f" (was {subject.state_before})" if subject.state_before else ""
    words = f"{state}{before}" if before or not state else phrases.phase(subject)
    queue = subject.queue
    yield RunFact(RUN, subject.run_id)
    yield RunFact("state", words, TONES.get(state, STRONG))
    yield RunFact("user", subject.user)
    yield RunFact(
        "application",
        subject.application,
        url=pages.application(subject.application) if is_on_cluster else "",
    )
    yield RunFact(
        "queue",
        queue,
        url=pages.queues if is_on_cluster else "",
        phrase=f"queue {queue}" if queue else "",
    )
    yield RunFact("requested", "" if subject.requested is None else local_time(subject.requested))
    yield RunFact("took", "" if took is None else phrases.seconds(took))
    yield RunFact("gang", subject.gang)
    yield RunFact(MODEL, _model(subject.model), phrase=f"model {_model(subject.model)}")
    yield RunFact(VALUE, subject.value, phrase=f"value of rank 0: {subject.value}")
    yield RunFact("directory", subject.directory)
    yield RunFact("environment", subject.environment)
    yield RunFact(NOW, subject.waiting_for)
    yield RunFact(DETAILS, "; ".join(subject.waiting_details))
    for name, data in subject.data.items():
        removed = "" if data.kept else ", removed at the end of the run"
        text = f"{count_of(data.rows, 'row')}, {size(data.bytes)} of {data.url}{removed}"
        yield RunFact(name if name == "data" else f"data {name}", text)
    if subject.left_out:
        counts = ", ".join(f"{count:,} {name}" for name, count in subject.left_out.items())
        yield RunFact("left out", f"{counts}: the record would be larger than 1 MiB", WARNING)


def model_of(url: str | None) -> tuple[str, ...]:
    """Return the name and the number of a version from its URL; nothing for None."""
    parts = (url or "").rsplit("/", 2)
    return tuple(parts[1:]) if len(parts) == 3 else ()


def _model(url: str | None) -> str:
    """Return name, number and URL of a version; "" for None."""
    return f"{' version '.join(model_of(url))}, {url}" if url else ""


def _progress_facts(subject: RunSubject) -> Iterator[RunFact]:
    if subject.search is not None:
        yield from _of_search(subject.search)
    if subject.score is not None:
        yield from _of_score(subject.score)
    yield RunFact("held", subject.held)


def _of_search(search: SearchSubject) -> Iterator[RunFact]:
    if search.sampler:
        goal = f"{search.direction} {search.metric or 'the value'}"
        yield RunFact("search", f"{goal}, by {search.sampler} and {search.pruner}")
    yield RunFact("trials", search_phrases.count_phrase(search.wanted, search.states))
    yield RunFact("at a time", search.at_a_time)
    if search.best is not None:
        params = search_phrases.shorten_params(search.best.params, _LONGEST_PARAMS)
        text = f"{search_phrases.best_phrase(search.best, search.metric)}: {params}"
        yield RunFact(BEST, text, GOOD, phrase=f"best {text}")


def _of_score(score: ScoreSubject) -> Iterator[RunFact]:
    yield RunFact("rows", score_phrases.rows(score.rows, score.scored))
    yield RunFact("rate", score_phrases.rate(score.rate))
    yield RunFact("time left", score_phrases.time_left(score.seconds_left))
    yield RunFact("parts", f"{score.parts_done:,} of {score.parts:,}" if score.parts else "")
    yield RunFact("failed", score_phrases.failed_parts(score.failed), BAD)
    yield RunFact("scored with", score.model or "")
    yield RunFact("at a time", score.at_a_time)
    yield RunFact("output", score.output, GOOD if score.is_complete else PLAIN)
    yield RunFact("columns", score.columns)


def _cost_facts(subject: RunSubject) -> Iterator[RunFact]:
    phases = subject.timeline.phases()
    yield RunFact(TIME, ", ".join(f"{name} {phrases.seconds(took)}" for name, took in phases))
    if subject.gpu_seconds.held:
        yield RunFact(GPU_SECONDS, ", ".join(phrases.spent_texts(subject.gpu_seconds)))
    lost = "" if subject.state in _WITHOUT_ADVICE else time_not_training(subject.gpu_seconds)
    yield RunFact(NOT_TRAINING, lost, phrase=f"{NOT_TRAINING}: {lost}")
