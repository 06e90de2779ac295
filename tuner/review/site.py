"""The dashboard's templates, and the files that its pages load."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, FileSystemLoader

from tuner.review.report import PAGE_DIR, SCRIPTS, page_environment, script, styles

__all__ = ["asset", "rendered", "warm_up"]

WEB_DIR = Path(__file__).parent / "web"
WEB_SCRIPTS = ("site.js", "runs.js", "live.js", "compare.js")


def rendered(template: str, **values: Any) -> bytes:
    """Return a page of `web/` as HTML; what runs say is escaped."""
    page = _templates().get_template(template)
    return page.render(asset=_asset_path, **values).encode("utf-8", "replace")  # type: ignore[no-any-return]


def asset(name: str) -> tuple[bytes, str] | None:
    """Return a file that pages load, and its media type; None if there is no such one."""
    return _assets().get(name)


def warm_up() -> None:
    """Make what every first page needs before anybody asks for it: about 0.2 s."""
    for name in _assets():
        _asset_path(name)
    for name in ("runs.html.j2", "run.html.j2", "parts.html.j2"):
        _templates().get_template(name)


@functools.cache
def _templates() -> Any:
    loader = ChoiceLoader([FileSystemLoader(WEB_DIR), FileSystemLoader(PAGE_DIR)])
    return page_environment().overlay(loader=loader)


@functools.cache
def _assets() -> Mapping[str, tuple[bytes, str]]:
    css = f"{styles()}\n{(WEB_DIR / 'site.css').read_text(encoding='utf-8')}"
    texts = {name: (WEB_DIR / name).read_text(encoding="utf-8") for name in WEB_SCRIPTS}
    texts |= {name: str(script(name)) for name in SCRIPTS}
    found = {name: (text.encode(), "text/javascript") for name, text in texts.items()}
    return {**found, "site.css": (css.encode(), "text/css")}


@functools.cache
def _asset_path(name: str) -> str:
    """Return the address of an asset, which changes with what it holds."""
    digest = hashlib.sha256(_assets()[name][0]).hexdigest()[:16]
    return f"/assets/{name}?v={digest}"
