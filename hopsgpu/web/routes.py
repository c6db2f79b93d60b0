"""The pages' addresses: each route reads what its page shows, and fills in a template.

All addresses in pages are relative, so that the pages work behind a proxy under any path.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import jinja2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from hopsgpu.artifacts.run_logs import RankLog
from hopsgpu.artifacts.runs import StoredRun, run_name
from hopsgpu.core import formats
from hopsgpu.core.run_record import (
    APPLICATION_ID,
    OTHER_SCHEMA,
    ApplicationReport,
    RunRecord,
    SearchRecord,
)
from hopsgpu.core.usage_report import DAY, GROUPINGS, USER, moment_of, sum_usage
from hopsgpu.core.version import __version__
from hopsgpu.display import phrases
from hopsgpu.display.charts import SHARES, lines_image
from hopsgpu.display.picture import Point
from hopsgpu.display.run_comparison import MAX_RUNS, compare_runs
from hopsgpu.display.run_view import RecordView, record_view, reported_text, summary_of
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.storage.error_messages import ABSENT, DAMAGED, PERMISSION
from hopsgpu.storage.names import model_name
from hopsgpu.storage.timed_reads import ReadResult
from hopsgpu.web.access import Guard, Secrets, Server, field_of, is_same
from hopsgpu.web.cluster_view import cluster_view, queue_view
from hopsgpu.web.coordinates import Coordinates, coordinates
from hopsgpu.web.metric_overlay import (
    SMOOTHINGS,
    OverlayPlot,
    label_of,
    logarithms,
    overlay_json,
    overlay_plots,
)
from hopsgpu.web.metric_series import MetricPlots, plots_json
from hopsgpu.web.node_use import HOUR
from hopsgpu.web.page_sources import Root, Roots, RunList, Sources
from hopsgpu.web.run_filter import PERIODS, STATES, RunFilter, filter_of
from hopsgpu.web.shared_reads import SharedReads
from hopsgpu.web.usage_view import KINDS, UsageView, usage_view

log = logging.getLogger(__name__)

T = TypeVar("T")
Page = Callable[[Request], Awaitable[Response]]

HERE = Path(__file__).parent
_ROOTS_SECONDS = 60.0
_ACTIVE_SECONDS = 10.0
_LIST_SECONDS = 5.0
_SLOW_SECONDS = 30.0
_PATIENT_SECONDS = 6.0
_LISTED_RUNS = 50
_MOST_LISTED_RUNS = 1000
# Runs that the page of a comparison offers.
_OFFERED_RUNS = 30
_ALL = "all"
_PERIODS = ("24h", "7d", "30d", "90d", "365d", _ALL)
_PERIOD = "30d"
_MAX_BODY = 4096
# Ranks, trials and failed parts that have rows on a page.
_MAX_ENTRIES = 200
# Facts that a run's page shows outside its details.
_OUTSIDE_DETAILS = ("run", "state", "took", "model", "now", "details")
# Kinds of problems that loading the page again does not solve.
_MISSING = (ABSENT, DAMAGED, OTHER_SCHEMA, PERMISSION)


class Missing(Exception):
    """An address of something that does not exist; the message says of what."""


@dataclass(frozen=True)
class RunToCompare:
    root: Root
    record: RunRecord


class Pages:
    """The pages.

    Args:
        patience: how long a page waits for the lake or YARN, in seconds.
    """

    def __init__(self, sources: Sources, secrets: Secrets, patience: float) -> None:
        self._sources = sources
        self._secrets = secrets
        # Each has its own threads: a NameNode that does not answer must delay neither YARN nor a
        # cancel request.
        self._yarn = SharedReads("YARN", patience)
        self._lake = SharedReads("the lake", patience)
        self._queues = SharedReads("the queue's directory", patience)
        self._acts = SharedReads("the lake", patience)
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            finalize=_finalize,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "duration": formats.duration,
            "local_time": formats.local_time,
            "local_time_of": formats.local_time_of,
            "iso": _iso,
            "size": formats.size,
            "seconds": phrases.seconds,
            "reported": _metrics_text,
            "part": lambda text: quote(str(text), safe="", errors="replace"),
        }

    def routes(self) -> list[Route | Mount]:
        at_run = "/runs/{root}/{run_id}"
        return [
            Route("/", self.cluster),
            Route("/queue", self.queue),
            Route("/runs", self.runs),
            Route("/compare", self.compare),
            Route("/compare/metrics.json", self.compared_metrics),
            Route(at_run, self.run),
            Route(f"{at_run}/metrics.json", self.metrics),
            Route(f"{at_run}/log", self.log),
            Route(f"{at_run}/log.txt", self.log_text),
            Route(f"{at_run}/cancel", self.cancel, methods=["POST"]),
            Route("/models", self.models),
            Route("/models/{root}/{name}", self.model),
            Route("/usage", self.usage),
            Mount("/static", StaticFiles(directory=HERE / "static")),
        ]

    async def cluster(self, request: Request) -> Response:
        gpus, active, used = await asyncio.gather(
            self._yarn.get("gpus", self._sources.cluster), self._active(), self._node_use()
        )
        view = None if gpus.value is None else cluster_view(gpus.value, active.rows)
        return self._page(
            request,
            "cluster.html",
            view=view,
            gpus=gpus,
            problems=(*active.problems, used.problem),
            active=active,
            use=_use_images(used.value or {}, self._sources.clock()),
        )

    async def _node_use(self) -> ReadResult[Mapping[str, Sequence[Point]]]:
        roots = await self._roots()
        return await self._lake.get(
            "node use", lambda: self._sources.node_use(roots.roots), fresh=_SLOW_SECONDS
        )

    async def queue(self, request: Request) -> Response:
        queues, gpus, active = await asyncio.gather(
            self._queues.get("queues", self._sources.queues),
            self._yarn.get("gpus", self._sources.cluster),
            self._active(),
        )
        snapshots = {} if queues.value is None else queues.value.snapshots
        view = queue_view(snapshots, gpus.value, active.rows)
        odd = () if queues.value is None else queues.value.problems
        problems = (queues.problem, gpus.problem, *odd, *active.problems)
        return self._page(request, "queue.html", view=view, problems=problems)

    async def runs(self, request: Request) -> Response:
        roots = await self._roots()
        chosen = request.query_params.get("of", "")
        among, key = self._choose(roots, chosen)
        wanted = _find_or_missing(lambda: filter_of(request.query_params))
        most = min(max(_number(request, "most") or _LISTED_RUNS, 1), _MOST_LISTED_RUNS)
        listed = await self._list_runs(among, key, wanted, most)
        odd = () if listed.value is None else listed.value.problems
        has_more = listed.value is not None and listed.value.has_more and most < _MOST_LISTED_RUNS
        more = {"of": key, **wanted.query(), "most": min(most * 4, _MOST_LISTED_RUNS)}
        return self._page(
            request,
            "runs.html",
            listed=listed,
            roots=roots.roots,
            chosen=key,
            wanted=wanted,
            states=STATES,
            periods=PERIODS,
            more=urlencode(more, errors="replace") if has_more else "",
            problems=(listed.problem, *odd, *roots.problems),
        )

    async def _list_runs(
        self, roots: Sequence[Root], key: str, wanted: RunFilter, most: int
    ) -> ReadResult[RunList]:
        """Return the newest runs of some roots, which `key` names."""
        return await self._lake.get(
            ("runs", key, wanted, most),
            lambda: self._sources.runs(roots, wanted, most),
            fresh=_LIST_SECONDS,
        )

    async def compare(self, request: Request) -> Response:
        roots = await self._roots()
        runs, problems = await self._runs_to_compare(request, roots)
        plots, left_out, unreadable = await self._overlay(request, runs)
        now = self._sources.clock()
        summaries = [
            summary_of(StoredRun(run.record.run_id, run.record), now, run.root.key) for run in runs
        ]
        offered = await self._list_runs(
            *self._choose(roots, ""), wanted=RunFilter(), most=_OFFERED_RUNS
        )
        chosen = {(row.root, row.run_id) for row in summaries}
        return self._page(
            request,
            "compare.html",
            comparison=compare_runs([run.record for run in runs], now),
            runs=[(label_of(number), row) for number, row in enumerate(summaries)],
            offered=[
                row
                for row in (() if offered.value is None else offered.value.rows)
                if (row.root, row.run_id) not in chosen and not row.problem
            ],
            plots=plots,
            images=_overlay_images(plots, is_log=_has_log(request)),
            left_out=left_out,
            smoothings=SMOOTHINGS,
            smoothing=_smoothing(request),
            is_log=_has_log(request),
            has_only_differences="only" in request.query_params,
            query=urlencode(request.query_params.multi_items(), errors="replace"),
            most=MAX_RUNS,
            problems=(*problems, *unreadable),
        )

    async def compared_metrics(self, request: Request) -> Response:
        """Return the metrics of compared runs for the page's script."""
        runs, _ = await self._runs_to_compare(request, await self._roots())
        plots, _, _ = await self._overlay(request, runs)
        return JSONResponse(overlay_json(plots))

    async def _runs_to_compare(
        self, request: Request, roots: Roots
    ) -> tuple[list[RunToCompare], list[str]]:
        """Return the runs that a query names, and why others are missing.

        A run is named by the key of its root and its id, or by its id if the root is the reader's.
        """
        names = [*dict.fromkeys(request.query_params.getlist("run"))]
        problems = [f"at most {MAX_RUNS} runs are compared"] if len(names) > MAX_RUNS else []
        places = [_find_or_missing(partial(_run_named, roots, name)) for name in names[:MAX_RUNS]]
        reads = await asyncio.gather(*(self._record(*place) for place in places))
        runs = []
        for (root, run_id), read in zip(places, reads, strict=True):
            if read.value is None:
                problems.append(f"run {run_id}: {read.problem}")
            else:
                runs.append(RunToCompare(root, read.value))
        return runs, problems

    async def _overlay(
        self, request: Request, runs: Sequence[RunToCompare]
    ) -> tuple[Sequence[OverlayPlot], int, list[str]]:
        """Return the plots of compared runs, how many are left out, and what cannot be read."""
        reads = await asyncio.gather(
            *(self._plots_of(run.root, run.record.run_id, run.record.kind) for run in runs)
        )
        plots, left_out = overlay_plots(
            [read.value for read in reads], float(_smoothing(request)), is_log=_has_log(request)
        )
        return plots, left_out, [read.problem for read in reads if read.problem]

    def _choose(self, roots: Roots, key: str) -> tuple[Sequence[Root], str]:
        """Return the roots that a reader chose, and the choice; by default the caller's own."""
        if key == _ALL:
            return roots.roots, _ALL
        if not key:
            return roots.roots[:1], roots.roots[0].key if roots.roots else _ALL
        return [_find_or_missing(lambda: roots[key])], key

    async def run(self, request: Request) -> Response:
        root, run_id = await self._run_in_path(request)
        now = self._sources.clock()
        record = await self._record(root, run_id)
        if record.value is None:
            return self._error(request, _status(record), f"run {run_id}: {record.problem}")
        url = root.store.directory(run_id).url
        report = await self._report(record.value, now)
        pages = self._sources.pages
        view = record_view(record.value, url, now, root.key, pages, report)
        plots, saved, asked, tail = await asyncio.gather(
            self._plots_of(root, run_id, view.summary.kind),
            self._read("checkpoints", self._sources.checkpoints, root, run_id, _ACTIVE_SECONDS),
            self._is_asked(root, run_id, is_running=view.summary.is_running),
            self._tail(root, run_id, view),
        )
        return self._page(
            request,
            "run.html",
            view=view,
            run=view.summary,
            root=root,
            plots=plots,
            images=_images(plots.value),
            checkpoints=saved,
            is_cancel_requested=bool(asked.value),
            driver_log=await self._driver_log(record.value),
            call=record.value.call,
            driver_host=record.value.environment.driver.get("host", ""),
            tail=tail,
            form=self._secrets.form,
            curve=_curve_image(view),
            coordinates=_coordinates(record.value.search),
            most=_MAX_ENTRIES,
            in_details=[fact for fact in view.about if fact.name not in _OUTSIDE_DETAILS],
            world_headers=phrases.WORLD_HEADERS,
            worlds=[phrases.world_cells(w, view.summary.requested) for w in view.worlds],
            problems=(record.problem, plots.problem, saved.problem, asked.problem),
        )

    async def _read(
        self, name: str, read: Callable[[Root, str], T], root: Root, run_id: str, fresh: float = 2.0
    ) -> ReadResult[T]:
        """Return what `read` returns for a run; results of at most `fresh` seconds are shared."""
        return await self._lake.get(
            (name, root.key, run_id), lambda: read(root, run_id), fresh=fresh
        )

    async def _driver_log(self, record: RunRecord) -> str:
        """Return the URL of the driver's log in YARN; "" if it is not there, or is unknown."""
        find_state, container = (
            self._sources.application_state,
            record.environment.driver.get("container"),
        )
        if find_state is None or not container or not APPLICATION_ID.fullmatch(record.application):
            return ""
        application = record.application
        state = await self._yarn.get(
            ("driver's log", application), lambda: find_state(application), fresh=_SLOW_SECONDS
        )
        # In client mode, the application master is no driver.
        if state.value is None or state.value.master != container:
            return ""
        url = state.value.log
        return url if url.startswith(("http://", "https://")) else ""

    async def _record(self, root: Root, run_id: str) -> ReadResult[RunRecord]:
        return await self._read("record", self._sources.record, root, run_id)

    async def _report(self, record: RunRecord, now: float) -> ApplicationReport | None:
        """Return YARN's report on the application of a silent run; None if it is unknown."""
        if not record.is_silent(now):
            return None
        silent = self._sources.silent
        key = ("application", record.application)
        return (await self._yarn.get(key, lambda: silent.report(record, now))).value

    async def _plots_of(self, root: Root, run_id: str, kind: str) -> ReadResult[MetricPlots]:
        return await self._plots(root, run_id) if kind == "gang" else ReadResult(None)

    async def _is_asked(self, root: Root, run_id: str, *, is_running: bool) -> ReadResult[bool]:
        if not is_running:
            return ReadResult(False)
        return await self._read("cancel", self._sources.is_asked_to_cancel, root, run_id)

    async def _tail(self, root: Root, run_id: str, view: RecordView) -> Any:
        """Return which log a run's page ends with, and its end."""
        if not view.logs:
            return None
        last = max(log.attempt for log, _ in view.logs)
        ranks = [log.rank for log, _ in view.logs if log.attempt == last]
        failed = None if view.failure is None else view.failure.rank
        which = RankLog(last, failed if failed in ranks else min(ranks))
        answer = await self._log(root, run_id, which, None, None, can_grow=False)
        return which, answer

    async def _log(
        self,
        root: Root,
        run_id: str,
        which: RankLog,
        trial: int | None,
        begin: int | None,
        *,
        can_grow: bool,
    ) -> ReadResult[Any]:
        key = ("log", root.key, run_id, which, trial, begin, can_grow)
        read = partial(self._sources.log, root, run_id, which, trial, begin, can_grow=can_grow)
        return await self._lake.get(key, read)

    async def _plots(self, root: Root, run_id: str) -> ReadResult[MetricPlots]:
        return await self._read("metrics", self._sources.metrics, root, run_id)

    async def metrics(self, request: Request) -> Response:
        """Return a run's metrics for the page's script."""
        root, run_id = await self._run_in_path(request)
        plots = await self._plots(root, run_id)
        if plots.value is None:
            return PlainTextResponse(clean_text(f"{plots.problem}\n"), 503)
        record = await self._record(root, run_id)
        began = None if record.value is None else record.value.timeline.requested
        return JSONResponse(plots_json(plots.value, began))

    async def log(self, request: Request) -> Response:
        root, run_id = await self._run_in_path(request)
        which, trial, begin = _which(request)
        can_grow = trial is None and await self._is_running(root, run_id)
        answer = await self._log(root, run_id, which, trial, begin, can_grow=can_grow)
        return self._page(
            request,
            "log.html",
            root=root,
            run_id=run_id,
            which=which,
            trial=trial,
            begin=begin,
            answer=answer,
            can_grow=can_grow,
            problems=(answer.problem,),
        )

    async def log_text(self, request: Request) -> Response:
        """Return what follows in a log, for the page's script."""
        root, run_id = await self._run_in_path(request)
        which, trial, begin = _which(request)
        can_grow = trial is None and await self._is_running(root, run_id)
        answer = await self._log(root, run_id, which, trial, begin, can_grow=can_grow)
        if answer.value is None:
            return PlainTextResponse(clean_text(f"{answer.problem}\n"), 503)
        part = answer.value.part
        headers = {"X-Log-End": str(part.end), "X-Log-Grows": "1" if can_grow else "0"}
        return PlainTextResponse(part.text, headers=headers)

    async def _is_running(self, root: Root, run_id: str) -> bool:
        record = await self._record(root, run_id)
        return record.value is not None and record.value.is_running(self._sources.clock())

    async def cancel(self, request: Request) -> Response:
        root, run_id = await self._run_in_path(request)
        body = await _body(request)
        if body is None or not is_same(field_of(body, "form"), self._secrets.form):
            text = "The form is not of this server's present start: load the page again."
            return self._error(request, 403, text)
        key = ("ask to cancel", root.key, run_id)

        def request_cancel() -> bool:
            self._sources.cancel(root, run_id)
            return True

        answer = await self._acts.get(key, request_cancel, fresh=-1.0)
        self._lake.forget(("cancel", root.key, run_id))
        if answer.problem:
            return self._error(
                request,
                409,
                f"No request to cancel {run_id} is known to have been left: {answer.problem}",
            )
        log.info("a reader asked for the end of %s", run_id)
        return Response(status_code=303, headers={"Location": f"../{quote(run_id, safe='')}"})

    async def models(self, request: Request) -> Response:
        roots = await self._roots()
        root = self._choose(roots, request.query_params.get("of", ""))[0][:1]
        name = _find_or_missing(lambda: filter_of(request.query_params)).name
        listed: ReadResult[Any] = ReadResult(None, "there is no directory of models")
        if root:
            listed = await self._lake.get(
                ("models", root[0].key, name),
                lambda: self._sources.models(root[0], name),
                fresh=_ACTIVE_SECONDS,
            )
        return self._page(
            request,
            "models.html",
            listed=listed,
            roots=roots.roots,
            chosen=root[0].key if root else "",
            name=name,
            problems=(listed.problem, *roots.problems),
        )

    async def model(self, request: Request) -> Response:
        root = await self._root(request)
        name = _find_or_missing(lambda: model_name(request.path_params["name"]))
        versions = await self._lake.get(
            ("versions", root.key, name),
            lambda: self._sources.versions(root, name),
            fresh=_ACTIVE_SECONDS,
        )
        if versions.value is None:
            return self._error(request, _status(versions), versions.problem)
        odd = versions.value.problem
        return self._page(
            request,
            "model.html",
            root=root,
            name=name,
            versions=versions.value,
            problems=(versions.problem, odd),
        )

    async def usage(self, request: Request) -> Response:
        by = request.query_params.get("by", USER)
        since = request.query_params.get("since", _PERIOD)
        if by not in GROUPINGS or since not in _PERIODS:
            raise Missing("this page has no such period or grouping")
        roots = await self._roots()
        now = self._sources.clock()
        began = moment_of(since, "since", now)
        uses = await self._lake.get(
            ("uses", since),
            lambda: self._sources.uses(roots.roots, began),
            fresh=_SLOW_SECONDS,
        )
        view = None
        if uses.value is not None:
            runs, odd = uses.value.runs, uses.value.problems

            def sum_up() -> UsageView:
                usage = sum_usage(runs, by, began, now, odd)
                return usage_view(usage, sum_usage(runs, DAY, began, now), roots.problems)

            # Thousands of runs would keep other pages waiting.
            view = await asyncio.to_thread(sum_up)
        return self._page(
            request,
            "usage.html",
            view=view,
            by=by,
            since=since,
            groupings=GROUPINGS,
            periods=_PERIODS,
            kinds=KINDS,
            problems=(uses.problem,),
        )

    async def _roots(self) -> Roots:
        roots = await self._lake.get("roots", self._sources.roots, fresh=_ROOTS_SECONDS)
        return Roots((), (roots.problem,)) if roots.value is None else roots.value

    async def _active(self) -> RunList:
        """Return the active runs, and why some are unknown."""
        roots = await self._roots()
        listed = await self._lake.get(
            "active",
            lambda: self._sources.active(roots.roots),
            # Each root costs the NameNode two requests.
            fresh=_ACTIVE_SECONDS + len(roots.roots) / 10,
        )
        listing = listed.value or RunList((), False, ())
        return replace(listing, problems=(listed.problem, *roots.problems, *listing.problems))

    async def _root(self, request: Request) -> Root:
        roots = await self._roots()
        return _find_or_missing(lambda: roots[request.path_params["root"]])

    async def _run_in_path(self, request: Request) -> tuple[Root, str]:
        run_id = _find_or_missing(lambda: run_name(request.path_params["run_id"]))
        return await self._root(request), run_id

    def _page(
        self,
        request: Request,
        template: str,
        status: int = 200,
        problems: Sequence[str] = (),
        **values: Any,
    ) -> Response:
        # The raw path, because for the browser an encoded slash in a name begins no level.
        depth = bytes(request.scope.get("raw_path") or b"/").partition(b"?")[0].count(b"/") - 1
        text = self._templates.get_template(template).render(
            base="../" * depth or "./",
            path=str(request.scope["path"]).strip("/").partition("/")[0],
            version=__version__,
            shown=self._sources.clock(),
            problems=[problem for problem in problems if problem],
            **values,
        )
        return HTMLResponse(text, status)

    def _error(self, request: Request, status: int, text: str) -> Response:
        return self._page(request, "error.html", status, text=text)

    async def show_missing(self, request: Request, error: Exception) -> Response:
        """Answer a request for what does not exist."""
        text = str(error) if isinstance(error, Missing) else "There is no such page."
        return self._error(request, 404, text)

    async def show_refused(self, request: Request, error: Exception) -> Response:
        """Answer a request with a method that its address does not have."""
        return self._error(request, 405, "This page can only be read.")

    async def show_failure(self, request: Request, error: Exception) -> Response:
        """Answer a request that raised an unexpected error."""
        return self._error(
            request,
            500,
            f"hopsgpu failed to make this page: {type(error).__name__}: {error}. The standard"
            " error of `hopsgpu web` has the traceback",
        )


