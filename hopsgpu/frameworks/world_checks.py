"""Checks in a rank that its frameworks train with all ranks of the gang.

If a framework finds only one rank in a gang of several, each rank trains on a part of the data, and
the run succeeds. Functions that join ranks or start training are therefore wrapped: they raise an
error if the framework's world size differs from the gang's. Default values of Lightning's `devices`
and `num_nodes`, which LightningCLI passes explicitly, are replaced by the gang's.

Only the rank's own process is checked, not processes that it forks.

Sources: distributed_c10d.py and optimizer.py of torch 2.15; `_AcceleratorConnector` and
`_Connector` of Lightning 2.6; `PartialState` of accelerate 1.15; the backends' trainers of Keras
3.15; `Model` of tf-keras 2.21; distributed.py and api.py of JAX 0.10; backprop.py of TensorFlow
2.21.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hopsgpu.core.rank_warnings import warn_run
from hopsgpu.errors import ConfigError
from hopsgpu.frameworks import lightning
from hopsgpu.frameworks.cuda import is_multi_rank_enabled
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

_OPTION = "pass independent_ranks=True to launch()"
_TORCH = (
    "call torch.distributed.init_process_group() without world_size=, as all ranks of the gang do;"
    " make smaller groups with torch.distributed.new_group()"
)
_ACCELERATE = (
    "let accelerate find the ranks by their environment variables; on CPUs pass cpu=True to"
    " PartialState()"
)
_LIGHTNING = "leave out devices=, num_nodes= and strategies for a single device"
_JAX = "pass the gang's world_size and rank, as context() has them"
_JOIN_TORCH = "Call torch.distributed.init_process_group() and use DistributedDataParallel"
_JOIN_JAX = "Call jax.distributed.initialize() with the gang's world_size and rank"
_JOIN_TENSORFLOW = "Train under tf.distribute.MultiWorkerMirroredStrategy"
_KERAS = {
    "tensorflow": (
        "use one rank with several GPUs under MirroredStrategy, Keras 2 (tf_keras) under"
        " MultiWorkerMirroredStrategy, or training steps of your own"
    ),
    "jax": (
        "call jax.distributed.initialize() before Keras is imported, and"
        " keras.distribution.set_distribution() before the model is made"
    ),
    "torch": "write training steps of your own with DistributedDataParallel",
}
_KERAS_TRAINERS = {"tensorflow": "TensorFlowTrainer", "jax": "JAXTrainer", "torch": "TorchTrainer"}
# Lightning's values for "all devices".
_ALL_DEVICES = ("auto", -1, "-1", None)
_ONE_NODE = (1, "1")
# Modules of torch that import `init_process_group` by name.
_TORCH_NAMES = ("torch.distributed", "torch.distributed.device_mesh")


class WorldChecks:
    """The checks of one rank, in a gang of `world_size` ranks.

    Args:
        nccl_conflict: why NCCL does not connect the ranks; "" if it does.
    """

    def __init__(self, world_size: int, nccl_conflict: str = "") -> None:
        self._world_size = world_size
        self._nccl_conflict = nccl_conflict
        self._pid = os.getpid()
        self._is_step_checked = False

    def by_module(self) -> Mapping[str, Callable[[Any], None]]:
        """Return functions that install the checks in a module, by the module's name."""
        lightning_checks = {
            name: install
            for package, fabric in (
                ("lightning.pytorch", "lightning.fabric"),
                ("pytorch_lightning", "lightning_fabric"),
            )
            for name, install in {
                f"{package}.trainer.connectors.accelerator_connector": self._wrap_connector,
                f"{package}.trainer.trainer": self._wrap_trainer,
                f"{fabric}.connector": self._wrap_connector,
                f"{fabric}.fabric": self._wrap_fabric,
            }.items()
        }
        keras = {
            f"keras.src.backend.{backend}.trainer": functools.partial(
                self._wrap_keras, name, backend
            )
            for backend, name in _KERAS_TRAINERS.items()
        }
        installs: dict[str, Callable[[Any], None]] = {
            "torch.distributed.distributed_c10d": self._wrap_init_process_group,
            "torch.optim.optimizer": self._add_step_hook,
            "accelerate.state": self._wrap_partial_state,
            "jax._src.distributed": self._wrap_jax,
            "jax._src.api": self._wrap_value_and_grad,
            "tensorflow.python.eager.backprop": self._wrap_gradient_tape,
            "tf_keras.src.engine.training": functools.partial(
                self._wrap_keras, "Model", "tensorflow"
            ),
            **lightning_checks,
            **keras,
        }
        return {
            name: functools.partial(_install, name, install) for name, install in installs.items()
        }

    def _is_rank(self) -> bool:
        return os.getpid() == self._pid

    def _check_size(self, reported: int, framework: str, remedy: str) -> None:
        if reported != self._world_size and self._is_rank():
            raise ConfigError(
                f"{framework} would train with {count_of(reported, 'rank')}, but the gang has"
                f" {self._world_size}: {remedy}. If each rank should train by itself, {_OPTION}"
            )

    def _wrap_init_process_group(self, c10d: Any) -> None:
        original = c10d.init_process_group
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            # Check before the call: a group that is too large would wait for missing ranks.
            if (size := _requested_size(signature, args, kwargs)) is not None:
                self._check_size(size, "torch.distributed", _TORCH)
            backend = _arguments(signature, args, kwargs).get("backend")
            is_conflict = bool(self._nccl_conflict) and not is_multi_rank_enabled(os.environ)
            if is_conflict and self._is_rank() and _uses_nccl(backend):
                raise ConfigError(self._nccl_conflict)
            group = original(*args, **kwargs)
            self._check_size(c10d.get_world_size(), "torch.distributed", _TORCH)
            return group

        _replace(c10d, "init_process_group", init_process_group, _TORCH_NAMES)

    def _add_step_hook(self, module: Any) -> None:
        torch = module.torch

        def on_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            # A compiled step must not contain the check.
            if torch.compiler.is_compiling() or self._is_step_checked or not self._is_rank():
                return
            self._is_step_checked = True
            group = torch.distributed
            if group.is_available() and group.is_initialized():
                self._check_size(group.get_world_size(), "torch.distributed", _TORCH)
            else:
                self._warn("an optimizer of torch made a step", _JOIN_TORCH)

        module.register_optimizer_step_post_hook(on_step)

    def _warn(self, event: str, remedy: str) -> None:
        warn_run(
            f"each rank trains by itself: {event}, but the {self._world_size} ranks of the"
            f" gang are not connected. {remedy}; if each rank should train by itself, {_OPTION}"
        )

    def _wrap_value_and_grad(self, api: Any) -> None:
        original = api.value_and_grad

        @functools.wraps(original)
        def value_and_grad(*args: Any, **kwargs: Any) -> Any:
            function = original(*args, **kwargs)

            @functools.wraps(function)
            def call(*inputs: Any, **options: Any) -> Any:
                state = sys.modules["jax._src.distributed"].global_state
                self._warn_if_alone("JAX", lambda: state.num_processes or 1, _JOIN_JAX)
                return function(*inputs, **options)

            return call

        # jax.grad() calls this function too.
        _replace(api, "value_and_grad", value_and_grad, ("jax",))

    def _wrap_gradient_tape(self, backprop: Any) -> None:
        def check(_tape: Any) -> None:
            distribution = sys.modules["tensorflow.python.distribute.distribute_lib"]
            self._warn_if_alone(
                "TensorFlow",
                lambda: _tensorflow_world_size(distribution.get_strategy()),
                _JOIN_TENSORFLOW,
            )

        _call_before(backprop.GradientTape, "gradient", check)

    def _warn_if_alone(self, framework: str, measure: Callable[[], int], remedy: str) -> None:
        """Warn if the first gradient is computed in a world of one rank."""
        if self._is_step_checked or not self._is_rank():
            return
        self._is_step_checked = True
        if measure() == 1:
            self._warn(f"{framework} computed a gradient", remedy)

    def _wrap_partial_state(self, state: Any) -> None:
        original = state.PartialState.__init__

        @functools.wraps(original)
        def initialize(partial: Any, *args: Any, **kwargs: Any) -> None:
            original(partial, *args, **kwargs)
            self._check_size(partial.num_processes, "accelerate", _ACCELERATE)

        state.PartialState.__init__ = initialize

    def _wrap_connector(self, module: Any) -> None:
        connector = getattr(module, "_AcceleratorConnector", None) or module._Connector
        original = connector.__init__
        signature = inspect.signature(original)

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> None:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            if call.arguments["devices"] in _ALL_DEVICES and self._is_rank():
                # `lightning.environment` has computed both for this rank.
                call.arguments["devices"] = int(os.environ[lightning.DEVICES])
                if call.arguments["num_nodes"] in _ONE_NODE:
                    call.arguments["num_nodes"] = int(os.environ[lightning.NUM_NODES])
            original(*call.args, **call.kwargs)

        connector.__init__ = initialize

    def _wrap_trainer(self, module: Any) -> None:
        # Tests and predictions are not checked: Lightning advises one device for them.
        check = functools.partial(self._check_lightning, "Lightning's Trainer")
        _call_before(module.Trainer, "fit", check)

    def _wrap_fabric(self, module: Any) -> None:
        check = functools.partial(self._check_lightning, "Lightning's Fabric")
        _call_before(module.Fabric, "setup", check)
        _call_before(module.Fabric, "setup_optimizers", check)

    def _check_lightning(self, name: str, loop: Any) -> None:
        self._check_size(loop.world_size, name, _LIGHTNING)

    def _wrap_keras(self, class_name: str, backend: str, module: Any) -> None:
        def check(model: Any) -> None:
            size = _keras_world_size(backend, model)
            self._check_size(size, f"Keras on {backend}", _KERAS[backend])

        _call_before(getattr(module, class_name), "fit", check)
        _call_before(getattr(module, class_name), "train_on_batch", check)

    def _wrap_jax(self, distributed: Any) -> None:
        original = distributed.initialize
        signature = inspect.signature(original)

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> None:
            # Check before the call: a world that is too large would wait for missing ranks.
            size = _arguments(signature, args, kwargs).get("num_processes")
            if isinstance(size, int):
                self._check_size(size, "jax.distributed", _JAX)
            original(*args, **kwargs)
            self._check_size(distributed.global_state.num_processes, "jax.distributed", _JAX)

        _replace(distributed, "initialize", initialize, ("jax.distributed",))


