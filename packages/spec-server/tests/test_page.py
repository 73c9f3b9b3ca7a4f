"""The page in a real Chromium; skipped visibly where none is installed."""

import base64
import hashlib
import shutil

import httpx
import pytest

from spec_server import Server, Settings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update"]  # fmt: skip


SCRIPTS = {"list": "apples, pears and plums, " * 8, "long": "rivers and woods " * 900}


@pytest.fixture(scope="module")
def served(load_script):
    with Server(load_script(SCRIPTS), Settings(port=0)) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser, served):
    """Open the page; every request and every complaint of the browser is noted."""
    contexts = []

    def go(**settings):
        context = browser.new_context(**settings)
        contexts.append(context)
        page = context.new_page()
        page.requested, page.complaints = [], []
        page.on("request", lambda request: page.requested.append(request.url))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("console", lambda m: page.complaints.append(m.text) if m.type == "error" else None)
        page.goto(served.url)
        page.wait_for_selector("#about:has-text('script')")
        return page

    yield go
    for context in contexts:
        context.close()


def test_the_page_is_one_file_with_a_strict_policy(served):
    answer = httpx.get(served.url)
    policy = answer.headers["content-security-policy"]
    assert answer.status_code == 200 and "default-src 'none'" in policy
    for tag in ("script", "style"):
        inside = answer.text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in policy
    assert "unsafe" not in policy and " style=" not in answer.text
    assert "http://" not in answer.text and "https://" not in answer.text
    assert httpx.head(served.url).status_code == 200


@pytest.fixture(scope="module")
def locked(load_script):
    with Server(load_script(SCRIPTS), Settings(port=0, api_key="s3crét")) as running:
        yield running


def test_the_page_asks_for_the_key_and_takes_it_as_a_password(locked):
    for headers in ({}, {"authorization": "Basic !!"}, {"authorization": "Basic czNjcsOpdA=="}):
        refused = httpx.get(locked.url, headers=headers)
        assert refused.status_code == 401 and "s3cr" not in refused.text
        assert refused.headers["www-authenticate"].startswith('Basic realm="spec"')
    for header in ({"x-api-key": "s3crét"}, {"authorization": "Bearer s3crét"}):
        encoded = {name: value.encode() for name, value in header.items()}
        assert httpx.get(locked.url, headers=encoded).status_code == 200
    for wrong in ("", "s3cret", "s3crét "):
        assert httpx.get(locked.url, auth=("me", wrong)).status_code == 401
    assert "<title>" in httpx.get(locked.url, auth=("anybody", "s3crét")).text
    api = httpx.get(f"{locked.url}/v1/models")
    assert api.status_code == 401 and api.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{locked.url}/v1/models", auth=("", "s3crét")).status_code == 200
    assert httpx.get(f"{locked.url}/?key=s3crét").status_code == 401
    foreign = httpx.post(
        f"{locked.url}/v1/completions", auth=("", "s3crét"), json={},
        headers={"origin": "http://evil.example"},
    )  # fmt: skip
    assert foreign.status_code == 403  # a browser would send the password along


@needs_chromium
def test_a_browser_with_the_key_can_chat(browser, locked):
    context = browser.new_context(http_credentials={"username": "me", "password": "s3crét"})
    page = context.new_page()
    page.goto(locked.url)
    page.wait_for_selector("#about:has-text('script')")
    page.fill("#prompt", "say:list;")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=plums")
    context.close()


@needs_chromium
def test_a_chat_streams_coloured_tokens_and_figures(open_page, served):
    page = open_page()
    page.fill("#prompt", "say:list;")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".figures:has-text('cached')")
    spans = page.query_selector_all(".answer span")
    assert len(spans) > 10
    kinds = {span.get_attribute("class") for span in spans}
    assert "target" in kinds and "lookup" in kinds
    text = page.inner_text(".answer")
    assert text.strip() == SCRIPTS["list"].strip()
    page.fill("#prompt", "again say:list;")
    page.click("#send")
    page.wait_for_selector(".turn:nth-child(4) .figures:has-text('cached')")
    page.wait_for_selector("#send:enabled")
    page.click("#fresh")
    assert page.query_selector_all(".turn") == []
    assert all(url.startswith(served.url) or url.startswith("data:") for url in page.requested)
    assert page.complaints == []


@needs_chromium
def test_a_race_ends_in_a_verdict(open_page):
    page = open_page()
    page.fill("#prompt", "say:list;")
    page.click("#race")
    page.wait_for_selector(".verdict", timeout=30_000)
    assert "Identical output" in page.inner_text(".verdict")
    lanes = [lane.inner_text() for lane in page.query_selector_all(".lane")]
    assert lanes[0].startswith("Baseline") and "baseline" in lanes[0].splitlines()[-1]
    assert lanes[1].startswith("Speculation") and "lookup" in lanes[1].splitlines()[-1]
    assert page.complaints == []


@needs_chromium
def test_an_answer_can_be_stopped_and_errors_are_shown(open_page, served):
    page = open_page()
    page.fill("#limit", "4000")
    page.fill("#prompt", "say:long;")
    page.click("#send")
    page.wait_for_selector(".answer span")
    page.click("#stop")
    page.wait_for_selector("#talk:has-text('Stopped.')")
    page.fill("#prompt", "word " * 5000)
    page.click("#send")
    page.wait_for_selector(".error")
    assert "maximum context length" in page.inner_text(".error")


@needs_chromium
@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [320, 1200])
def test_it_fits_narrow_windows_and_reads_in_both_schemes(open_page, scheme, width):
    page = open_page(color_scheme=scheme, viewport={"width": width, "height": 800})
    page.fill("#prompt", "w" * 90 + " say:list;")
    page.click("#race")
    page.wait_for_selector(".verdict", timeout=30_000)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ratios = page.evaluate(
        """() => {
        const lum = (c) => { const v = c.map(x => x / 255).map(
            x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
            return .2126 * v[0] + .7152 * v[1] + .0722 * v[2]; };
        const rgb = (s) => s.match(/[\\d.]+/g).map(Number);
        const back = (e) => { for (; e; e = e.parentElement) {
            const c = rgb(getComputedStyle(e).backgroundColor);
            if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
        return [...document.querySelectorAll('p, span, label, button, h1, h2, .turn')].map(e => {
            const a = lum(rgb(getComputedStyle(e).color).slice(0, 3)), b = lum(back(e));
            return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); }); }"""
    )
    assert min(ratios) >= 4.5, min(ratios)
