"""Pickling of OmegaConf's configurations, as Hydra gives them to a script.

A resolver such as `${now:%H}` exists only in the process that registered it. The driver calls the
resolver once, so that all ranks have the same value.
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
# OmegaConf registers these in each process. All but `oc.env` depend on the configuration only.
_LIBRARY_PREFIX = "oc."
_ENVIRONMENT = "oc.env"


def is_config(kind: type) -> bool:
    # Without the module there can be no configuration.
    library = sys.modules.get(_LIBRARY)
    return library is not None and issubclass(kind, library.Container)


class ConfigReducer:
    """The reducer of OmegaConf's configurations for one pickler.

    Nodes of one configuration keep one root, because interpolations refer to other nodes.
    """

    def __init__(self) -> None:
        # By the id of a root: the root, and the copies of its nodes by the nodes' ids.
        self._roots: dict[int, tuple[Any, dict[int, Any]]] = {}

    def reduce(self, config: Any) -> Any:
        """Reduce a configuration, or a node of one, to a copy without resolvers."""
        root = config._get_root()
        if id(root) not in self._roots:
            copies = _copies_without_resolvers(root)
            self._roots[id(root)] = (root, copies)
            if copies:
                resolved = copies[id(root)]
                self._roots[id(resolved)] = (resolved, {})
        resolved = self._roots[id(root)][1].get(id(config))
        return NotImplemented if resolved is None else (return_config, (resolved,))


def return_config(config: Any) -> Any:
    """Return its argument; unpickling calls it with the resolved copy of a configuration."""
    return config


def _copies_without_resolvers(root: Any) -> dict[int, Any]:
    """Return copies of a root and its nodes by the nodes' ids; empty if no resolver needs a copy.

    The resolvers are called with the original, which caches values: the driver keeps the values
    that ranks get.
    """
    if not any(_needs_driver(node) for node in _nodes(root)):
        return {}
    copies: dict[int, Any] = {}
    _resolve_children(root, copy.deepcopy(root, copies))
    # deepcopy() also records objects that are not nodes.
    container = sys.modules[_LIBRARY].Container
    return {key: value for key, value in copies.items() if isinstance(value, container)}


def _needs_driver(node: Any) -> bool:
    return node._is_interpolation() and any(
        argument not in RESERVED_VARIABLES
        if name == _ENVIRONMENT
        else not name.startswith(_LIBRARY_PREFIX)
        for name, argument in _RESOLVER.findall(node._value())
    )


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for key in _keys(node):
        yield from _nodes(node._get_child(key))


def _keys(node: Any) -> list[Any]:
    """Return the keys of a node's children; empty for a value, a missing node and None."""
    library = sys.modules[_LIBRARY]
    if node._is_interpolation() or node._is_missing() or node._is_none():
        return []
    if isinstance(node, library.DictConfig):
        return list(node.keys())
    return list(range(len(node))) if isinstance(node, library.ListConfig) else []


def _resolve_children(original: Any, resolved: Any) -> None:
    """Replace interpolations with resolvers in a copy by their values.

    An interpolation that cannot be resolved here remains: the function may never read it.
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
                resolved[key] = _config_value(child)
        _resolve_children(child, resolved._get_child(key))


def _config_value(node: Any) -> Any:
    """Return an interpolation's value in the form that a configuration accepts."""
    if isinstance(node, sys.modules[_LIBRARY].Container):
        return node
    value = node._value()
    if isinstance(value, str):
        return _UNESCAPED.sub(lambda match: f"{match[1] * 2}\\${{", value)
    return value
