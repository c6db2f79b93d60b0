"""A script that registers its classes and functions in libraries: its ranks have that too.

Run as `python registered.py LIBRARY`.
"""

from __future__ import annotations

import abc
import collections.abc
import copyreg
import dataclasses
import functools
import io
import json
import os
import pickle
import sys
import tempfile
import traceback
import typing
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
LIBRARY = sys.argv[1]
CASES: list[Callable[[], Any]] = []


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES.append(function)
    return function


def paths(tree: Any) -> str:
    return str(jax.tree_util.tree_leaves_with_path(tree))


if LIBRARY == "jax":
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def clip(x: Any) -> Any:
        return x

    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def apply(f: Any, x: Any) -> Any:
        return f(x)

    def apply_forward(f: Any, x: Any) -> Any:
        return f(x), x

    def apply_backward(f: Any, x: Any, g: Any) -> Any:
        return (g * 2,)

    apply.defvjp(apply_forward, apply_backward, optimize_remat=True)

    @jax.custom_vjp
    def recursive(x: Any, n: int) -> Any:
        return x if n == 0 else recursive(x, n - 1)

    recursive.defvjp(
        lambda x, n: (recursive(x.value, n.value), None),
        lambda _, g: (g * 6, None),
        symbolic_zeros=True,
    )

    @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
    def power(x: Any, n: int) -> Any:
        return x if n < 2 else power(x, n - 1) * x

    @power.defjvp
    def _(n: int, primals: Any, tangents: Any) -> Any:
        return power(primals[0], n), 7.0 * tangents[0]

    @jax.custom_jvp
    def product(x: Any, y: Any) -> Any:
        return x * y

    product.defjvps(lambda t, out, x, y: t * 3, None)
    jitted = jax.jit(clip)
    clip_of_nothing = functools.partial(jitted)

    @jax.jit
    @jax.custom_vjp
    def inside(x: Any) -> Any:
        return x

    inside.__wrapped__.defvjp(lambda x: (x, None), lambda _, g: (g * 4,))

    @jax.tree_util.register_pytree_node_class
    class State:
        def __init__(self, w: Any, n: int) -> None:
            self.w, self.n = w, n

        def tree_flatten(self) -> Any:
            return (self.w,), self.n

        @classmethod
        def tree_unflatten(cls, n: int, children: Any) -> State:
            return cls(children[0], n)

    class Node:
        def __init__(self, w: Any) -> None:
            self.w = w

    jax.tree_util.register_pytree_node(Node, lambda n: ((n.w,), None), lambda _, c: Node(*c))

    class Keyed:
        def __init__(self, w: Any) -> None:
            self.w = w

    jax.tree_util.register_pytree_with_keys(
        Keyed, lambda k: ((("key", k.w),), None), lambda _, c: Keyed(*c)
    )

    class Twice:
        def __init__(self, w: Any) -> None:
            self.w = w

    jax.tree_util.register_pytree_with_keys(
        Twice,
        lambda t: (((jax.tree_util.GetAttrKey("w"), t.w),), None),
        lambda _, c: Twice(*c),
        lambda t: ((t.w,), None),
    )

    def registered_as(name: str) -> type:
        class Named(Keyed):
            pass

        jax.tree_util.register_pytree_with_keys(
            Named, lambda k: (((name, k.w),), None), lambda _, c: Named(*c), lambda k: ((k.w,), 1)
        )
        return Named

    First, Second = registered_as("first"), registered_as("second")

    @jax.tree_util.register_pytree_with_keys_class
    class KeyedClass:
        def __init__(self, w: Any) -> None:
            self.w = w

        def tree_flatten_with_keys(self) -> Any:
            return ((jax.tree_util.GetAttrKey("w"), self.w),), None

        @classmethod
        def tree_unflatten(cls, _: None, children: Any) -> KeyedClass:
            return cls(*children)

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Params:
        w: Any
        n: int = dataclasses.field(default=3, metadata={"static": True})

    @jax.tree_util.register_static
    class Name(str):
        pass

    class Registering:
        """As in Flax, a subclass is registered while it is created."""

        def __init_subclass__(cls) -> None:
            made = dataclasses.dataclass(cls)
            names = [field.name for field in dataclasses.fields(made)]
            jax.tree_util.register_dataclass(made, names, [])

    class Child(Registering):
        w: Any

    KINDS = (Node, Keyed, Twice, First, Second, KeyedClass, Params, Child)

    def gradient(function: Callable[..., Any], *args: Any) -> float:
        return float(jax.grad(function)(*args))

    @case
    def custom_vjp() -> Any:
        of_apply = functools.partial(apply, jnp.sin)
        return gradient(lambda x: clip(x) * 5, 2.0), gradient(of_apply, 2.0)

    @case
    def custom_vjp_that_refers_to_itself() -> Any:
        return gradient(lambda x: recursive(x, 2), 2.0)

    @case
    def custom_jvp() -> Any:
        return gradient(lambda x: power(x, 3), 2.0), gradient(product, 2.0, 3.0)

    @case
    def nested() -> Any:
        return gradient(lambda x: clip_of_nothing(x) * 5, 2.0), gradient(inside, 2.0)

    @case
    def containers() -> Any:
        return [paths(kind(1.0)) for kind in KINDS]

    @case
    def container_class() -> Any:
        state = jax.jit(lambda state: State(state.w + 1, state.n))(State(jnp.zeros(2), 3))
        return float(state.w.sum()), state.n, paths(State(1.0, 2))

    @case
    def static() -> Any:
        return jax.tree_util.tree_leaves(Name("name"))


