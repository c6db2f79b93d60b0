"""Registrations of a script's classes and functions in libraries such as JAX, torch and Keras.

A registration is in a table of the library, not in the class. It is found when a class or function
is pickled by value, and repeated in the process that loads this.
"""

from __future__ import annotations

import abc
import contextlib
import copyreg
import dataclasses
import functools
import gc
import importlib
import inspect
import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

from cloudpickle import cloudpickle as internals

from hopsgpu.packaging.class_creation import make_bare, make_class, make_container_class

# A function that registers an object, and its further arguments, which must be picklable.
_Registration = tuple[Callable[..., None], tuple[Any, ...]]
_Reduced = tuple[Any, ...]

log = logging.getLogger(__name__)

_JAX_MODULE, _FLAX_MODULE = "jax._src.tree_util", "flax.serialization"
_TORCH_MODULE, _TORCH_LOADING_MODULE = "torch.utils._pytree", "torch.serialization"
_KERAS_MODULE = "keras.saving"


class Registrations:
    """The present registrations of this process's classes and functions."""

    def add_to(self, value: Any, reduced: _Reduced) -> _Reduced:
        """Return the reduction of a class or function with its registrations."""
        # A reduction without a state refers to an object of the loading process.
        registrations = [] if len(reduced) == 2 else list(self._registrations_of(value))
        if not registrations:
            return reduced
        make, args, state, items, pairs, setter = reduced
        checks = [
            _IS_CONTAINER[function] for function, _ in registrations if function in _IS_CONTAINER
        ]
        if checks and make is make_class:
            make, args = make_container_class, (checks[0], *args)
        # Register after the state is set: a registration may need the members of the class.
        return make, args, (setter, state, registrations), items, pairs, set_and_register

    def _registrations_of(self, value: Any) -> Iterator[_Registration]:
        for name, find in _FINDERS.items():
            # A library that is not imported here has no registrations.
            if (module := sys.modules.get(name)) is None:
                continue
            try:
                yield from list(find(module, value))
            except AttributeError as error:
                # The table has another name in this version. If ranks need the registration, they
                # raise the library's error.
                log.warning("registrations of %s are not sent to the ranks: %s", name, error)
        if isinstance(value, type):
            yield from ((register_virtual, (base,)) for base in self._virtual_bases[value])

    @functools.cached_property
    def _virtual_bases(self) -> Mapping[type, list[Any]]:
        """Importable abstract classes, by the classes that were registered with them."""
        bases_by_class: dict[type, list[Any]] = defaultdict(list)
        for base in _abstract_classes():
            references = abc._get_dump(base)[0]  # type: ignore[attr-defined]
            # cloudpickle registers for an abstract class that is pickled by value.
            if references and internals._should_pickle_by_reference(base):
                for registered in filter(None, (reference() for reference in references)):
                    bases_by_class[registered].append(base)
        for bases in bases_by_class.values():
            bases.sort(key=lambda base: (base.__module__, base.__qualname__))
        return bases_by_class


def set_and_register(value: Any, state: tuple[Any, Any, list[_Registration]]) -> None:
    setter, own_state, registrations = state
    setter(value, own_state)
    for register, args in registrations:
        register(value, *args)


def _abstract_classes() -> Iterator[Any]:
    pending: list[type] = [object]
    visited: set[type] = set()
    while pending:
        subclasses: list[type] = type.__subclasses__(pending.pop())
        for cls in subclasses:
            if cls not in visited:
                visited.add(cls)
                pending.append(cls)
                if isinstance(cls, abc.ABCMeta):
                    yield cls


def register_virtual(cls: type, base: Any) -> None:
    base.register(cls)


def _find_copyreg(module: Any, value: Any) -> Iterator[_Registration]:
    if isinstance(value, type) and (reducer := module.dispatch_table.get(value)) is not None:
        yield copyreg.pickle, (reducer,)


