"""Pictures of pages for README and docs/results/pages.md, from a real run: scripts/docs pictures FOLDER

FOLDER is what `scripts/demo-training --folder FOLDER` has left. Needs Debian's chromium and chromium-driver.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from urllib.parse import quote

from support.browser import Browser, browsing
from support.serving import serving

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
WIDTH = 1000


def picture(browser: Browser, name: str, page: str, until: str, height: int) -> None:
    size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.open(browser.home + page)
    browser.until(until)
    browser.driver.save_screenshot(str(PICTURES / f"{name}.png"))
    print(PICTURES / f"{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder.absolute()
    with serving("--work-dir", str(folder / "work")) as served, browsing() as browser:
        browser.home = f"http://{served.host}:{served.port}"
        browser.open(f"{browser.home}/?token={served.token}")
        (training,) = served.data("/")["trainings"]
        ids = [evaluation for evaluation, _ in training["scored"]]
        values = next(iter(training["lines"].values()))
        drop = min(range(1, len(ids)), key=lambda i: values[i] - values[i - 1])
        place = f"folder={quote(training['folder'], safe='')}&suite={training['suite']}"
        for name, page, until, height in (
            ("first", "/", ".spark", 560),
            ("training", f"/training?{place}", "figure:nth-child(3) .u-over", 840),
            ("evaluation", f"/evaluation/{ids[drop]}", "#scores tbody td", 560),
            ("flips", f"/compare?id={ids[drop - 1]}&id={ids[drop]}", ".sample", 800),
        ):
            picture(browser, f"page-{name}", page, f"document.querySelector({until!r})", height)


if __name__ == "__main__":
    main()
