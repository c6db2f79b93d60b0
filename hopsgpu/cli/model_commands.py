"""`hopsgpu models`: the published models."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hopsgpu.artifacts.model_listing import model_entry, tags_at, tags_of, version_entry
from hopsgpu.cli.command_group import Commands
from hopsgpu.cli.lake_root import json_option, lake_root, root_option, unset_hint
from hopsgpu.cli.output import echo
from hopsgpu.cli.tables import Fact, Row, TableLayout, headers, show
from hopsgpu.core.formats import local_time_of, size
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.serving.export import SERVERS, next_steps
from hopsgpu.storage.root import join_url
from hopsgpu.units import count_of

if TYPE_CHECKING:
    from hopsgpu.artifacts.models import ModelStore

_LAYOUT = TableLayout(
    right=("VERSION", "VERSIONS", "LATEST", "FILES", "SIZE", "FROM", "TO"),
    least={"MODEL": 8, "RUN": 16, "METRICS": 12, "TAGS": 6, "FILE": 16, "DIGEST": 8},
    dropped_first=("DIGEST", "METRICS", "RUN", "FILES", "SIZE"),
    cut_in_front=("RUN", "FILE"),
)
_READERS = 8
_LATEST = "latest"


@click.group(cls=Commands, invoke_without_command=True)
@root_option
@json_option
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """Show the published models.

    A VERSION is a number, a tag, or "latest" (the default), which is the highest number.
    """
    if context.invoked_subcommand is not None:
        return
    store = _store()
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        entries = list(pool.map(lambda name: model_entry(store, name), store.list()))
    if as_json:
        echo(json.dumps(entries, indent=2))
    elif entries:
        rows: list[Row] = [headers("MODEL", "LATEST", "VERSIONS", "TAGS")]
        for model in entries:
            last = max(model["versions"], default=None)
            counts = [(str(last or "-"), ""), (str(len(model["versions"])), "")]
            rows.append([(model["name"], ""), *counts, (_tags(model["tags"]), "")])
        rows += [[(f"{m['name']}: {m['problem']}", "red")] for m in entries if "problem" in m]
        show(rows, _LAYOUT)
    else:
        echo(f"no models in {_url()}{unset_hint()}")


@models.command()
@root_option
@json_option
@click.argument("name")
def versions(name: str, as_json: bool) -> None:
    """Show all versions of a model, the newest first."""
    store = _store()
    published = store.versions(name)[::-1]
    if not published:
        store.get(name)  # raises an error that lists the models
    tags, problem = tags_of(store, name)
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        entries = list(pool.map(lambda version: version_entry(version, tags), published))
    if as_json:
        echo(json.dumps(entries, indent=2))
        if problem:
            echo(f"hopsgpu: {problem}", is_error=True)
        return
    rows: list[Row] = [headers("VERSION", "PUBLISHED", "FILES", "SIZE", "TAGS", "RUN", "METRICS")]
    for entry in entries:
        if "problem" in entry:
            rows.append([(str(entry["version"]), ""), ("damaged", "red"), *[("-", "")] * 5])
            continue
        texts = (
            str(entry["version"]),
            local_time_of(str(entry["time"])),
            str(entry["files"]),
            size(entry["bytes"]),
            ",".join(entry["tags"]) or "-",
            str(entry["run_id"] or "-"),
            _metrics(entry["metrics"]),
        )
        rows.append([(text, "") for text in texts])
    rows += [
        [(f"version {t['version']}: {t['problem']}", "red")] for t in entries if "problem" in t
    ]
    rows += [[(problem, "red")]] if problem else []
    show(rows, _LAYOUT)


@models.command("show")
@root_option
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
@click.argument("name")
@click.argument("version", default=_LATEST)
def show_version(name: str, version: str, as_json: bool) -> None:
    """Show one version: its origin, its metrics and its files."""
    store = _store()
    model = store.get(name, version)
    manifest = model.manifest
    tags, problem = tags_of(store, name)
    tagged = tags_at(tags, model.version)
    if as_json:
        # The present tags: a manifest has the tags of the publication.
        echo(json.dumps({**manifest, "tags": tagged, "url": model.url}, indent=2))
        if problem:
            echo(f"hopsgpu: {problem}", is_error=True)
        return
    rows: list[Row | Fact] = []
    shown = {**manifest, "url": model.url, "tags": ", ".join(tagged) or None}
    shown["model"] = ", ".join(map(str, model.formats)) or None
    shown["metrics"] = _metrics(manifest["metrics"]) if manifest.get("metrics") else None
    shown["time"] = local_time_of(str(manifest.get("time")))
    for key, value in shown.items():
        if key not in ("schema", "files") and value not in (None, {}, []):
            rows.append(Fact(key, value if isinstance(value, str) else json.dumps(value)))
    rows.append([("", "")])
    rows.append(headers("SIZE", "FILE", "DIGEST"))
    for path, facts in manifest["files"].items():
        rows.append([(size(facts["bytes"]), ""), (path, ""), (facts["digest"], "dim")])
    rows += [[(problem, "red")]] if problem else []
    show(rows, _LAYOUT)


@models.command()
@root_option
@json_option
@click.argument("name")
@click.argument("words", nargs=-1, required=True, metavar="[VERSION] DIR")
def download(name: str, words: tuple[str, ...], as_json: bool) -> None:
    """Copy a version's files to a directory, and verify them on the way."""
    if len(words) > 2:
        raise click.UsageError("expected NAME [VERSION] DIR")
    version = words[0] if len(words) == 2 else _LATEST
    store = _store()
    model = store.get(name, version)
    if len(words) == 1:
        _check_directory(store, name, words[0])
    target = model.download(Path(words[-1]))
    outcome = {"name": model.name, "version": model.version, "directory": str(target)}
    _print_done(outcome, f"{model.name} {model.version} is in {target}", as_json)


