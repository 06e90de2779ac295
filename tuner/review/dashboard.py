"""The live web application over a folder of runs: a list, each run's page, comparisons.

Pages are the report's own, with figures and tables fetched as JSON and drawn again while the run
proceeds. The browser learns of changes by server-sent events; the server learns of them by looking
at the runs' files twice a second, so it does not matter who started a run. `guard` decides who may
ask, `run_index` what may be read, `launch` what may be started.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import anyio.to_thread
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route

from tuner.errors import InputError, StorageError, TunerError
from tuner.review.compare_page import cell_words, curves_of, rows_of
from tuner.review.comparing import Comparison, compare_runs, confidence_words, lettered
from tuner.review.exports import EXPORTS, exported
from tuner.review.guard import Guard
from tuner.review.launch import Launcher
from tuner.review.listing import STATES, Shown
from tuner.review.live import LivePages
from tuner.review.notes import note_of, write_note
from tuner.review.optuna_view import Studies, optuna_app
from tuner.review.report import (
    SCRIPTS,
    json_markup,
)
from tuner.review.run_index import RunIndex
from tuner.review.site import asset, rendered, warm_up
from tuner.trial import Status
from tuner.wording import one_line

__all__ = ["Dashboard"]

_T = TypeVar("_T")

LOOK_S = 0.5  # between two looks at the runs' files
PING_S = 15.0  # so that a connection that is gone is noticed


class Dashboard:
    """The application and what it holds: the runs, the processes, the pages' data.

    Args:
        runs_dir: the folder of runs; nothing outside of it is read.
        configs: the folder whose configs may be started; None if none may be.
    """

    def __init__(self, runs_dir: Path, configs: Path | None = None) -> None:
        self.run_index = RunIndex(runs_dir)
        self.launcher = Launcher(self.run_index, configs)
        self.token = secrets.token_urlsafe(32)
        self.num_stopped = 0  # processes that were asked to stop at the end
        self.is_closing: Callable[[], bool] = lambda: False
        self._studies = Studies(self.run_index)
        self._pages = LivePages(self.run_index)
        self._key = ""

    def app(self, port: int) -> Guard:
        """Return the guarded ASGI application for a server on this port."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            Thread(target=warm_up, daemon=True).start()
            yield
            self.num_stopped = self.launcher.close()

        inner = Starlette(
            routes=[
                Route("/", self._list),
                Route("/events", self._list_events),
                Route("/start", self._start, methods=["POST"]),
                Route("/compare", self._compare),
                Route("/runs/{name}", self._page),
                Route("/runs/{name}/data", self._data),
                Route("/runs/{name}/rest", self._rest),
                Route("/runs/{name}/charts/{chart}", self._chart),
                Route("/runs/{name}/source/{number:int}", self._source),
                Route("/runs/{name}/events", self._run_events),
                Route("/runs/{name}/study", self._study),
                Route("/runs/{name}/stop", self._stop, methods=["POST"]),
                Route("/runs/{name}/resume", self._resume, methods=["POST"]),
                Route("/runs/{name}/export/{what}", self._export),
                Route("/runs/{name}/note", self._note, methods=["POST"]),
                Route("/assets/{name}", _asset),
                Mount("", optuna_app(self._studies)),
            ],
            exception_handlers={TunerError: self._said, Exception: self._failed},  # type: ignore[dict-item]  # its own errors
            lifespan=lifespan,
        )
        guard = Guard(inner, token=self.token, port=port)
        self._key = guard.key
        return guard

    # ---- pages ------------------------------------------------------------------------------

    def _rendered(self, template: str, **values: Any) -> Response:
        return HTMLResponse(
            rendered(template, key=self._key, folder=self.run_index.folder, **values)
        )

    async def _list(self, request: Request) -> Response:
        return self._rendered("runs.html.j2", configs=self.launcher.configs(), states=STATES)

    async def _page(self, request: Request) -> Response:
        name = request.path_params["name"]
        shown = await anyio.to_thread.run_sync(self.run_index.shown, name)
        if shown.state == "unreadable":
            return self._answer(request, 404, f"{name}: {shown.problem}")
        may_resume = await anyio.to_thread.run_sync(self.launcher.may_resume, name)
        answer = self._rendered(
            "run.html.j2",
            run=shown,
            may_resume=may_resume,
            note=note_of(self.run_index.folder / name),
            exports=list(EXPORTS),
            has_study=self.run_index.run(name).journal_path.exists(),
            title=f"{shown.op} on {shown.device}",
            parts=defaultdict(str),
            charts=defaultdict(lambda: {"label": "", "caption": "", "figure": None}),
            statuses=[status.value for status in Status],
            scripts=SCRIPTS,
        )
        # Its data is made while the browser reads the scripts, which then ask for it. What it
        # would fail with is answered to them.
        answer.background = BackgroundTask(_unless_unreadable(lambda: self._pages.first(name)))
        return answer

    async def _compare(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        others = [
            n for n in await anyio.to_thread.run_sync(self.run_index.names) if n not in names
        ]
        if len(names) < 2:
            for name in names:
                self.run_index.run(name)
            found = None
        else:
            found = await anyio.to_thread.run_sync(self._compared, names)
        return self._rendered(
            "compare.html.j2",
            names=names,
            others=others,
            found=found,
            letters=[chr(ord("A") + number) for number in range(len(names))],
            confidence_words=confidence_words,
            cell_words=cell_words,
            lettered=lambda text: lettered(text, names),
            rows=rows_of(found) if found else (),
            data=json_markup(curves_of(found)) if found else "",
        )

    def _compared(self, names: Sequence[str]) -> Comparison:
        return compare_runs([self.run_index.run_data(name) for name in names])

    # ---- data of one run --------------------------------------------------------------------

    async def _data(self, request: Request) -> Response:
        return await _as_json(self._pages.first, request.path_params["name"])

    async def _rest(self, request: Request) -> Response:
        return await _as_json(self._pages.rest, request.path_params["name"])

    async def _chart(self, request: Request) -> Response:
        asked = request.path_params
        return await _as_json(self._pages.chart, asked["name"], asked["chart"])

    async def _source(self, request: Request) -> Response:
        asked = request.path_params
        found = await anyio.to_thread.run_sync(self._pages.source, asked["name"], asked["number"])
        return JSONResponse(found)

    async def _export(self, request: Request) -> Response:
        name, what = request.path_params["name"], request.path_params["what"]
        run_data = await anyio.to_thread.run_sync(self.run_index.run_data, name)
        data, media_type = await anyio.to_thread.run_sync(exported, run_data, what)
        headers = {
            "content-disposition": f'attachment; filename="{run_data.run.path.name}-{what}"'
        }
        return Response(data, media_type=media_type, headers=headers)

    async def _study(self, request: Request) -> Response:
        run = self.run_index.run(request.path_params["name"])
        if not run.journal_path.exists():
            raise InputError(f"{run.path.name}: it has no study yet")
        return RedirectResponse(f"/dashboard/studies/{self._studies.id_of(run.path.name)}", 303)

    # ---- events -----------------------------------------------------------------------------

    async def _list_events(self, request: Request) -> Response:
        sent: dict[str, Any] = {}
        jobs_sent: list[Any] = [None]

        def look() -> Mapping[str, Any] | None:
            now = {shown.name: shown for shown in self.run_index.runs()}
            changed = [s for s in now.values() if sent.get(s.name) != _lasting(s)]
            gone = [name for name in sent if name not in now]
            jobs = [dataclasses.asdict(job) for job in self.launcher.jobs()]
            if jobs_sent[0] is not None and not changed and not gone and jobs == jobs_sent[0]:
                return None
            jobs_sent[0] = jobs
            sent.clear()
            sent.update({name: _lasting(shown) for name, shown in now.items()})
            return {"runs": list(map(dataclasses.asdict, changed)), "gone": gone, "jobs": jobs}

        return self._stream(look)

    async def _run_events(self, request: Request) -> Response:
        name = request.path_params["name"]
        await anyio.to_thread.run_sync(self.run_index.shown, name)  # 404 where there is none
        sent: list[Any] = [None]

        def look() -> Mapping[str, Any] | None:
            stamp = self.run_index.stamp(name)
            if not stamp:
                return None
            jobs = [job for job in self.launcher.jobs() if job.run == name][:1]
            waiting = self._pages.waiting(name)
            state = stamp, jobs, waiting and {**waiting, "age_s": 0.0}
            if state == sent[0]:
                return None
            sent[0] = state
            return {
                "stamp": stamp,
                "run": dataclasses.asdict(self.run_index.shown(name)),
                "job": dataclasses.asdict(jobs[0]) if jobs else None,
                "waiting": waiting,
            }

        return self._stream(look)

    def _stream(self, look: Callable[[], Mapping[str, Any] | None]) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield b"retry: 1000\n\n"
            quiet_s = 0.0
            while not self.is_closing():
                found = await anyio.to_thread.run_sync(_unless_unreadable(look))
                if found is not None:
                    yield b"data: " + to_json(found, inf_nan_mode="null") + b"\n\n"
                    quiet_s = 0.0
                elif quiet_s >= PING_S:
                    yield b": still here\n\n"
                    quiet_s = 0.0
                await anyio.sleep(LOOK_S)
                quiet_s += LOOK_S

        return StreamingResponse(events(), media_type="text/event-stream")

    # ---- processes --------------------------------------------------------------------------

    async def _start(self, request: Request) -> Response:
        asked = await _words_of(request)
        config = asked.pop("config", "")
        given = {name: value for name, value in asked.items() if value}
        return await _record(self.launcher.start, config, given)

    async def _stop(self, request: Request) -> Response:
        return await _record(self.launcher.stop, request.path_params["name"])

    async def _resume(self, request: Request) -> Response:
        return await _record(self.launcher.resume, request.path_params["name"])

    async def _note(self, request: Request) -> Response:
        run = self.run_index.run(request.path_params["name"])
        text = (await _words_of(request)).get("text", "")
        return await _record(write_note, run.path, text)

    # ---- failures ---------------------------------------------------------------------------

    async def _said(self, request: Request, error: TunerError) -> Response:
        """Answer with a failure's own words, where a person reads as a page."""
        code = 404 if isinstance(error, InputError) and request.method == "GET" else 409
        return self._answer(request, code, str(error))

    async def _failed(self, request: Request, error: Exception) -> Response:
        """Answer with what went wrong in the dashboard itself; the terminal has the traceback."""
        words = f"{type(error).__name__}: {one_line(str(error))}"
        said = f"the dashboard failed at this: {words}\n  next: its terminal says where"
        return self._answer(request, 500, said)

    def _answer(self, request: Request, code: int, words: str) -> Response:
        if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
            answer = self._rendered("failure.html.j2", words=words)
            answer.status_code = code
            return answer
        return PlainTextResponse(f"{words}\n", code)


# ---- what goes in and out -------------------------------------------------------------------


async def _as_json(make: Callable[..., bytes], *asked: str) -> Response:
    """Answer with JSON that a thread makes."""
    return Response(await anyio.to_thread.run_sync(make, *asked), media_type="application/json")


async def _record(make: Callable[..., Any], *asked: Any) -> Response:
    """Answer with a record that a thread makes."""
    return JSONResponse(dataclasses.asdict(await anyio.to_thread.run_sync(make, *asked)))


def _lasting(shown: Shown) -> Shown:
    """Return what of a list's row does not change by itself."""
    return dataclasses.replace(shown, age_s=0.0)


def _unless_unreadable(look: Callable[[], _T]) -> Callable[[], _T | None]:
    def safe() -> _T | None:
        try:
            return look()
        except (StorageError, InputError):  # a run that was deleted meanwhile, say
            return None

    return safe


async def _words_of(request: Request) -> dict[str, str]:
    """Return the JSON object of words that a POST carries."""
    try:
        data = json.loads(await request.body())
    except ValueError as error:
        raise InputError("expected a JSON object of words") from error
    if not isinstance(data, dict) or not all(isinstance(v, str) for v in data.values()):
        raise InputError("expected a JSON object of words")
    return data


async def _asset(request: Request) -> Response:
    found = asset(request.path_params["name"])
    if found is None:
        return PlainTextResponse("no such asset\n", 404)
    keep = {"cache-control": "private, max-age=31536000, immutable"}
    return Response(found[0], media_type=found[1], headers=keep)
