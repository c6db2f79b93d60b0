"""Entries of models and versions in lists. An unreadable one has its problem in its entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hopsgpu.errors import HopsGpuError

if TYPE_CHECKING:
    from hopsgpu.artifacts.models import ModelStore, ModelVersion


def model_entry(store: ModelStore, name: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "versions": [], "tags": {}}
    try:
        entry["versions"] = [version.version for version in store.versions(name)]
        entry["tags"] = store.tags(name)
    except HopsGpuError as error:  # a damaged model does not hide the others
        entry["problem"] = str(error)
    return entry


def tags_of(store: ModelStore, name: str) -> tuple[dict[str, int], str]:
    """Return a model's tags, and why they cannot be read, or ""."""
    try:
        return store.tags(name), ""
    except HopsGpuError as error:  # a damaged tag hides no version
        return {}, str(error)


def tags_at(tags: dict[str, int], version: int) -> list[str]:
    return sorted(tag for tag, number in tags.items() if number == version)


def version_entry(version: ModelVersion, tags: dict[str, int]) -> dict[str, Any]:
    try:
        manifest = version.manifest
    except HopsGpuError as error:
        return {"version": version.version, "url": version.url, "problem": str(error)}
    return {
        "version": version.version,
        "url": version.url,
        "time": manifest.get("time"),
        "files": len(manifest["files"]),
        "bytes": sum(facts["bytes"] for facts in manifest["files"].values()),
        "tags": tags_at(tags, version.version),
        "run_id": manifest.get("run_id"),
        "metrics": manifest.get("metrics"),
    }
