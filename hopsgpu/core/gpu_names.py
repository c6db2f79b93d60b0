"""Product names of GPUs and MIG devices, and the types that they are. Pure.

A MIG device has the name of its GPU, "MIG", and its profile: "NVIDIA A100-SXM4-80GB MIG 1g.10gb"
has one of the GPU's seven compute slices and 10 GB of its memory. (NVIDIA, "MIG User Guide",
"MIG Device Names".)

This module also runs on the nodes, without hopsgpu installed, with Python 3.6 or later.
"""

import itertools
import re
from typing import Iterator, List, Sequence

# Profiles that NVIDIA documents for A30, A100, H100, H200, B200, GB200 and RTX PRO. A node prefers
# MIG devices of a listed profile. For another profile, the driver parks the executors that got MIG
# devices of other ones.
MIG_PROFILES = (
    *("1g.5gb", "1g.6gb", "1g.8gb", "1g.10gb", "1g.11gb", "1g.12gb", "1g.16gb", "1g.18gb"),
    *("1g.20gb", "1g.22gb", "1g.23gb", "1g.24gb", "1g.35gb", "1g.45gb", "1g.47gb"),
    *("2g.8gb", "2g.10gb", "2g.12gb", "2g.16gb", "2g.20gb", "2g.22gb", "2g.24gb", "2g.32gb"),
    *("2g.35gb", "2g.45gb", "2g.47gb", "2g.48gb"),
    *("3g.20gb", "3g.40gb", "3g.46gb", "3g.47gb", "3g.48gb", "3g.71gb", "3g.90gb", "3g.93gb"),
    *("3g.95gb",),
    *("4g.20gb", "4g.24gb", "4g.40gb", "4g.46gb", "4g.47gb", "4g.48gb", "4g.71gb", "4g.90gb"),
    *("4g.93gb", "4g.95gb", "4g.96gb"),
    *("7g.40gb", "7g.80gb", "7g.93gb", "7g.94gb", "7g.96gb", "7g.141gb", "7g.180gb", "7g.186gb"),
    *("7g.189gb",),
)
_WORD = re.compile(r"[^\W_]+")
_MIG = "mig"
# The first word of a profile, and that of a part of a MIG device's compute slices (1c.2g.10gb).
_SLICES = re.compile(r"\dg")
_PART = re.compile(r"\dc")
_MEMORY = re.compile(r"\d+gb")


def has_type(model: str, gpu_type: str) -> bool:
    """Return whether a product name has the words of a type, in their order and in any case.

    "NVIDIA A100-SXM4-40GB" is an "A100", an "a100-sxm4" and an "A100 40GB", and a "GeForce RTX
    3090" is an "RTX3090"; "NVIDIA RTX A1000" is not an "A100". "1g.10gb" and "A100 1g.10gb" are
    types of MIG devices, which have no other types: they are smaller than the GPU that they name.
    """
    words, wanted = words_of(model), words_of(gpu_type)
    is_smaller = _is_slice(words) and not _is_slice(wanted)
    is_part = any(map(_PART.fullmatch, words)) and not any(map(_PART.fullmatch, wanted))
    if not wanted or is_smaller or is_part:
        return False
    remaining = iter(words)
    return all(word in remaining for word in wanted) or "".join(wanted) in _runs(words)


def may_have_type(model: str, gpu_type: str) -> bool:
    """Return whether a product name is of a type as far as the name says.

    The name of a MIG device may lack its profile: NVIDIA's wrappers for YARN add only "(MIG)".
    """
    words, wanted = words_of(model), words_of(gpu_type)
    if _MIG not in words or _profile(words) or not _is_slice(wanted):
        return has_type(model, gpu_type)
    profile = _profile(wanted)
    product = [word for word in wanted if word not in profile and word != _MIG]
    return has_type(model, " ".join([*product, _MIG]))


def is_slice(name: str) -> bool:
    """Return whether a product name, or a type, is that of a MIG device."""
    return _is_slice(words_of(name))


def profile_of(name: str) -> str:
    """Return the profile of MIG devices that a name has, such as "1g.10gb"; "" without one."""
    return ".".join(_profile(words_of(name)))


def words_of(name: str) -> List[str]:
    return _WORD.findall(name.casefold())


def _is_slice(words: Sequence[str]) -> bool:
    return _MIG in words or bool(_profile(words))


def _profile(words: Sequence[str]) -> List[str]:
    """Return the words of a profile; empty without one."""
    for index, word in enumerate(words):
        if _SLICES.fullmatch(word):
            rest = itertools.takewhile(_MEMORY.fullmatch, words[index + 1 : index + 2])
            return [word, *rest]
    return []


def _runs(words: Sequence[str]) -> Iterator[str]:
    """Yield every sequence of consecutive words, written as one word."""
    for begin, end in itertools.combinations(range(len(words) + 1), 2):
        yield "".join(words[begin:end])