@models.command("export")
@root_option
@json_option
@click.option("--to", required=True, type=click.Choice(SERVERS), help="The server.")
@click.option("--out", metavar="DIR", help="Directory for it; by default NAME-SERVER.")
@click.option("--path", help="Path of the model within the version, if there are several.")
@click.option("--trust", is_flag=True, help="The server may run code of the model.")
@click.option(
    "--trust-type",
    "types",
    multiple=True,
    help="A type that skops may load, or a state_dict's class (module:Class); repeatable.",
)
@click.option("--max-batch-size", type=int, help="Triton: the most rows that it may put together.")
@click.option("--python", is_flag=True, help="Triton: use its Python backend for any format.")
@click.option("--namenode", metavar="URL", help="KServe: WebHDFS, as http://namenode:9870.")
@click.option("--principal", help="KServe: the Kerberos principal whose keytab it uses.")
@click.option("--image", help="KServe: image of a predictor that is built from the export.")
@click.argument("name")
@click.argument("version", default=_LATEST)
def export_version(
    name: str,
    version: str,
    to: str,
    as_json: bool,
    out: str | None,
    trust: bool,
    types: tuple[str, ...],
    python: bool,
    **options: Any,
) -> None:
    """Write what a server needs to serve a version."""
    model = _store().get(name, version)
    target = model.export(to, out=out, trust=trust or list(types), python=python or None, **options)
    steps = next_steps(to, target)
    outcome = {"name": model.name, "version": model.version, "directory": str(target)}
    lines = [f"{model.name} {model.version} for {to} is in {target}; next:"]
    text = "\n".join([*lines, *(f"  {step}" for step in steps)])
    _print_done({**outcome, "server": to, "next": steps}, text, as_json)


@models.command()
@root_option
@json_option
@click.argument("name")
@click.argument("version")
@click.argument("tag")
def tag(name: str, version: str, tag: str, as_json: bool) -> None:
    """Point a tag at a version, wherever it pointed before."""
    store = _store()
    store.tag(name, version, tag)
    number = store.get(name, tag).version
    outcome = {"name": name, "tag": tag, "version": number}
    _print_done(outcome, f"{tag} is version {number} of {name}", as_json)


@models.command()
@root_option
@json_option
@click.argument("name")
@click.argument("tag")
def untag(name: str, tag: str, as_json: bool) -> None:
    """Remove a tag and keep the version."""
    _store().untag(name, tag)
    _print_done({"name": name, "removed": tag}, f"{tag} is removed from {name}", as_json)