def _install(name: str, install: Callable[[Any], None], module: Any) -> None:
    try:
        install(module)
    except AttributeError as error:
        # Another version of the framework: the training may still work.
        log.warning("the world size is not checked in this version of %s: %s", name, error)


def _replace(module: Any, name: str, function: Any, importers: tuple[str, ...]) -> None:
    """Replace a function in its module and in modules that have imported the function by name."""
    original = getattr(module, name)
    for holder in (module, *(sys.modules.get(importer) for importer in importers)):
        if getattr(holder, name, None) is original:
            setattr(holder, name, function)


def _call_before(kind: type, name: str, check: Callable[[Any], None]) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        check(owner)
        return original(owner, *args, **kwargs)

    setattr(kind, name, call)


def _arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return a call's arguments by name; empty if the call itself will refuse them."""
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError:
        return {}


def _requested_size(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int | None:
    """Return the world size that a call of `init_process_group` requests; None if unknown."""
    arguments = _arguments(signature, args, kwargs)
    size = arguments.get("world_size")
    if isinstance(size, int) and size > 0:
        return size
    url = arguments.get("init_method")
    queried = parse_qs(urlsplit(url).query).get("world_size") if isinstance(url, str) else None
    is_from_environment = url is None or str(url).startswith("env:")
    if queried is None and is_from_environment and arguments.get("store") is None:
        queried = [os.environ.get("WORLD_SIZE", "")]
    return int(queried[-1]) if queried and queried[-1].isdecimal() else None


def _uses_nccl(backend: object) -> bool:
    """Return whether a backend of torch.distributed is NCCL, which is torch's default for GPUs."""
    if backend is None:
        return bool(sys.modules["torch"].cuda.is_available())
    return "nccl" in str(backend).lower()


def _keras_world_size(backend: str, model: Any) -> int:
    if backend == "tensorflow":
        return _tensorflow_world_size(model.distribute_strategy)
    if backend == "jax":
        if sys.modules["keras.src.distribution.distribution_lib"].distribution() is None:
            return 1
        return int(sys.modules["jax"].process_count())
    group = sys.modules["torch"].distributed
    trainer = sys.modules["keras.src.backend.torch.trainer"].TorchTrainer
    # Keras never exchanges gradients between ranks; the user's own train_step can.
    if type(model).train_step is trainer.train_step:
        return 1
    return group.get_world_size() if group.is_available() and group.is_initialized() else 1


def _tensorflow_world_size(strategy: Any) -> int:
    resolver = getattr(strategy, "cluster_resolver", None)
    tasks = {} if resolver is None else resolver.cluster_spec().as_dict()
    return max(sum(len(tasks.get(kind, ())) for kind in ("chief", "worker")), 1)
