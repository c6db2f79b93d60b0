"""Who gets in: the token, the cookie, the names of the server, and where a request comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from hopsgpu.core.host_header import host_of
from hopsgpu.web.access import Server, field_of
from tests.unit.records import put_run
from tests.unit.web.site import HOST, KNOWN, browser, sources_of

RUN = "fit-20261122-201502-3fa1c0"
PATHS = ("/", "/queue", "/runs", "/models", "/usage", "/static/page.js", "/no-such-page")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put_run(tmp_path / "lake" / "hopsgpu", RUN, "running")
    return tmp_path / "lake" / "hopsgpu"


def cancels(client: TestClient, headers: dict[str, str], form: str = KNOWN.form) -> int:
    answer = client.post(f"/runs/lake/{RUN}/cancel", data={"form": form}, headers=headers)
    return answer.status_code


def was_asked(root: Path) -> bool:
    return (root / "runs" / RUN / "cancel").exists()


@pytest.mark.parametrize("path", PATHS)
def test_nobody_gets_in_without_the_token(root: Path, path: str) -> None:
    answer = browser(sources_of(root), known=False).get(path)
    assert answer.status_code == 401
    assert "hopsgpu web" in answer.text and RUN not in answer.text


@pytest.mark.parametrize(
    "token", ["", "the-toke", "the-token2", "the-session", "\u00e4", "x" * 5000]
)
def test_a_wrong_token_gives_no_cookie(root: Path, token: str) -> None:
    client = browser(sources_of(root), known=False)
    answer = client.get("/", params={"token": token})
    assert answer.status_code == 401 and "set-cookie" not in answer.headers
    assert client.get("/").status_code == 401


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(root: Path) -> None:
    client = browser(sources_of(root), known=False)
    answer = client.get("/?token=the-token")
    assert (answer.status_code, answer.headers["location"]) == (303, "./")
    cookie = answer.headers["set-cookie"]
    assert cookie == "hopsgpu-web-8420=the-session; HttpOnly; SameSite=Strict"
    assert KNOWN.token not in cookie
    page = client.get("/")
    assert page.status_code == 200
    assert KNOWN.token not in page.text and KNOWN.session not in page.text


def test_with_tls_the_cookie_is_only_for_tls(root: Path) -> None:
    client = browser(sources_of(root), Server(8420, has_tls=True), known=False)
    assert client.get("/?token=the-token").headers["set-cookie"].endswith("; Secure")


def test_a_token_counts_nowhere_else_than_at_the_root(root: Path) -> None:
    assert browser(sources_of(root), known=False).get("/runs?token=the-token").status_code == 401


def test_cookies_of_others_do_not_hide_ours(root: Path) -> None:
    client = browser(sources_of(root), known=False)
    cookie = 'a="b; [weird]=1; hopsgpu-web-8420=the-session; x=y'
    assert client.get("/", headers={"Cookie": cookie}).status_code == 200
    other = "hopsgpu-web-8421=the-session"
    assert client.get("/", headers={"Cookie": other}).status_code == 401


@pytest.mark.parametrize("path", [*PATHS, f"/runs/lake/{RUN}", "/runs/lake/none"])
@pytest.mark.parametrize("known", [True, False])
def test_every_answer_forbids_what_others_could_put_in(root: Path, path: str, known: bool) -> None:
    headers = browser(sources_of(root), known=known).get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["x-frame-options"] == "DENY"
    assert ("no-store" in headers["cache-control"]) == (not path.startswith("/static/"))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8420", 200),
        ("localhost:9999", 200),  # the other end of `ssh -L`
        ("[::1]:8420", 200),
        ("10.1.2.3:8420", 200),  # nobody points an address elsewhere
        ("gateway:8420", 200),
        ("Hub.Example.org", 200),
        ("evil.example.com:8420", 403),
        ("127.0.0.1.evil.example.com", 403),
        ("localhost.evil.example.com", 403),
        ("", 403),
        ("[", 403),
    ],
)
def test_a_name_that_others_point_here_is_refused(root: Path, host: str, status: int) -> None:
    server = Server(8420, ("gateway", "hub.example.org"), ("hub.example.org",))
    answer = browser(sources_of(root), server).get("/", headers={"Host": host})
    assert answer.status_code == status
    token = browser(sources_of(root), server, known=False).get(
        "/?token=the-token", headers={"Host": host}
    )
    assert ("set-cookie" in token.headers) == (status == 200)


def test_a_page_of_the_server_cancels(root: Path) -> None:
    client = browser(sources_of(root))
    answer = client.post(
        f"/runs/lake/{RUN}/cancel", data={"form": KNOWN.form}, headers={"Origin": HOST}
    )
    assert (answer.status_code, answer.headers["location"]) == (303, f"../{RUN}")
    assert was_asked(root)
    assert "its driver is asked to cancel it" in client.get(f"/runs/lake/{RUN}").text


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "null"},
        {"Origin": "https://evil.example.com"},
        {"Origin": "http://127.0.0.1:9999"},  # another server of this machine
        {"Origin": "http://localhost:8420"},
        {"Origin": "file://127.0.0.1:8420"},
        {"Origin": "http://[127.0.0.1:8420"},
        {"Origin": HOST, "Sec-Fetch-Site": "cross-site"},
        {"Origin": HOST, "Sec-Fetch-Site": "same-site"},
    ],
)
def test_what_comes_from_elsewhere_cancels_nothing(root: Path, headers: dict[str, str]) -> None:
    assert cancels(browser(sources_of(root)), headers) == 403
    assert not was_asked(root)


@pytest.mark.parametrize("form", ["", "the-for", "the-token", "x" * 5000])
def test_a_form_without_its_secret_cancels_nothing(root: Path, form: str) -> None:
    assert cancels(browser(sources_of(root)), {"Origin": HOST}, form) == 403
    assert not was_asked(root)


def test_reading_cancels_nothing(root: Path) -> None:
    client = browser(sources_of(root))
    assert client.get(f"/runs/lake/{RUN}/cancel?form={KNOWN.form}").status_code == 405
    assert client.post("/runs", headers={"Origin": HOST}).status_code == 405
    assert cancels(browser(sources_of(root), known=False), {"Origin": HOST}) == 401
    assert not was_asked(root)


def test_behind_a_proxy_the_pages_have_its_name(root: Path) -> None:
    server = Server(8420, ("hub.example.org",), ("hub.example.org",))
    headers = {"Origin": "https://hub.example.org", "Host": "127.0.0.1:8420"}
    assert cancels(browser(sources_of(root), server), headers) == 303
    assert cancels(browser(sources_of(root), Server(8420)), headers) == 403


def test_secrets_are_long_and_not_shown() -> None:
    from hopsgpu.web.access import Secrets

    one, other = Secrets.fresh(), Secrets.fresh()
    texts = [one.token, one.session, one.form, other.token, other.session, other.form]
    assert len(set(texts)) == 6 and min(map(len, texts)) >= 43
    assert not any(text in repr(one) for text in texts)


def test_fields_of_odd_forms() -> None:
    assert field_of(b"form=a&form=b", "form") == "a"
    assert field_of(b"&&=&form", "form") == ""
    assert field_of(b"&".join(b"a=1" for _ in range(1000)), "a") == ""
    assert field_of(b"\xff\xfe=%zz", "form") == ""
    assert host_of("[") == "" and host_of("A:1") == "a"
