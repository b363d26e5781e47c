"""Takes pictures of reports in a real browser, for people to look at.

    python -m tests.report.screenshots DIR [PAGE]

Without a PAGE it is the report of a made-up run. Light and dark, on a wide page and on a telephone's, and
printed. It needs Chromium (Debian's package `chromium`; CHROMIUM=PATH names another), and says so if there is
none. It ends with 1 if a page is wider than its window, or the browser had to load anything for it.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.runs.recordings import restore
from tests.seam import run_inside

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (1280, 400)
COLOURS = {"light": "1", "dark": "0"}
"""Blink's numbers of `prefers-color-scheme`."""
POLICY = re.compile(rb'<meta http-equiv="Content-Security-Policy"[^>]*>')
MEASURE = (
    b"<script>addEventListener('load', () => {const e = document.documentElement; document.title = "
    b"'SIZE ' + [e.scrollWidth, e.clientWidth, e.scrollHeight, "
    b"performance.getEntriesByType('resource').length]})"
    b"</script></body>"
)
"""Added to a copy of the page, which has no scripts of its own."""
PASS_ON = (
    "<script>addEventListener('load', () => "
    "setTimeout(() => document.title = frames[0].document.title, 200))</script>"
)


def find_browser() -> str | None:
    """The program of a browser; None if there is none."""
    names = [os.environ.get("CHROMIUM", ""), *BROWSERS]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def run_browser(browser: str, profile: Path, *options: str) -> str:
    """Run the browser without a window; returns what it printed."""
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={profile}", "--disable-background-networking", "--no-first-run", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def frame_page(page: Path, folder: Path, width: int, height: int) -> Path:
    """A page that holds another in a frame: the browser's window cannot be as narrow as a telephone's."""
    outer = folder / "frame.html"
    style = f"border:0;width:{width}px;height:{height}px"
    outer.write_text(f'<body style="margin:0"><iframe src="{page.as_uri()}" style="{style}"></iframe>')
    return outer


def measure(browser: str, page: Path, folder: Path, width: int) -> tuple[int, int, int, int]:
    """The width of a page and of its window, the page's height, and how many files it loads."""
    copy = folder / "measured.html"
    copy.write_bytes(POLICY.sub(b"", page.read_bytes()).replace(b"</body>", MEASURE))
    outer = frame_page(copy, folder, width, 2000)
    outer.write_text(outer.read_text() + PASS_ON)
    options = ("--allow-file-access-from-files", "--virtual-time-budget=3000", "--dump-dom")
    found = re.search(
        r"<title>SIZE ([\d,]+)", run_browser(browser, folder / "profile", *options, outer.as_uri())
    )
    assert found, "the browser did not measure the page"
    wide, inner, high, loaded = map(int, found[1].split(","))
    return wide, inner, high, loaded


def take_pictures(browser: str, page: Path, target: Path) -> list[str]:
    """Write pictures of a page into a folder; returns what is wrong with it."""
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for width in WIDTHS:
            wide, inner, high, loaded = measure(browser, page, folder, width)
            if wide > inner:
                wrong.append(f"at {inner} pixels the page is {wide} wide")
            if loaded:
                wrong.append(f"it loads {loaded} files")
            frame = frame_page(page, folder, width, high)
            for colour, number in COLOURS.items():
                picture = target / f"{colour}-{width}.png"
                run_browser(
                    browser, folder / "profile", f"--blink-settings=preferredColorScheme={number}",
                    f"--window-size={width},{high}", f"--screenshot={picture}", frame.as_uri(),
                )  # fmt: skip
        printed = f"--print-to-pdf={target / 'print.pdf'}"
        run_browser(browser, folder / "profile", "--no-pdf-header-footer", printed, page.as_uri())
    return wrong


def main(argv: list[str]) -> int:
    """Take the pictures; 0 if all is well, 2 without a browser."""
    browser = find_browser()
    if browser is None:
        print(f"no browser: none of {', '.join(BROWSERS)} is installed (apt-get install chromium)")
        return 2
    target = Path(argv[0])
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as runs:
        page = Path(argv[1]).absolute() if len(argv) > 1 else Path(runs, "report.html")
        if len(argv) == 1:
            done = run_inside(["report", str(restore("full", Path(runs))), f"save={page}"])
            assert done.code == 0, done
        wrong = take_pictures(browser, page, target)
    print("\n".join([*wrong, f"pictures are in {target}"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