def _find_multiprocessing(module: Any, value: Any) -> Iterator[_Registration]:
    table = module.ForkingPickler._extra_reducers
    if isinstance(value, type) and (reducer := table.get(value)) is not None:
        yield module.ForkingPickler.register, (reducer,)


def _find_jax(module: Any, value: Any) -> Iterator[_Registration]:
    if not isinstance(value, type) or (entry := module._registry.get(value)) is None:
        return
    closure = inspect.getclosurevars(entry.from_iter).nonlocals if _is_jax(entry.from_iter) else {}
    if closure.get("nodetype") is value:
        # JAX flattens dataclasses without a function, so it needs the names of the fields.
        yield register_jax_dataclass, (closure["data_fields"], closure["meta_fields"])
        return
    flatten_keyed = _flatten_keyed_of(module.default_registry, value, entry.to_iter)
    yield register_jax_node, (entry.to_iter, entry.from_iter, flatten_keyed)


def _is_jax(function: Any) -> bool:
    return isinstance(function, FunctionType) and function.__module__ == _JAX_MODULE


def _flatten_keyed_of(
    registry: Any, cls: type, flatten: Callable[[Any], Any]
) -> FunctionType | None:
    """Return the function that flattens objects of a class with keys, or None.

    JAX calls this function but does not return it. Call JAX with an empty object, whose flattening
    usually fails, and observe the first call. JAX's fallback is to `flatten` without keys.
    """
    flatten_keyed = _first_called(registry.flatten_one_level_with_keys, cls)
    return None if flatten_keyed is _first_called(flatten, cls) else flatten_keyed


