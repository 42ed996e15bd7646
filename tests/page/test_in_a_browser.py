"""The page in a real browser: drawn, quiet, readable, whatever it is given and however it is looked at."""

import contextlib
import subprocess
import sys

import pytest

pytest.importorskip("plotly", reason="the page is an extra: pip install fastguard[report]")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install fastguard[browser]")

from fastguard.page import build_page  # noqa: E402

measuring = pytest.importorskip(
    "benchmarks.page", reason="the benchmarks are not beside these tests", exc_type=ImportError
)
BROWSER, FLAGS, write_log = measuring.BROWSER, measuring.FLAGS, measuring.write_log

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium"),
]
HOSTILE = [
    "</script><script>document.title='PWNED'</script>",
    "<!--<script>",
    '"><img src=x onerror=document.title="PWNED">',
    "{{ 7 * 7 }}",
    "a\u202eb\u2028c\x00\x1b]0;x\x07",
    "\ud800",
    "__proto__",
    "constructor",
    "NaN",
    "&lt;",
    "x" * 5000,
    "",
]
# What stands between a text and what is behind it; every text of the page that can be seen.
CONTRASTS = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => {
    const v = c[i] / 255;
    return sum + w * (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  }, 0);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, at = node.parentElement;
    if (!node.textContent.trim() || !at.checkVisibility() || at.closest("script, title, svg title")) continue;
    let behind = at;
    while (behind && (parse(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
    const style = getComputedStyle(at), isSvg = at instanceof SVGElement;
    const front = parse(isSvg ? style.fill : style.color);
    const back = behind ? parse(getComputedStyle(behind).backgroundColor) : [255, 255, 255];
    const [a, b] = [light(front), light(back)];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.textContent.trim().slice(0, 40)]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A run of a thousand steps, one with hostile names, one of a hundred thousand steps."""
    folder = tmp_path_factory.mktemp("pages")
    plain = write_log(folder / "plain.jsonl", 1000, 24)
    long = write_log(folder / "long.jsonl", 100_000, 300)
    text = plain.read_text()
    for place, name in enumerate(HOSTILE):
        spelled = '"' + "".join(f"\\u{ord(c):04x}" if c < " " or c > "~" or c in '"\\' else c for c in name) + '"'
        text = text.replace(f'"layers.{place // 8}.block.{place % 8}.weight"', spelled)
    hostile = folder / "hostile.jsonl"
    hostile.write_text(text)
    sources = {"plain": plain, "hostile": hostile, "long": long}
    made = {}
    for name, source in sources.items():
        made[name] = folder / f"{name}.html"
        made[name].write_text(build_page(source, title=HOSTILE[0] if name == "hostile" else ""), encoding="utf-8")
    return made


@contextlib.contextmanager
def opened(chromium, path, *, is_drawn=True, **settings):
    """The page, drawn; afterwards it must have said nothing, and asked for nothing but itself."""
    said = []
    requests = []
    context = chromium.new_context(**{"offline": True, "viewport": {"width": 1200, "height": 800}, **settings})
    tab = context.new_page()
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("console", lambda message: said.append(message.text))  # violations of the policy are among them
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(path.as_uri())
    if is_drawn:
        tab.locator("html[data-drawn=yes]").wait_for(state="attached", timeout=120_000)
    yield tab
    assert tab.title() != "PWNED"
    context.close()
    assert said == []
    assert {url.partition("#")[0] for url in requests} == {path.as_uri()}


@pytest.mark.parametrize("name", ["plain", "hostile", "long"])
def test_all_is_drawn_and_nothing_is_said(chromium, pages, name):
    with opened(chromium, pages[name]) as tab:
        charts = tab.locator(".plot:visible")
        assert charts.count() == tab.locator(".plot.drawn:visible").count() >= 2
        assert tab.locator(".plot.drawn svg.main-svg").count() >= charts.count()
        assert tab.locator("img").count() == 0
        assert name != "long" or "NaN (3)" in charts.nth(1).inner_text()
    assert pages["long"].stat().st_size < pages["plain"].stat().st_size + 1.5e6


def test_without_scripts_the_words_are_there(chromium, pages):
    with opened(chromium, pages["plain"], is_drawn=False, java_script_enabled=False) as tab:
        words = tab.locator("body").inner_text()
        for needed in ("WARNING", "after 1000 steps", "what to do:", "non-finite-gradients", "gradient norm"):
            assert needed in words


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(chromium, pages, scheme):
    with opened(chromium, pages["plain"], color_scheme=scheme) as tab:
        found = tab.evaluate(CONTRASTS)
        assert len(found) > 40
        assert [one for one in found if one[0] < 4.5] == []
        back = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.parametrize("name", ["plain", "hostile"])
def test_a_narrow_screen_scrolls_one_way_only(chromium, pages, name):
    with opened(chromium, pages[name], viewport={"width": 320, "height": 700}) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= 320


def test_an_empty_log_is_no_page(tmp_path):
    (tmp_path / "run.jsonl").touch()
    done = subprocess.run(
        [sys.executable, "-m", "fastguard", "report", str(tmp_path / "run.jsonl")], capture_output=True, text=True
    )
    assert done.returncode == 3 and "holds no step" in done.stderr and done.stderr.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == ["run.jsonl"]
