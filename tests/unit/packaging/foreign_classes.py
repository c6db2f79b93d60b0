"""Classes that run code while they are created."""

from __future__ import annotations


class Tagging(type):
    pass


class Tagged(metaclass=Tagging):
    pass


class Plugin:
    def __init_subclass__(cls) -> None:
        cls.registered = True  # type: ignore[attr-defined]


class Registered(Plugin):
    pass
