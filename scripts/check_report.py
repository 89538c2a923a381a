"""Opens a report in headless Chromium at desktop and phone width and says what is wrong; exit code 1 on a fault.

    python scripts/check_report.py outputs/rl/rl-quickstart/report [--out DIR]

Looked for: a horizontal overflow of the page (wide tables may scroll inside their boxes), elements cut off at the right
edge, console messages, requests to any address, and anything in the page that names one. Screenshots go to --out, by
default beside the page, for a look. Needs `chromium` (Debian: apt-get install chromium).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTHS = {"desktop": 1280, "phone": 390}
TALLEST = 16000  # pixels of a screenshot
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps"),
    *("--disable-domain-reliability", "--metrics-recording-only", "--host-resolver-rules=MAP * ~NOTFOUND"),
)
# Framed, because a browser window may refuse to be as narrow as a phone. The page itself runs no script.
FRAME = """<!DOCTYPE html><html><body style="margin:0"><iframe id="f" style="border:0;width:{width}px;height:{height}px"
src="{page}"></iframe><pre id="found"></pre><script>
document.getElementById("f").addEventListener("load", function () {{
  var page = this.contentDocument, root = page.documentElement, cut = [];
  page.querySelectorAll("body *").forEach(function (e) {{
    var box = e.getBoundingClientRect();
    var out = box.right > {width} + 0.5 || box.left < -0.5;
    if (box.width && out && !e.closest(".scroll")) cut.push(e.tagName + "." + e.className);
    if (!e.closest(".scroll") && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX === "hidden")
      cut.push("hidden in " + e.tagName);
  }});
  var small = [];
  page.querySelectorAll("svg.chart").forEach(function (e) {{
    var text = e.querySelector("text");
    if (text) small.push(text.getBoundingClientRect().height);
  }});
  document.getElementById("found").textContent = JSON.stringify({{
    scroll: root.scrollWidth, client: root.clientWidth, height: root.scrollHeight, cut: cut.slice(0, 9),
    svgs: page.querySelectorAll("svg.chart").length, text: Math.min.apply(null, small.concat([99]))
  }});
}});
</script></body></html>"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="index.html, or the directory that holds it")
    parser.add_argument("--out", type=Path, help="directory for the screenshots")
    arguments = parser.parse_args()
    page = arguments.report / "index.html" if arguments.report.is_dir() else arguments.report
    out = arguments.out or page.parent
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None or not page.is_file():
        print("no chromium is installed: apt-get install chromium" if browser is None else f"there is no {page}")
        return 2
    out.mkdir(parents=True, exist_ok=True)
    faults = static_faults(page.read_text(encoding="utf-8"))
    own = requests_of_its_own(browser)
    for name, width in WIDTHS.items():
        found, more = look(browser, page.resolve(), width, out / f"{name}.png", own)
        faults += [f"{name}: {fault}" for fault in more]
        print(f"{name}: {width} px wide, {json.dumps(found)}, screenshot {out / f'{name}.png'}")
    size = page.stat().st_size / 1e6
    print(f"page: {size:.2f} MB; faults: {len(faults)}", *faults, sep="\n  ")
    return 1 if faults else 0


def static_faults(text: str) -> list[str]:
    """What the page names: only itself (#..) and what it holds (data:)."""
    named = re.findall(r"""<[^>]+?\s(?:src|href|xlink:href|srcset|action|poster|data)\s*=\s*["']([^"']*)""", text)
    style = "".join(re.findall(r"<style>.*?</style>", text, re.DOTALL))
    named += re.findall(r"""url\(["']?([^)"']*)""", style) + re.findall(r"@import\s+([^;]*)", style)
    faults = [f"names {name!r}" for name in named if not name.startswith(("#", "data:"))]
    return faults + (
        ["holds a script"]
        if re.search(r"<script|\son\w+\s*=\s*[\"']", re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL))
        else []
    )


def look(browser: str, page: Path, width: int, picture: Path, own: set[str]) -> tuple[dict, list[str]]:
    """What the browser measured, and the faults in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # A copy beside the frame: a page may look into one of its own directory only if told so.
        shutil.copy(page, folder / "page.html")
        frame, log = folder / "frame.html", folder / "net.json"
        frame.write_text(FRAME.format(page="page.html", width=width, height=900))
        measured = chromium(
            browser,
            folder,
            frame,
            "--dump-dom",
            "--allow-file-access-from-files",
            f"--log-net-log={log}",
            "--virtual-time-budget=4000",
        )
        match = re.search(r'<pre id="found">(\{.*?\})</pre>', measured.stdout)
        if match is None:
            return {}, [f"the page could not be measured: {measured.stderr[-300:]}"]
        found = json.loads(match[1].replace("&quot;", '"').replace("&amp;", "&"))
        height = min(found["height"] + 20, TALLEST)
        frame.write_text(FRAME.format(page="page.html", width=width, height=height))
        shot = chromium(
            browser,
            folder,
            frame,
            f"--screenshot={picture.resolve()}",
            f"--window-size={max(width, 500)},{height}",
            "--allow-file-access-from-files",
        )
        crop(picture, width)
        faults = []
        if found["scroll"] > found["client"]:
            faults.append(f"the page is {found['scroll']} px wide in {found['client']}")
        faults += [f"cut off: {what}" for what in found["cut"]]
        faults += [f"console: {line}" for line in console(measured.stderr + shot.stderr)]
        faults += [f"request: {url}" for url in sorted(requests(log) - own)]
    return found, faults


def chromium(browser: str, folder: Path, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        browser,
        *QUIET,
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def crop(picture: Path, width: int) -> None:
    from PIL import Image

    with Image.open(picture) as image:
        image.crop((0, 0, width, image.height)).save(picture)


def requests_of_its_own(browser: str) -> set[str]:
    """What the browser asks for with an empty page (its clock, its account), in spite of all that turns this off."""
    with tempfile.TemporaryDirectory() as name:
        empty, log = Path(name) / "empty.html", Path(name) / "net.json"
        empty.write_text("<!DOCTYPE html><title>empty</title>")
        chromium(browser, Path(name), empty, "--dump-dom", f"--log-net-log={log}", "--virtual-time-budget=4000")
        return requests(log)


def console(text: str) -> list[str]:
    return [line for line in text.splitlines() if "CONSOLE" in line]


def requests(log: Path) -> set[str]:
    """Addresses that the browser asked for, without their queries; files are none."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return {url.partition("?")[0] for url in re.findall(r'"url":"((?:https?|wss?|ftp)://[^"]*)"', text)}


if __name__ == "__main__":
    sys.exit(main())
