"""A real browser: Debian's Chromium, driven by selenium."""

import shutil
from contextlib import contextmanager
from importlib.util import find_spec

SECONDS = 120  # most that a page takes on a busy machine
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900",
    "--hide-scrollbars",
)  # fmt: skip


def unavailable():
    """Why no browser can be had here; "" where one can."""
    if find_spec("selenium") is None:
        return "selenium is not installed"
    return "" if shutil.which("chromedriver") and shutil.which("chromium") else "chromium and chromium-driver"


class Browser:
    """One window. `text`: what a page says; `until`: wait for a state of the page, as JavaScript."""

    def __init__(self, driver):
        self.driver = driver
        self.home = ""  # of a served work folder

    def open(self, address):
        self.driver.get("about:blank")
        self.driver.get(address)

    def run(self, script):
        return self.driver.execute_script(f"return {script}")

    def until(self, script):
        from selenium.webdriver.support.wait import WebDriverWait

        return WebDriverWait(self.driver, SECONDS, 0.05).until(lambda _: self.run(script), f"never: {script}")

    def text(self, selector):
        return str(self.run(f"document.querySelector({selector!r})?.innerText ?? ''"))

    def press(self, selector, *keys):
        self.driver.find_element("css selector", selector).send_keys(*keys)

    def click(self, selector):
        self.until(f"document.querySelector({selector!r})")
        self.run(f"document.querySelector({selector!r}).click()")

    def complaints(self):
        """What the console has said since it was asked last."""
        return [line["message"] for line in self.driver.get_log("browser")]


@contextmanager
def browsing():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for option in OPTIONS:
        options.add_argument(option)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