def application(
    sources: Sources, secrets: Secrets, server: Server, patience: float = _PATIENT_SECONDS
) -> Guard:
    """Return the ASGI application."""
    pages = Pages(sources, secrets, patience)
    handlers: Mapping[Any, Any] = {
        404: pages.show_missing,
        405: pages.show_refused,
        Missing: pages.show_missing,
        500: pages.show_failure,
    }
    app = Starlette(routes=pages.routes(), exception_handlers=handlers)
    # Starlette redirects to an absolute URL, which is wrong behind a proxy.
    app.router.redirect_slashes = False
    return Guard(app, server, secrets)


def _status(answer: ReadResult[Any]) -> int:
    """Return the status of a page that has nothing to show: missing, or only for now."""
    return 404 if answer.kind in _MISSING else 503


def _find_or_missing(find: Callable[[], T]) -> T:
    """Return what an address names.

    Raises:
        Missing: it cannot be anything's name.
    """
    try:
        return find()
    except HopsGpuError as error:
        raise Missing(str(error)) from error


def _number(request: Request, name: str) -> int | None:
    """Return a number of an address's query; None if it has none.

    Raises:
        Missing: it is something else.
    """
    text = request.query_params.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 15:
        raise Missing(f"{name}={text[:99]!r} is not a number")
    return int(text)