def _first_called(call: Callable[[Any], Any], cls: type) -> FunctionType | None:
    """Return the first Python function that a call with an empty object of a class runs."""
    calls: list[tuple[CodeType, Mapping[str, object]]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and not calls:
            calls.append((frame.f_code, dict(frame.f_locals)))

    def run() -> None:
        with contextlib.suppress(Exception):
            empty = make_bare(cls)
            try:
                sys.setprofile(note)
                call(empty)
            finally:
                sys.setprofile(None)

    # A new thread, because this thread may have a profiler, which setprofile() would replace.
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for code, values in calls:
        for function in gc.get_referrers(code):
            if isinstance(function, FunctionType) and _has_closure(function, values):
                return function
    return None


def _has_closure(function: FunctionType, values: Mapping[str, object]) -> bool:
    """Return whether a function has these closure variables; several may share one code."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return all(name in values and cell.cell_contents is values[name] for name, cell in cells)


def register_jax_dataclass(cls: type, data: tuple[str, ...], meta: tuple[str, ...]) -> None:
    """Register a class for JAX by its fields: `data` have arrays, `meta` have static values."""
    tree_util = importlib.import_module("jax.tree_util")
    if not is_jax_node(cls):
        fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
        dropped = {field.name for field in fields if field.init}.difference(data, meta)
        tree_util.register_dataclass(cls, data, meta, drop_fields=tuple(dropped))


def register_jax_node(
    cls: type,
    flatten: Callable[[Any], Any],
    unflatten: Callable[[Any, Any], Any],
    flatten_keyed: Callable[[Any], Any] | None,
) -> None:
    """Register a class as a container, as in `jax.tree_util.register_pytree_node`."""
    tree_util = importlib.import_module("jax.tree_util")
    if not is_jax_node(cls):
        tree_util.register_pytree_node(cls, flatten, unflatten, flatten_keyed)


def is_jax_node(cls: type) -> bool:
    return cls in getattr(sys.modules.get(_JAX_MODULE), "_registry", ())


def is_torch_node(cls: type) -> bool:
    return cls in getattr(sys.modules.get(_TORCH_MODULE), "SUPPORTED_NODES", ())


def _find_flax(module: Any, value: Any) -> Iterator[_Registration]:
    if isinstance(value, type) and (pair := module._STATE_DICT_REGISTRY.get(value)) is not None:
        yield register_flax, pair


def register_flax(
    cls: type, to_state: Callable[[Any], Any], from_state: Callable[[Any, Any], Any]
) -> None:
    serialization = importlib.import_module(_FLAX_MODULE)
    serialization.register_serialization_state(cls, to_state, from_state, override=True)


def _find_torch(module: Any, value: Any) -> Iterator[_Registration]:
    if not isinstance(value, type) or (node := module.SUPPORTED_NODES.get(value)) is None:
        return
    packages = {_package(base) for base in value.__mro__[1:]} - {"__main__"}
    if _package(node.flatten_fn) in packages:
        return  # a base class registers its subclasses, as transformers' do
    # torch has constants since version 2.7.
    if value in getattr(module, "CONSTANT_NODES", ()):
        yield register_torch_constant, ()
        return
    serialized = module.SUPPORTED_SERIALIZED_TYPES[value]
    name = serialized.serialized_type_name
    options = {
        "serialized_type_name": None if name == module.NO_SERIALIZED_TYPE_NAME_FOUND else name,
        "to_dumpable_context": serialized.to_dumpable_context,
        "from_dumpable_context": serialized.from_dumpable_context,
        "flatten_with_keys_fn": node.flatten_with_keys_fn,
    }
    yield register_torch_node, (node.flatten_fn, node.unflatten_fn, options)


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def register_torch_constant(cls: type) -> None:
    pytree = importlib.import_module(_TORCH_MODULE)
    if not is_torch_node(cls):
        pytree.register_constant(cls)


def register_torch_node(
    cls: type,
    flatten: Callable[[Any], Any],
    unflatten: Callable[[Any, Any], Any],
    options: Mapping[str, Any],
) -> None:
    """Register a class as a container, as in `torch.utils._pytree.register_pytree_node`."""
    pytree = importlib.import_module(_TORCH_MODULE)
    if not is_torch_node(cls):
        pytree.register_pytree_node(cls, flatten, unflatten, **options)


def _find_torch_loading(module: Any, value: Any) -> Iterator[_Registration]:
    for entry in module.get_safe_globals():
        if entry is value:
            yield register_torch_safe, ()
        elif isinstance(entry, tuple) and entry[0] is value:
            yield register_torch_safe, (entry[1],)


def register_torch_safe(value: Any, name: str | None = None) -> None:
    """Let `torch.load` use a class or function, under another name if `name` is given."""
    importlib.import_module(_TORCH_LOADING_MODULE).add_safe_globals(
        [value if name is None else (value, name)]
    )


def _find_keras(module: Any, value: Any) -> Iterator[_Registration]:
    for name, registered in module.get_custom_objects().items():
        if registered is value:
            yield register_keras, (name,)


def register_keras(value: Any, name: str) -> None:
    """Register a class or function for Keras; a decorator's `name` has a package before ">"."""
    saving = importlib.import_module(_KERAS_MODULE)
    package, separator, own_name = name.rpartition(">")
    if separator:
        saving.register_keras_serializable(package, own_name)(value)
    else:
        saving.get_custom_objects()[name] = value


_FINDERS: Mapping[str, Callable[[Any, Any], Iterator[_Registration]]] = {
    "copyreg": _find_copyreg,
    "multiprocessing.reduction": _find_multiprocessing,
    _JAX_MODULE: _find_jax,
    _FLAX_MODULE: _find_flax,
    _TORCH_MODULE: _find_torch,
    _TORCH_LOADING_MODULE: _find_torch_loading,
    _KERAS_MODULE: _find_keras,
}
# Functions that can register a class only once, and checks for their registrations.
_IS_CONTAINER: Mapping[Callable[..., None], Callable[[type], bool]] = {
    register_jax_dataclass: is_jax_node,
    register_jax_node: is_jax_node,
    register_torch_constant: is_torch_node,
    register_torch_node: is_torch_node,
}
