"""`hopsgpu runs`: the runs, their outcomes, and commands that act on them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hopsgpu.cli.command_group import Commands
from hopsgpu.cli.lake_root import json_option, lake_root, root_option, unset_hint
from hopsgpu.cli.output import echo
from hopsgpu.cli.tables import show
from hopsgpu.errors import ConfigError, HopsGpuError, StoreError
from hopsgpu.storage.error_messages import ABSENT
from hopsgpu.units import count_of

if TYPE_CHECKING:
    from hopsgpu.artifacts.runs import RunStore, StoredRun
    from hopsgpu.cluster_managers.silent_runs import SilentRuns
    from hopsgpu.core.run_record import RunRecord

_CANCEL_SECONDS = 60.0
_POLL_SECONDS = 1.0


@click.group(cls=Commands, invoke_without_command=True)
@root_option
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    metavar="N",
    help="Show at most this many runs, the newest.",
)
@json_option
@click.pass_context
def runs(context: click.Context, limit: int, as_json: bool) -> None:
    """Show the runs, the newest first; each command below takes the ID of a run.

    A unique prefix of an ID is enough. "last" is the newest run, and the ID of a YARN application
    stands for its newest run.
    """
    if context.invoked_subcommand is not None:
        return
    store, now = _store(), time.time()
    ids = store.ids()[:limit]
    stored = _silent_runs().with_reports(
        store.read(ids), lambda number: store.load(ids[number]), now
    )
    if as_json:
        echo(json.dumps([_json_entry(run, now) for run in stored], indent=2))
    elif stored:
        from hopsgpu.cli.run_tables import LIST_LAYOUT, run_rows
        from hopsgpu.display.run_view import summary_of

        show(list(run_rows([summary_of(run, now) for run in stored])), LIST_LAYOUT)
    else:
        echo(f"no runs in {store.url}{unset_hint()}")


@runs.command("show")
@root_option
@click.option("--json", "as_json", is_flag=True, help="Print the whole record as JSON.")
@click.argument("run_id", metavar="ID")
def show_run(run_id: str, as_json: bool) -> None:
    """Show one run: its outcome, its timeline, its ranks and what they reported."""
    store, now = _store(), time.time()
    run_id = store.find(run_id)
    record, report = _silent_runs().with_report(
        store.record(run_id), lambda: store.record(run_id), now
    )
    url = store.directory(run_id).url
    if as_json:
        from hopsgpu.artifacts.runs import StoredRun
        from hopsgpu.core.run_record import fields_of

        state = StoredRun(run_id, record, report=report).state_at(now)
        yarn = {} if report is None else {"yarn": vars(report)}
        echo(json.dumps({**fields_of(record), "state": state, "url": url, **yarn}, indent=2))
        return
    from hopsgpu.cli.run_tables import LAYOUT, run_facts
    from hopsgpu.display.run_view import record_view

    show(list(run_facts(record_view(record, url, now, report=report))), LAYOUT)


@runs.command()
@root_option
@json_option
@click.argument("references", metavar="ID ID...", nargs=-1, required=True)
def compare(references: tuple[str, ...], as_json: bool) -> None:
    """Compare runs: outcome, parameters, last metrics, request, code and environment.

    A * marks what differs. For the request and the environment, only differences are shown.
    """
    from hopsgpu.display.run_comparison import MAX_RUNS, compare_runs

    if not 2 <= len(references) <= MAX_RUNS:
        raise ConfigError(f"{count_of(len(references), 'run')} to compare: name 2 to {MAX_RUNS}")
    store = _store()
    records = [store.record(store.find(reference)) for reference in references]
    comparison = compare_runs(records, time.time())
    if as_json:
        echo(json.dumps(comparison.as_json(), indent=2))
        return
    from hopsgpu.cli.run_tables import comparison_table

    show(*comparison_table(comparison))


@runs.command()
@root_option
@json_option
@click.argument("run_id", metavar="ID")
def cancel(run_id: str, as_json: bool) -> None:
    """Cancel a run of any session, whose driver checks for this every few seconds.

    Wait for up to a minute until the run has ended.
    """
    store = _store()
    run_id = store.find(run_id)
    store.cancel(run_id, time.time())
    for record in _until_ended(store, run_id):
        if record.has_ended:
            if as_json:
                echo(json.dumps({"run_id": run_id, "state": record.state}, indent=2))
                return
            by_itself = (
                ""
                if record.state == "cancelled"
                else ": it ended before its driver saw the request"
            )
            echo(f"{run_id} is {record.state}{by_itself}")
            return
        record.check_is_running(time.time())
    raise HopsGpuError(
        f"{run_id} has not ended within {_CANCEL_SECONDS:g} s; it is {record.state}. Its driver has"
        " the request, and ends the run as soon as it can"
    )


@runs.command()
@root_option
@click.option(
    "--older-than",
    metavar="TIME",
    help="Remove runs last updated longer ago than this, such as 30d.",
)
@click.option("--keep", type=click.IntRange(0), metavar="N", help="Keep the N newest runs.")
@click.option("--dry-run", is_flag=True, help="Only print which runs would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print the IDs as JSON.")
def prune(older_than: str | None, keep: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove runs that have ended, with their logs, checkpoints and TensorBoard files.

    Parts of scores that ended early are removed with them. Published models stay, and so does what
    `hopsgpu usage` counts. An active run is never removed, nor a run that it resumes, nor a
    directory that cannot be read as a run.
    """
    from hopsgpu.artifacts.runs import prunable
    from hopsgpu.units import parse_duration

    if older_than is None and keep is None:
        raise ConfigError("say which runs to remove: --older-than 30d, --keep 100, or both")
    store, now = _store(), time.time()
    seconds = parse_duration(older_than, "--older-than")
    stored = store.read(store.ids())
    going = prunable(stored, seconds, keep or 0, now)
    if not dry_run:
        # Keep the GPU time first: if that fails, no run is removed.
        _keep_usage(stored, going, seconds, now)
    removed, problems = [], []
    for run_id in going:
        try:
            parts = None if dry_run else store.remove(run_id)
        except StoreError as error:
            problems.append(str(error))
        else:
            removed.append(run_id)
            if not as_json:
                echo(run_id)
            if parts is not None:
                echo(
                    f"hopsgpu: {parts.url} stays: the record of {run_id} names it, but is not your"
                    " own; remove the directory yourself if it has only the parts of this score",
                    is_error=True,
                )
    if as_json:
        echo(json.dumps(removed, indent=2))
    outcome = "would be removed" if dry_run else "removed"
    echo(f"{count_of(len(removed), 'run')} {outcome}", is_error=True)
    if problems:
        raise StoreError("\n".join(problems))


