"""Sources on a page: the winner's with highlighting, all others packed for comparison.

Candidates of one template differ in a few lines: the pack holds each distinct line once, and a
source is a list of line numbers. The page unpacks it and compares two of them on demand.
"""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tuner.review.formatting import relative_path
from tuner.review.run_data import MAX_SOURCE_CHARS, RunData, latency_us_of, text_of

__all__ = ["code_styles", "highlighted", "packed_sources", "sources_data", "winner_source"]

MAX_PACKED_CHARS = 60_000_000  # of all sources, before packing: 1,000 of a large template

_LEXERS = {".cu": "cuda", ".cpp": "cpp", ".py": "python"}


def highlighted(text: str, lexer_name: str) -> Markup:
    """Return a text as escaped HTML with the classes that `code_styles` colours."""
    from pygments import highlight
    from pygments.formatters.html import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    formatter = HtmlFormatter(cssclass="code", wrapcode=True)
    return Markup(highlight(text, get_lexer_by_name(lexer_name, stripnl=False), formatter))


def code_styles() -> Markup:
    """Return the colours of highlighted code for light pages and for dark screens."""
    # Not from the package, whose names appear only once it has replaced itself: of two threads
    # that import it at once, one may find it without them.
    from pygments.formatters.html import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs(".code")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".code")
    return Markup(f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}")


def winner_source(run_data: RunData) -> tuple[str, Markup]:
    """Return where the winner's source is, and its highlighted text; empty if it is not kept."""
    name, text = run_data.source(run_data.best) if run_data.best else ("", "")
    if text and run_data.best is not None:
        name = f"candidates/{run_data.best.candidate_key}/{name}"
    elif text := text_of(run_data.run.export_path, MAX_SOURCE_CHARS):
        name = relative_path(str(run_data.run.export_path), run_data.run.path)
    if not text:
        return "", Markup("")
    return name, highlighted(text, _LEXERS.get(Path(name).suffix, "text"))


def sources_data(run_data: RunData) -> dict[str, Any]:
    """Return the sources that are kept with a run, the fastest trials' first.

    Returns:
        `lines`: each distinct line; `sources`: lists of positions in `lines`; `trials`: the
        position in `sources` by trial number. What exceeds the page's limit is left out.
    """
    positions: dict[str, int] = {}
    sources: list[list[int]] = []
    by_key: dict[str, int] = {}
    trials: dict[int, int] = {}
    num_chars = 0
    for trial in sorted(run_data.trials, key=lambda trial: (latency_us_of(trial), trial.number)):
        if trial.candidate_key not in by_key:
            text = run_data.source(trial)[1] if num_chars < MAX_PACKED_CHARS else ""
            if not text:
                continue
            num_chars += len(text)
            by_key[trial.candidate_key] = len(sources)
            lines = text.splitlines()
            sources.append([positions.setdefault(line, len(positions)) for line in lines])
        trials[trial.number] = by_key[trial.candidate_key]
    return {"lines": list(positions), "sources": sources, "trials": trials}


def packed_sources(run_data: RunData) -> str:
    """Return `sources_data` as JSON, compressed with gzip, in base64."""
    text = json.dumps(sources_data(run_data), separators=(",", ":"))
    # A lone surrogate (a source that is not UTF-8) stays an escape in JSON.
    return base64.b64encode(gzip.compress(text.encode("ascii"), mtime=0)).decode("ascii")
