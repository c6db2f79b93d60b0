"""A script whose functions branch on tensors, for which AutoGraph reads their sources."""

from __future__ import annotations

import json
import traceback

import tensorflow as tf


def magnitude(x):  # type: ignore[no-untyped-def]
    if tf.reduce_sum(x) < 0:
        return -x
    return x


@tf.function  # type: ignore[untyped-decorator]
def counted(n):  # type: ignore[no-untyped-def]
    total = tf.constant(0)
    for i in tf.range(n):
        if i > 1:
            total += i
    return total


def compiles_a_function() -> None:
    assert tf.function(magnitude)(tf.constant([-1.0])).numpy()[0] == 1


def has_a_compiled_function() -> None:
    assert counted(tf.constant(4)).numpy() == 5


def maps_a_dataset() -> None:
    mapped = tf.data.Dataset.range(3).map(lambda x: x + 1 if x > 1 else x)
    assert list(mapped.as_numpy_iterator()) == [0, 1, 3]


def train() -> dict[str, str]:
    failed = {}
    for case in (compiles_a_function, has_a_compiled_function, maps_a_dataset):
        try:
            case()
        except BaseException:  # noqa: BLE001 - told, whatever it is
            failed[case.__name__] = traceback.format_exc()
    return failed


if __name__ == "__main__":
    from tests.unit.script_ranks import drive

    print(json.dumps(drive(train)))