def _run_named(roots: Roots, name: str) -> tuple[Root, str]:
    """Return the root and the id of the run that a query names; raise ConfigError for none."""
    key, _, run_id = name.rpartition("/")
    if key:
        return roots[key], run_name(run_id)
    if not roots.roots:
        raise ConfigError("there is no directory of runs")
    return roots.roots[0], run_name(run_id)


def _smoothing(request: Request) -> str:
    """Return the smoothing that a reader chose, one of `SMOOTHINGS`.

    Raises:
        Missing: it is something else.
    """
    text = request.query_params.get("smooth", SMOOTHINGS[0])
    if text not in SMOOTHINGS:
        raise Missing(f"smooth={text[:99]!r}: must be one of {', '.join(SMOOTHINGS)}")
    return text


def _has_log(request: Request) -> bool:
    return "log" in request.query_params


def _which(request: Request) -> tuple[RankLog, int | None, int | None]:
    """Return the log, the trial and the offset that an address names."""
    which = RankLog(_number(request, "attempt") or 0, _number(request, "rank") or 0)
    return which, _number(request, "trial"), _number(request, "from")


async def _body(request: Request) -> bytes | None:
    """Return a small body; None for a larger one."""
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MAX_BODY:
            return None
    return content


# Control characters, those that change the direction of what follows, and halves of characters.
_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def clean_text(text: str) -> str:
    """Return a text that changes nothing around it, and that UTF-8 has."""
    return _UNFIT.sub("?", text)