@runs.command()
@root_option
@json_option
@click.argument("run_id", metavar="ID")
def files(run_id: str, as_json: bool) -> None:
    """List the files that a run's script has left in --checkpoint-dir and --output directories.

    If ranks wrote different files of one name, the name begins with the rank.
    """
    from hopsgpu.artifacts.kept_files import read_kept

    store = _store()
    run_id = store.find(run_id)
    kept = read_kept(store.directory(run_id)).distinct
    if as_json:
        rows = [
            {"name": name, "bytes": file.facts.bytes, "rank": file.rank, "attempt": file.attempt}
            for name, file in kept.items()
        ]
        echo(json.dumps(rows, indent=2))
    elif kept:
        from hopsgpu.cli.run_tables import FILES_LAYOUT, file_rows

        show(list(file_rows(kept)), FILES_LAYOUT)
    else:
        echo(
            f"{run_id} has no files: `hopsgpu run --output DIR` and --checkpoint-dir DIR keep those"
            " of a script"
        )


@runs.command()
@root_option
@json_option
@click.argument("run_id", metavar="ID")
@click.argument("directory", metavar="DIR")
def download(run_id: str, directory: str, as_json: bool) -> None:
    """Copy the files that `hopsgpu runs files` lists to a new directory, and verify them."""
    from hopsgpu.artifacts.kept_files import download_distinct, read_kept

    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{directory} exists: name a new directory, or an empty one")
    store = _store()
    run_id = store.find(run_id)
    place = store.directory(run_id)
    kept = read_kept(place)
    if not kept.files:
        raise StoreError(f"{run_id} has no files to download (`hopsgpu runs files`)", ABSENT)
    download_distinct(kept, place, target)
    count = len(kept.distinct)
    if as_json:
        echo(json.dumps({"run_id": run_id, "files": count, "directory": str(target)}, indent=2))
    else:
        echo(f"{count_of(count, 'file')} of {run_id} in {target}")


def _store() -> RunStore:
    from hopsgpu.artifacts.runs import RunStore

    return RunStore(lake_root())


def _silent_runs() -> SilentRuns:
    from hopsgpu.cluster_managers.silent_runs import silent_runs

    return silent_runs(os.environ)


def _keep_usage(
    stored: Sequence[StoredRun], removable: Sequence[str], older_than: float | None, now: float
) -> None:
    from hopsgpu.artifacts.run_uses import keep_before_removal
    from hopsgpu.storage.lake import LakePath

    leaving = set(removable)
    records = [run.record for run in stored if run.record is not None and run.run_id in leaving]
    keep_before_removal(LakePath(lake_root()), records, older_than, now)


def _until_ended(store: RunStore, run_id: str) -> Iterator[RunRecord]:
    deadline = time.monotonic() + _CANCEL_SECONDS
    while time.monotonic() < deadline:
        # The lake announces no change.
        time.sleep(_POLL_SECONDS)
        yield store.record(run_id)


def _json_entry(run: StoredRun, now: float) -> dict[str, Any]:
    if run.record is None:
        return {"run_id": run.run_id, "state": run.state_at(now), "problem": run.problem}
    record = run.record
    return {
        "run_id": run.run_id,
        "state": run.state_at(now),
        "name": record.name,
        "user": record.user,
        "application": record.application,
        "requested": record.timeline.requested,
        "seconds": run.seconds_taken(now),
        "workers": record.spec.workers,
        "least_workers": record.spec.least_workers,
        "gpus": record.gpus,
        "model": record.model,
        "error": record.error,
    }
