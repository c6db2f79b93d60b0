"""Pickling of OmegaConf's configurations, as Hydra gives them to a script.

A resolver such as `${now:%H}` belongs to the process that registered it, so no rank can call it.
The driver calls it once, and each rank has the same value.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from typing import Any

from hopsgpu.core.spec import RESERVED_VARIABLES

_LIBRARY = "omegaconf"
# The name of a resolver, and the first word of its arguments.
_RESOLVER = re.compile(r"(?<!\\)\$\{\s*([A-Za-z_][\w.]*)\s*:\s*(\w*)")
# OmegaConf would take this text for an interpolation.
_UNESCAPED = re.compile(r"(\\*)\$\{")
# OmegaConf registers these in each process. Apart from `oc.env` they are functions of the config.
_OF_LIBRARY = "oc."
_ENVIRONMENT = "oc.env"


def is_config(kind: type) -> bool:
    """Return whether a type is that of OmegaConf's configurations."""
    # Without the module there can be no configuration.
    library = sys.modules.get(_LIBRARY)
    return library is not None and issubclass(kind, library.Container)


class ConfigReducer:
    """The reducer of OmegaConf's configurations for one pickler.

    Parts of one configuration remain parts of one: they refer to each other by interpolation.
    """

    def __init__(self) -> None:
        # By the identity of a root: the root, and the copies of its parts by their identities.
        self._roots: dict[int, tuple[Any, dict[int, Any]]] = {}

    def reduce(self, config: Any) -> Any:
        """Reduce a configuration, or a part of one, to a copy without resolvers."""
        root = config._get_root()
        if id(root) not in self._roots:
            copies = _copies_without_resolvers(root)
            self._roots[id(root)] = (root, copies)
            if copies:
                resolved = copies[id(root)]
                self._roots[id(resolved)] = (resolved, {})
        resolved = self._roots[id(root)][1].get(id(config))
        return NotImplemented if resolved is None else (itself, (resolved,))


def itself(config: Any) -> Any:
    """Return its argument: the copy of a configuration that has become the configuration."""
    return config


def _copies_without_resolvers(root: Any) -> dict[int, Any]:
    """Return copies of a root and its parts by their identities; empty if all resolvers are ranks'.

    The resolvers are called with the original, which remembers values of those that are cached: the
    driver continues with the value that ranks have.
    """
    if not any(_needs_driver(node) for node in _nodes(root)):
        return {}
    copies: dict[int, Any] = {}
    _resolve_children(root, copy.deepcopy(root, copies))
    # deepcopy() also notes what is no part of the configuration.
    container = sys.modules[_LIBRARY].Container
    return {key: value for key, value in copies.items() if isinstance(value, container)}


def _needs_driver(node: Any) -> bool:
    return node._is_interpolation() and any(
        argument not in RESERVED_VARIABLES
        if name == _ENVIRONMENT
        else not name.startswith(_OF_LIBRARY)
        for name, argument in _RESOLVER.findall(node._value())
    )


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for key in _keys(node):
        yield from _nodes(node._get_child(key))


def _keys(node: Any) -> list[Any]:
    """Return the keys of a node's children: none for a value, and for what is missing or None."""
    library = sys.modules[_LIBRARY]
    if node._is_interpolation() or node._is_missing() or node._is_none():
        return []
    if isinstance(node, library.DictConfig):
        return list(node.keys())
    return list(range(len(node))) if isinstance(node, library.ListConfig) else []


def _resolve_children(original: Any, resolved: Any) -> None:
    """Give the children of a copy the values that interpolations with resolvers have.

    An interpolation that has no value here, for example because it refers to a missing value,
    remains as it is: the function may never read it.
    """
    library = sys.modules[_LIBRARY]
    for key in _keys(original):
        child = original._get_child(key)
        if _needs_driver(child):
            try:
                child = child._dereference_node()
            except library.errors.OmegaConfBaseException:
                continue
            flags = {"readonly": False, "struct": False, "allow_objects": True}
            with (
                library.flag_override(resolved, list(flags), list(flags.values())),
                library.flag_override(resolved._get_child(key), list(flags), list(flags.values())),
            ):
                resolved[key] = _value_of(child)
        _resolve_children(child, resolved._get_child(key))


def _value_of(node: Any) -> Any:
    """Return what a configuration takes for the value that an interpolation has."""
    if isinstance(node, sys.modules[_LIBRARY].Container):
        return node
    value = node._value()
    if isinstance(value, str):
        return _UNESCAPED.sub(lambda found: f"{found[1] * 2}\\${{", value)
    return value
