"""Names on the lake."""

from __future__ import annotations

import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.storage.names import file_name, is_model_name, model_name, path_below


def test_names_are_normalised() -> None:
    assert file_name("u\u0308ber.bin") == "über.bin"
    assert path_below("a b/u\u0308") == "a b/ü"
    assert model_name("net-1.0") == "net-1.0"
    assert file_name(".hidden") == ".hidden"


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "a\\b", "a:b", "a#b", "a?b", "a;b", "a\nb", "\x00", "a\x7f", "\udcff"]
    + ["x" * 256, "ü" * 128, None, 7, b"x"],
)
def test_what_would_not_come_back_is_refused(name: object) -> None:
    with pytest.raises(ConfigError, match="tag="):
        file_name(name, "tag")
    with pytest.raises(ConfigError, match="model="):
        model_name(name)


def test_the_longest_name_fits() -> None:
    assert file_name("x" * 255) == "x" * 255


@pytest.mark.parametrize("name", ["_staging", ".x"])
def test_our_own_names_are_no_models(name: str) -> None:
    with pytest.raises(ConfigError, match="reserved for hopsgpu"):
        model_name(name)


@pytest.mark.parametrize(
    "name",
    ["  ", "\u200b", "\ufeff", "\u202egnp", "a\u2028b", "a\u2029", " a", "a ", "\u3000a", "a\xa0"],
)
def test_a_model_has_a_name_that_is_seen(name: str) -> None:
    with pytest.raises(ConfigError, match="invisible characters") as told:
        model_name(name)
    assert ascii(name) in str(told.value)
    assert not is_model_name(name)


def test_what_is_found_by_its_name_may_be_a_model() -> None:
    for name in ("latest", "u\u0308ber", "two words"):
        assert is_model_name(model_name(name))
    for name in ("_own", ".x", "a:b", "a;b", "\udcff", "u\u0308ber"):
        assert not is_model_name(name)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../b", "a//b", "a/", "", None])
def test_paths_stay_inside(path: object) -> None:
    with pytest.raises(ConfigError, match="path="):
        path_below(path)


def test_joiners_within_a_word_are_seen() -> None:
    word = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    assert model_name(word) == word
    for name in (f"{word}\u200c", f"\u200d{word}", "\u200c"):
        with pytest.raises(ConfigError, match="invisible characters"):
            model_name(name)