if LIBRARY == "torch":
    import torch
    from torch.utils import _pytree

    class Pair:
        def __init__(self, w: Any) -> None:
            self.w = w

    _pytree.register_pytree_node(
        Pair, lambda p: ([p.w], None), lambda c, _: Pair(*c), serialized_type_name="script.Pair"
    )

    class Constant:
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 1

    _pytree.register_constant(Constant)

    @dataclasses.dataclass
    class Config:
        rate: float = 0.1

    torch.serialization.add_safe_globals([Config])

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * 5

    @case
    def containers() -> Any:
        return _pytree.tree_leaves(Pair(1)), len(_pytree.tree_leaves(Constant()))

    @case
    def names_of_containers() -> Any:
        return "script.Pair" in _pytree.treespec_dumps(_pytree.tree_structure(Pair(1)))

    @case
    def weights_only() -> Any:
        file = io.BytesIO()
        torch.save(Config(0.5), file)
        file.seek(0)
        return torch.load(file, weights_only=True).rate

    @case
    def gradient() -> Any:
        x = torch.tensor(2.0, requires_grad=True)
        Square.apply(x).backward()
        return float(typing.cast(Any, x.grad))

    @case
    def operators() -> Any:
        return torch.ops.aten.add(torch.ones(1), 1).tolist()


if LIBRARY == "keras":
    import keras

    @keras.saving.register_keras_serializable(package="script", name="Doubled")
    class Double(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x * 2

    @keras.saving.register_keras_serializable()
    def bent(x: Any) -> Any:
        return keras.ops.relu(x)

    keras.saving.get_custom_objects()["plain"] = bent

    @case
    def names() -> Any:
        return keras.saving.get_registered_name(Double), keras.saving.get_registered_name(bent)

    @case
    def saved() -> Any:
        model = keras.Sequential([keras.Input((1,)), Double(), keras.layers.Activation(bent)])
        with tempfile.TemporaryDirectory() as directory:
            model.save(f"{directory}/model.keras")
            return len(keras.saving.load_model(f"{directory}/model.keras").layers)

    @case
    def other_objects() -> Any:
        return keras.saving.get_custom_objects()["plain"] is bent


if LIBRARY == "python":

    class Counter:
        def __init__(self, value: int) -> None:
            self.value = value

    copyreg.pickle(Counter, lambda counter: (Counter, (counter.value + 1,)))  # type: ignore[arg-type]

    class Sent:
        value = 1

    def received() -> str:
        return "received"

    reduction.ForkingPickler.register(Sent, lambda sent: (received, ()))  # type: ignore[arg-type]

    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self) -> int: ...

    @Shape.register
    @collections.abc.Sequence.register
    class Square:
        """A virtual subclass of a class of the script, and of one of Python."""

    class Named:
        names: typing.ClassVar[dict[str, Named]] = {}

        def __new__(cls, name: str) -> Named:
            return cls.names.setdefault(name, super().__new__(cls))

    class Values(list[int]):
        def __new__(cls, values: Any) -> Values:
            return super().__new__(cls)

    named, values = Named("a"), Values([1, 2])
    named.value = 3  # type: ignore[attr-defined]

    @case
    def copies() -> Any:
        return pickle.loads(pickle.dumps(Counter(1))).value

    @case
    def sent() -> Any:
        return pickle.loads(reduction.ForkingPickler.dumps(Sent()))

    @case
    def virtual_subclasses() -> Any:
        return isinstance(Square(), Shape), isinstance(Square(), collections.abc.Sequence)

    @case
    def objects_made_with_arguments() -> Any:
        return named.value, list(values)  # type: ignore[attr-defined]


def train() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in CASES:
        try:
            found[one.__name__] = one()
        except Exception:  # noqa: BLE001 - the test shows it
            found[one.__name__] = traceback.format_exc()
    return found


def returned() -> Any:
    @jax.tree_util.register_pytree_node_class
    class Inner(State):
        pass

    return [State(1.0, 2), Inner(3.0, 4)]


if __name__ == "__main__":
    from tests.unit.script_ranks import drive

    here = train()
    back = [paths(one) for one in drive(returned, hidden=False)] if LIBRARY == "jax" else []
    print(json.dumps({"here": here, "there": drive(train), "back": back}, default=str))