def _finalize(value: object) -> object:
    """Return what a template writes: strangers' texts cleaned; HTML of the templates unchanged."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return clean_text(value)
    return value


def _metrics_text(metrics: object) -> str:
    """Return the metrics of a manifest, which may have anything there, as text."""
    return (reported_text(metrics) if isinstance(metrics, dict) else "") or "-"


def _iso(seconds: float | None) -> str:
    """Return a time for the `datetime` attribute of `<time>`; "" if no calendar has it."""
    try:
        return datetime.datetime.fromtimestamp(float(seconds or 0.0), datetime.UTC).isoformat(
            timespec="seconds"
        )
    except (OverflowError, ValueError, OSError):
        return ""


_WIDTH, _HEIGHT = 480, 130


def _images(plots: MetricPlots | None) -> Sequence[Mapping[str, Any]]:
    """Return plots for readers without scripts, each with its text."""
    if plots is None:
        return []
    images = []
    for name, series in plots.metrics.items():
        traces = [line.points for line in series]
        values = [value for trace in traces for _, value in trace]
        last = series[0].points[-1] if series else (0.0, 0.0)
        words = (
            f"last {last[1]:.4g} at step {last[0]:,g} (rank {series[0].rank}),"
            f" from {min(values):.4g} to {max(values):.4g}"
            if values
            else "no number so far"
        )
        images.append({"name": name, "image": lines_image(traces, _WIDTH, _HEIGHT), "words": words})
    if plots.gpus:
        traces = [line.points for line in plots.gpus]
        means = [sum(value for _, value in trace) / len(trace) for trace in traces]
        words = ", ".join(f"rank {s.rank} {m:.0%}" for s, m in zip(plots.gpus, means, strict=True))
        image = lines_image(traces, _WIDTH, _HEIGHT, SHARES)
        images.append({"name": "GPU utilisation", "image": image, "words": f"mean: {words}"})
    return images


# As the colours of the script's plots, in the middle between those for light and dark grounds.
_RUN_COLOURS = ("#3b78f0", "#c9761f", "#2f9e5b", "#9561f0", "#d24a8b", "#2398b0")


def _overlay_images(plots: Sequence[OverlayPlot], *, is_log: bool) -> Sequence[Mapping[str, Any]]:
    """Return plots of compared runs for readers without scripts, each with its text."""
    return [
        {
            "name": plot.name,
            "words": plot.words,
            "image": lines_image(
                [logarithms(s.points) if is_log else s.points for s in plot.series],
                _WIDTH,
                _HEIGHT,
                colours=[_RUN_COLOURS[series.run] for series in plot.series],
            ),
        }
        for plot in plots
    ]


def _use_images(
    points_by_host: Mapping[str, Sequence[Point]], now: float
) -> Mapping[str, Mapping[str, str]]:
    """Return a small plot of each host's GPU use in the last hour, with its text."""
    return {
        host: {
            "image": lines_image([points], 120, 24, SHARES, (now - HOUR, now)),
            "words": f"{sum(use for _, use in points) / len(points):.0%}",
        }
        for host, points in points_by_host.items()
    }


def _curve_image(view: RecordView) -> str:
    """Return the plot of the best value so far, or ""."""
    if view.search is None or not view.search.curve:
        return ""
    return lines_image([view.search.curve], _WIDTH, _HEIGHT)


def _coordinates(search: SearchRecord | None) -> Coordinates | None:
    if search is None:
        return None
    is_minimized = search.direction == "minimize"
    return coordinates(search.trials, search.metric or "value", is_minimized=is_minimized)