@models.command()
@root_option
@json_option
@click.argument("name")
@click.argument("tag")
def rollback(name: str, tag: str, as_json: bool) -> None:
    """Point a tag at the version that it pointed at before its last change.

    A second rollback goes back further. Versions that were deleted are passed over.
    """
    number = _store().rollback(name, tag).version
    outcome = {"name": name, "tag": tag, "version": number}
    _print_done(outcome, f"{tag} is version {number} of {name} again", as_json)


@models.command()
@root_option
@json_option
@click.argument("name")
@click.argument("tag")
def history(name: str, tag: str, as_json: bool) -> None:
    """Show the changes of a tag, the newest first: who, when, from which version to which."""
    changes = _store().history(name, tag)[::-1]
    if as_json:
        echo(json.dumps([dataclasses.asdict(change) for change in changes], indent=2))
        return
    rows: list[Row] = [headers("TIME", "USER", "ACTION", "FROM", "TO")]
    for change in changes:
        texts = (
            local_time_of(change.time),
            change.user,
            change.action,
            str(change.previous or "-"),
            str(change.version or "-"),
        )
        rows.append([(text, "") for text in texts])
    show(rows, _LAYOUT)


@models.command()
@root_option
@json_option
@click.option("--yes", is_flag=True, help="Confirm the removal, which cannot be undone.")
@click.argument("name")
@click.argument("version")
def delete(name: str, version: str, yes: bool, as_json: bool) -> None:
    """Remove a version permanently; its number is never used again."""
    store = _store()
    try:
        number = store.get(name, version).version
    except StoreError as error:
        # Readers refuse a version without a manifest, but it may be deleted.
        if error.kind != "damaged" or not version.isdigit():
            raise
        number = int(version)
    if not yes:
        raise ConfigError(
            f"{join_url(_url(), f'{name}/{number}')} would be removed permanently:"
            " confirm with --yes"
        )
    store.delete(name, number)
    outcome = {"name": name, "removed": number}
    _print_done(outcome, f"version {number} of {name} is removed", as_json)


@models.command()
@root_option
@json_option
@click.argument("name")
@click.argument("version", default=_LATEST)
def verify(name: str, version: str, as_json: bool) -> None:
    """Read a version's files and verify them; exit with 1 if one is damaged or missing.

    This finds damage, not tampering: whoever may change a file may change the manifest too.
    """
    model = _store().get(name, version)
    model.verify()
    files = model.manifest["files"]
    total = sum(facts["bytes"] for facts in files.values())
    if as_json:
        outcome = {"name": model.name, "version": model.version, "url": model.url}
        echo(json.dumps({**outcome, "files": len(files), "bytes": total}, indent=2))
        return
    total_text = f"{count_of(len(files), 'file')}, {size(total)}"
    echo(f"{model.name} {model.version} is intact: {total_text}")


def _print_done(outcome: dict[str, Any], text: str, as_json: bool) -> None:
    echo(json.dumps(outcome, indent=2) if as_json else text)


def _store() -> ModelStore:
    from hopsgpu.artifacts.models import ModelStore

    return ModelStore(_url())


def _url() -> str:
    return join_url(lake_root(), "models")


def _check_directory(store: ModelStore, name: str, directory: str) -> None:
    """Refuse a directory that looks like a version."""
    if directory == _LATEST or directory.isdecimal() or directory in tags_of(store, name)[0]:
        shown = shlex.quote(name), shlex.quote(directory)
        raise ConfigError(
            f"{directory!r} alone looks like a version of {name!r}, not like a directory: to copy"
            f" that version to DIR, use `hopsgpu models download {shown[0]} {shown[1]} DIR`;"
            f" to copy the latest to a directory of that name, use ./{shown[1]}"
        )


def _tags(tags: dict[str, int]) -> str:
    return ", ".join(f"{tag}={number}" for tag, number in sorted(tags.items())) or "-"


def _metrics(metrics: Any) -> str:
    if not isinstance(metrics, dict) or not metrics:
        return "-"
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in metrics.items()
    )
