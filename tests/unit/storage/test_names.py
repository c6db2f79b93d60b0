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
def test_invalid_names_are_refused(name: object) -> None:
    with pytest.raises(ConfigError, match="tag="):
        file_name(name, "tag")
    with pytest.raises(ConfigError, match="model="):
        model_name(name)


def test_longest_name_is_accepted() -> None:
    assert file_name("x" * 255) == "x" * 255


@pytest.mark.parametrize("name", ["_staging", ".x"])
def test_reserved_names_are_no_models(name: str) -> None:
    with pytest.raises(ConfigError, match="reserved"):
        model_name(name)


@pytest.mark.parametrize(
    "name",
    ["  ", "\u200b", "\ufeff", "\u202egnp", "a\u2028b", "a\u2029", " a", "a ", "\u3000a", "a\xa0"],
)
def test_model_name_with_invisible_characters_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="invisible") as raised:
        model_name(name)
    assert ascii(name) in str(raised.value)
    assert not is_model_name(name)


def test_valid_names_may_be_models() -> None:
    for name in ("latest", "u\u0308ber", "two words"):
        assert is_model_name(model_name(name))
    for name in ("_own", ".x", "a:b", "a;b", "\udcff", "u\u0308ber"):
        assert not is_model_name(name)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../b", "a//b", "a/", "", None])
def test_paths_stay_inside(path: object) -> None:
    with pytest.raises(ConfigError, match="path="):
        path_below(path)


def test_joiners_are_accepted_within_a_word() -> None:
    word = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    assert model_name(word) == word
    for name in (f"{word}\u200c", f"\u200d{word}", "\u200c"):
        with pytest.raises(ConfigError, match="invisible"):
            model_name(name)
