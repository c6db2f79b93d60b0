"""What a script registers its classes and functions for, in libraries that its ranks use too.

A registration is in a table of the library, and not in the class. So it is collected when a class
or function is pickled by value, and made again where that is loaded.
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
from multiprocessing import reduction
from types import CodeType, FrameType, FunctionType
from typing import Any

from cloudpickle import cloudpickle as internals

from hopsgpu.packaging.class_creation import make_bare, make_class, make_container_class

# Makes a registration again, of an object and with further arguments, which must be picklable.
_Registration = tuple[Callable[..., None], tuple[Any, ...]]
_Reduced = tuple[Any, ...]

log = logging.getLogger(__name__)

_JAX, _FLAX = "jax._src.tree_util", "flax.serialization"
_TORCH, _TORCH_LOADING = "torch.utils._pytree", "torch.serialization"
_KERAS = "keras.saving"


class Registrations:
    """The registrations of this process's classes and functions, as they are now."""

    def carried_by(self, value: Any, reduced: _Reduced) -> _Reduced:
        """Return a class or function reduced by value so that its registrations come with it.

        Args:
            value: the class or function.
            reduced: the way to pickle it: with a state and a function that sets the state, or as a
                reference to what the loading process has.
        """
        is_reference = len(reduced) == 2
        found = [] if is_reference else list(self._of(value))
        if not found:
            return reduced
        make, args, state, items, pairs, setter = reduced
        checks = [_CONTAINERS[register] for register, _ in found if register in _CONTAINERS]
        if checks and make is make_class:
            make, args = make_container_class, (checks[0], *args)
        # A registration may refer to the class itself, and needs the members of the class.
        return make, args, (setter, state, found), items, pairs, set_and_register

    def _of(self, value: Any) -> Iterator[_Registration]:
        for name, collect in _COLLECTORS.items():
            # A library that is not imported here has no registrations.
            if (module := sys.modules.get(name)) is None:
                continue
            try:
                yield from list(collect(module, value))
            except AttributeError as error:
                # The table of another version has another name. Ranks without the registration
                # raise the library's own error, if they need it.
                log.warning("registrations of %s are not sent to the ranks: %s", name, error)
        if isinstance(value, type):
            yield from ((register_virtual, (base,)) for base in self._virtual_bases[value])

    @functools.cached_property
    def _virtual_bases(self) -> Mapping[type, list[Any]]:
        """Abstract classes that ranks import, by the classes that were registered for them."""
        found: dict[type, list[Any]] = defaultdict(list)
        for base in _abstract_classes():
            references = abc._get_dump(base)[0]  # type: ignore[attr-defined]
            # cloudpickle itself registers for a class that travels by value.
            if references and internals._should_pickle_by_reference(base):
                for registered in filter(None, (reference() for reference in references)):
                    found[registered].append(base)
        for bases in found.values():
            bases.sort(key=lambda base: (base.__module__, base.__qualname__))
        return found


def _library(name: str) -> Any:
    return importlib.import_module(name)


def set_and_register(value: Any, state: tuple[Any, Any, list[_Registration]]) -> None:
    """Set the state of a class or function, then make its registrations."""
    setter, own, registrations = state
    setter(value, own)
    for register, args in registrations:
        register(value, *args)


def _abstract_classes() -> Iterator[Any]:
    pending: list[type] = [object]
    met: set[type] = set()
    while pending:
        found: list[type] = type.__subclasses__(pending.pop())
        for cls in found:
            if cls not in met:
                met.add(cls)
                pending.append(cls)
                if isinstance(cls, abc.ABCMeta):
                    yield cls


def register_virtual(cls: type, base: Any) -> None:
    """Register a class as a virtual subclass of an abstract class."""
    base.register(cls)


def _of_copyreg(module: Any, value: Any) -> Iterator[_Registration]:
    if isinstance(value, type) and (reducer := module.dispatch_table.get(value)) is not None:
        yield register_copyreg, (reducer,)


def register_copyreg(cls: type, reducer: Callable[[Any], Any]) -> None:
    """Register how pickle reduces objects of a class."""
    copyreg.pickle(cls, reducer)


def _of_multiprocessing(module: Any, value: Any) -> Iterator[_Registration]:
    table = module.ForkingPickler._extra_reducers
    if isinstance(value, type) and (reducer := table.get(value)) is not None:
        yield register_multiprocessing, (reducer,)


def register_multiprocessing(cls: type, reducer: Callable[[Any], Any]) -> None:
    """Register how multiprocessing reduces objects of a class."""
    reduction.ForkingPickler.register(cls, reducer)


def _of_jax(module: Any, value: Any) -> Iterator[_Registration]:
    if not isinstance(value, type) or (entry := module._registry.get(value)) is None:
        return
    made_by = inspect.getclosurevars(entry.from_iter).nonlocals if _is_jax(entry.from_iter) else {}
    if made_by.get("nodetype") is value:
        # JAX itself flattens dataclasses without a function, so it needs the names of the fields.
        yield register_jax_dataclass, (made_by["data_fields"], made_by["meta_fields"])
        return
    keyed = _keyed_function(module.default_registry, value, entry.to_iter)
    yield register_jax_node, (entry.to_iter, entry.from_iter, keyed)


def _is_jax(function: Any) -> bool:
    return isinstance(function, FunctionType) and function.__module__ == _JAX


