"""The page in a real browser: drawn, quiet, readable, whatever it is given and however it is looked at."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="the page is an extra: pip install fastguard[report]")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install fastguard[browser]")

from fastguard.page import build_page  # noqa: E402

# A key or a click is answered by the page when it gets to it: what follows is waited for, not read at once.
expect = sync_api.expect
expect.set_options(timeout=30_000)

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

IS_SORTED = """() => {
  const all = document.querySelectorAll("#tensors tbody tr td:nth-child(3)");
  const cells = [...all].map((one) => Number(one.textContent));
  return cells.every((one, place) => !place || cells[place - 1] >= one);
}"""


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """A run of a thousand steps, one with hostile names, two compared, one of a hundred thousand steps."""
    folder = tmp_path_factory.mktemp("pages")
    plain = write_log(folder / "plain.jsonl", 1000, 24)
    long = write_log(folder / "long.jsonl", 100_000, 300)
    text = plain.read_text()
    for place, name in enumerate(HOSTILE):
        spelled = '"' + "".join(f"\\u{ord(c):04x}" if c < " " or c > "~" or c in '"\\' else c for c in name) + '"'
        text = text.replace(f'"layers.{place // 8}.block.{place % 8}.weight"', spelled)
    hostile = folder / "hostile.jsonl"
    hostile.write_text(text)
    other = folder / "other.jsonl"
    other.write_text(re.sub(r'("step":5\d\d,.*?"loss":)', r"\g<1>1", plain.read_text()))
    sources = {"plain": plain, "hostile": hostile, "compared": {"first": plain, HOSTILE[0]: other}, "long": long}
    made = {}
    for name, source in sources.items():
        made[name] = folder / f"{name}.html"
        made[name].write_text(build_page(source, title=HOSTILE[0] if name == "hostile" else ""), encoding="utf-8")
    return made


@contextlib.contextmanager
def opened(chromium, path: Path, *, is_drawn: bool = True, **settings):
    """The page, drawn; afterwards it must have said nothing, and asked for nothing but itself."""
    said: list[str] = []
    requests: list[str] = []
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


@pytest.mark.parametrize("name", ["plain", "hostile", "compared", "long"])
def test_all_is_drawn_and_nothing_is_said(chromium, pages, name):
    with opened(chromium, pages[name]) as tab:
        charts = tab.locator(".plot:visible")
        assert charts.count() == tab.locator(".plot.drawn:visible").count() >= 5
        assert tab.locator(".plot.drawn svg.main-svg").count() >= charts.count()
        assert tab.locator("img").count() == 0
        assert name != "hostile" or "{{ 7 * 7 }}" in tab.locator("#tensors").inner_text()


def test_without_scripts_the_words_are_there(chromium, pages):
    with opened(chromium, pages["plain"], is_drawn=False, java_script_enabled=False) as tab:
        words = tab.locator("body").inner_text()
        for needed in ("WARNING", "after 1000 steps", "What to do:", "non-finite-gradients", "Where NaN and Inf"):
            assert needed in words
        assert tab.locator("#tensors tbody tr").count() == 24
        assert tab.locator(".plot").first.is_hidden() and tab.locator("button:visible, input:visible").count() == 0
        tab.locator("summary", has_text="In words and numbers").first.click()
        assert "series" in tab.locator(".chart details table").first.inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(chromium, pages, scheme):
    with opened(chromium, pages["plain"], color_scheme=scheme) as tab:
        tab.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        found = tab.evaluate(CONTRASTS)
        assert len(found) > 300
        assert [one for one in found if one[0] < 4.5] == []
        back = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.parametrize("name", ["plain", "hostile", "compared"])
def test_a_narrow_screen_scrolls_one_way_only(chromium, pages, name):
    with opened(chromium, pages[name], viewport={"width": 320, "height": 700}) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= 320


def test_every_control_has_a_name_and_every_chart_an_alternative(chromium, pages):
    with opened(chromium, pages["plain"]) as tab:
        nodes = tab.context.new_cdp_session(tab).send("Accessibility.getFullAXTree")["nodes"]
        roles = {"button", "textbox", "searchbox", "combobox", "link", "image", "checkbox", "slider", "table"}
        found = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored") and node["role"]["value"] in roles
        ]
        assert {"button", "searchbox", "combobox", "image"} <= {role for role, _ in found}
        assert [role for role, name in found if not name and role != "table"] == []
        for plot in tab.locator(".plot:visible").all():
            assert len(plot.get_attribute("aria-label")) > 30


def test_the_keyboard(chromium, pages):
    with opened(chromium, pages["plain"]) as tab:
        first = tab.locator(".card").first
        tab.keyboard.press("j")
        expect(first).to_be_focused()
        tab.keyboard.press("j")
        tab.keyboard.press("k")
        expect(first).to_be_focused()
        tab.keyboard.press("+")
        expect(tab.locator("#range")).to_have_text("steps 250 to 750")
        expect(tab).to_have_url(re.compile("#250-750$"))
        ranges = "[...document.querySelectorAll('.plot.drawn')].map(p => p.layout.xaxis.range.map(Math.round).join())"
        tab.wait_for_function(f"{ranges}.filter(one => one === '250,750').length >= 4")
        tab.keyboard.press("Escape")
        expect(tab.locator("#zoom")).to_be_hidden()
        expect(tab).to_have_url(re.compile("#$"))
        tab.keyboard.press("/")
        expect(tab.locator("#find")).to_be_focused()
        tab.keyboard.type("block.3")
        expect(tab.locator("#tensors tbody tr")).to_have_count(3)
        expect(tab.locator("#found")).to_have_text("3 of 24")
        tab.keyboard.press("Escape")
        expect(tab.locator("#find")).not_to_be_focused()
        tab.keyboard.press("d")
        expect(tab.locator("html")).to_have_attribute("data-theme", "dark")
        tab.reload()
        tab.locator("html[data-drawn=yes]").wait_for(state="attached", timeout=60_000)
        expect(tab.locator("html")).to_have_attribute("data-theme", "dark")  # it is kept


def test_mouse_tables_and_maps(chromium, pages):
    with opened(chromium, pages["plain"]) as tab:
        tab.locator("button[data-first]").first.click()
        expect(tab.locator("#range")).to_have_text(re.compile("^steps "))
        tab.locator("#tensors thead button", has_text="largest norm").click()
        expect(tab.locator("#tensors th[aria-sort=descending]")).to_have_text("largest norm")
        tab.wait_for_function(IS_SORTED)
        expect(tab.locator("#tensors tbody tr")).to_have_count(24)
        tab.locator("#which").select_option("layers-zeros")
        tab.locator("#chart-layers-zeros.drawn").wait_for(timeout=30_000)
        expect(tab.locator("#map-layers-norm")).to_be_hidden()


def test_an_axis_of_time(chromium, pages):
    loss = "document.getElementById('chart-loss')"
    with opened(chromium, pages["compared"]) as tab:
        tab.locator("#axis").select_option("time")
        tab.wait_for_function(f"{loss}.layout.xaxis.title.text === 'seconds'")
        assert all(0.0 <= x <= 50.0 for x in tab.evaluate(f"{loss}.data.flatMap(one => one.x)"))
        tab.keyboard.press("+")
        expect(tab.locator("#range")).to_have_text("steps 250 to 750")
        tab.wait_for_function(f"{loss}.layout.xaxis.range.map(one => one.toFixed(1)).join() === '12.5,37.5'")


def test_a_tensor_that_is_clicked_is_drawn(chromium, pages):
    with opened(chromium, pages["plain"]) as tab:
        line, plot = tab.locator("#line"), tab.locator("#line > div")
        assert line.is_hidden()
        tab.locator("#tensors tbody button", has_text="layers.2.block.7.weight").click()
        tab.locator("#line > div.drawn").wait_for(timeout=30_000)
        expect(line.locator("figcaption")).to_have_text("Norm of layers.2.block.7.weight")
        assert "not finite at 3" in plot.get_attribute("aria-label")
        traces = tab.evaluate("document.querySelector('#line > div').data.map(one => [one.name, one.x, one.y])")
        assert [name for name, *_ in traces] == ["norm", "NaN or Inf"]
        assert traces[1][1] == [333, 500, 501] and len(traces[0][1]) == 22
        worst, newest = (
            float(tab.locator("#tensors tbody tr:first-child td").nth(place).inner_text()) for place in (1, 0)
        )
        tab.locator("#tensors tbody tr:first-child button").click()
        name = tab.locator("#tensors tbody tr:first-child button").inner_text()
        expect(line.locator("figcaption")).to_have_text(f"Norm of {name}")
        labelled = "name => document.querySelector('#line > div').getAttribute('aria-label').includes(name)"
        tab.wait_for_function(labelled, arg=name)
        drawn = tab.evaluate("document.querySelector('#line > div').data[0].y.filter(one => one !== null)")
        assert max(drawn) == pytest.approx(worst, rel=1e-3) and drawn[-1] == pytest.approx(newest, rel=1e-3)


def test_a_zoom_can_be_sent(chromium, pages, tmp_path):
    with opened(chromium, pages["plain"]) as tab:
        tab.goto(pages["plain"].as_uri() + "#100-200")
        tab.reload()
        tab.locator("html[data-drawn=yes]").wait_for(state="attached", timeout=60_000)
        expect(tab.locator("#range")).to_have_text("steps 100 to 200")
        shown = tab.evaluate("document.getElementById('chart-loss').layout.xaxis.range")
        assert shown == [100, 200]


def test_one_bad_step_of_many_is_seen(chromium, pages):
    with opened(chromium, pages["long"]) as tab:
        fills = tab.locator("#ribbon rect").evaluate_all("all => all.map(one => one.getAttribute('fill'))")
        assert fills.count("#c1121f") == 2  # three steps, two of them neighbours
        assert "NaN (3)" in tab.locator("#chart-norm").inner_text()
    assert pages["long"].stat().st_size < pages["plain"].stat().st_size + 1.5e6


@pytest.mark.parametrize("kind", ["forced colours", "print"])
def test_other_ways_to_look_at_it(chromium, pages, kind):
    settings = {"forced_colors": "active"} if kind == "forced colours" else {}
    with opened(chromium, pages["plain"], **settings) as tab:
        assert "WARNING" in tab.locator(".status").first.inner_text()
        if kind == "forced colours":
            look = tab.locator(".key").first.evaluate("one => getComputedStyle(one, '::before').forcedColorAdjust")
            assert look == "none"
        if kind == "print":
            tab.emulate_media(media="print")
            assert tab.locator(".plot").first.is_hidden() and tab.locator(".controls:visible").count() == 0
            assert tab.locator("#tensors").is_visible()
            assert tab.pdf()[:5] == b"%PDF-"
            expect(tab.locator("details:not([open])")).to_have_count(0)  # printing has opened them


def test_an_empty_log_is_no_page(tmp_path):
    (tmp_path / "run.jsonl").touch()
    done = subprocess.run(
        [sys.executable, "-m", "fastguard", "report", str(tmp_path / "run.jsonl")], capture_output=True, text=True
    )
    assert done.returncode == 3 and "holds no step" in done.stderr and done.stderr.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == ["run.jsonl"]