def _keyed_function(registry: Any, cls: type, flatten: Callable[[Any], Any]) -> FunctionType | None:
    """Return the function that flattens objects of a class with keys; None if there is none.

    JAX does not return this function, but calls it. So this calls what JAX calls, with an empty
    object, whose flattening usually fails.

    Args:
        registry: JAX's registry of classes.
        cls: the class.
        flatten: the function that flattens without keys, which JAX calls if there is no other one.
    """
    keyed = _first_called(registry.flatten_one_level_with_keys, cls)
    return None if keyed is None or keyed is _first_called(flatten, cls) else keyed


def _first_called(call: Callable[[Any], Any], cls: type) -> FunctionType | None:
    """Return the first function of Python that a call with an empty object of a class runs."""
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

    # A thread has a profile function of its own, so that a profiler of this thread is kept.
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for code, values in calls:
        for function in gc.get_referrers(code):
            if isinstance(function, FunctionType) and _closes_over(function, values):
                return function
    return None


def _closes_over(function: FunctionType, values: Mapping[str, object]) -> bool:
    """Return whether a function has these closure variables: others may have the same code."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return all(name in values and cell.cell_contents is values[name] for name, cell in cells)


def register_jax_dataclass(cls: type, data: tuple[str, ...], meta: tuple[str, ...]) -> None:
    """Register a class for JAX by the names of its fields.

    Args:
        cls: the class, which is usually a dataclass.
        data: fields with arrays.
        meta: fields with static values.
    """
    tree_util = _library("jax.tree_util")
    if not is_jax_node(cls):
        fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
        dropped = {field.name for field in fields if field.init}.difference(data, meta)
        tree_util.register_dataclass(cls, data, meta, drop_fields=tuple(dropped))


def register_jax_node(
    cls: type,
    flatten: Callable[[Any], Any],
    unflatten: Callable[[Any, Any], Any],
    keyed: Callable[[Any], Any] | None,
) -> None:
    """Register a class for JAX as a container, by functions of its objects.

    Args:
        cls: the class.
        flatten, unflatten: as in `jax.tree_util.register_pytree_node`.
        keyed: flattens with keys; None for keys that are numbers.
    """
    tree_util = _library("jax.tree_util")
    if not is_jax_node(cls):
        tree_util.register_pytree_node(cls, flatten, unflatten, keyed)


def is_jax_node(cls: type) -> bool:
    """Return whether a class is registered for JAX as a container."""
    return cls in getattr(sys.modules.get(_JAX), "_registry", ())


def is_torch_node(cls: type) -> bool:
    """Return whether a class is registered for torch as a container."""
    return cls in getattr(sys.modules.get(_TORCH), "SUPPORTED_NODES", ())


def _of_flax(module: Any, value: Any) -> Iterator[_Registration]:
    if isinstance(value, type) and (pair := module._STATE_DICT_REGISTRY.get(value)) is not None:
        yield register_flax, pair


def register_flax(
    cls: type, to_state: Callable[[Any], Any], from_state: Callable[[Any, Any], Any]
) -> None:
    """Register how Flax serializes objects of a class."""
    serialization = _library(_FLAX)
    serialization.register_serialization_state(cls, to_state, from_state, override=True)


def _of_torch(module: Any, value: Any) -> Iterator[_Registration]:
    if not isinstance(value, type) or (node := module.SUPPORTED_NODES.get(value)) is None:
        return
    packages = {_package(base) for base in value.__mro__[1:]} - {"__main__"}
    if _package(node.flatten_fn) in packages:
        return  # a base class registers its subclasses, as in transformers
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
    """Register a class for torch as a container that is empty."""
    pytree = _library(_TORCH)
    if not is_torch_node(cls):
        pytree.register_constant(cls)


def register_torch_node(
    cls: type,
    flatten: Callable[[Any], Any],
    unflatten: Callable[[Any, Any], Any],
    options: Mapping[str, Any],
) -> None:
    """Register a class for torch as a container, as `torch.utils._pytree` has it."""
    pytree = _library(_TORCH)
    if not is_torch_node(cls):
        pytree.register_pytree_node(cls, flatten, unflatten, **options)


def _of_torch_loading(module: Any, value: Any) -> Iterator[_Registration]:
    for one in module.get_safe_globals():
        if one is value:
            yield register_torch_safe, ()
        elif isinstance(one, tuple) and one[0] is value:
            yield register_torch_safe, (one[1],)


def register_torch_safe(value: Any, name: str | None = None) -> None:
    """Let `torch.load` use a class or function, under another name if there is one."""
    _library(_TORCH_LOADING).add_safe_globals([value if name is None else (value, name)])


def _of_keras(module: Any, value: Any) -> Iterator[_Registration]:
    for name, registered in module.get_custom_objects().items():
        if registered is value:
            yield register_keras, (name,)


def register_keras(value: Any, name: str) -> None:
    """Register a class or function for Keras.

    Args:
        value: the class or function.
        name: the name of the registration, which contains ">" if a decorator made it.
    """
    saving = _library(_KERAS)
    package, separator, own = name.rpartition(">")
    if separator:
        saving.register_keras_serializable(package, own)(value)
    else:
        saving.get_custom_objects()[name] = value


_COLLECTORS: Mapping[str, Callable[[Any, Any], Iterator[_Registration]]] = {
    "copyreg": _of_copyreg,
    "multiprocessing.reduction": _of_multiprocessing,
    _JAX: _of_jax,
    _FLAX: _of_flax,
    _TORCH: _of_torch,
    _TORCH_LOADING: _of_torch_loading,
    _KERAS: _of_keras,
}
# Say whether a class has a registration that can be made only once.
_CONTAINERS: Mapping[Callable[..., None], Callable[[type], bool]] = {
    register_jax_dataclass: is_jax_node,
    register_jax_node: is_jax_node,
    register_torch_constant: is_torch_node,
    register_torch_node: is_torch_node,
}
