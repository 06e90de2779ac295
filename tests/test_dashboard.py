"""The dashboard as it is used: the real server process, a real browser, a real run on the CPU."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
from browser import Reader, chromium
from command_line import command, environment, tune
from made_runs import CONFIG, append, made_run, raced_result, trial, trials
from tiny_operator import config_text, write_family

from tuner.review.launch import Launcher
from tuner.review.run_index import RunIndex
from tuner.run import Run

HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\"'&{{7*7}}"
)


@dataclass
class Server:
    """A dashboard's process and the way in."""

    process: subprocess.Popen[bytes]
    port: int
    token: str
    cookie: str = ""
    key: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def end(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(timeout=60) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()

    def ask(
        self,
        path: str,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: str | None = None,
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """Send one request as written, with no header but these and Host."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        line.request(method, path, body, dict(headers or {}))
        answer = line.getresponse()
        text = answer.read().decode(errors="replace")
        line.close()
        return answer.status, text, answer.headers

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        """GET with the cookie, as the pages do."""
        status, text, _ = self.ask(path, headers={"Cookie": self.cookie, **headers})
        return status, text

    def post(self, path: str, words: object, **changes: str | None) -> tuple[int, str]:
        """POST as the pages do, but for headers that are changed, or left out where None."""
        status, text, _ = self.ask(path, "POST", self.of_a_page(**changes), json.dumps(words))
        return status, text

    def of_a_page(self, **changes: str | None) -> dict[str, str]:
        """Return the headers of a page's POST, but for those that are changed, or None."""
        headers = {
            "Cookie": self.cookie,
            "Origin": self.url,
            "Sec-Fetch-Site": "same-origin",
            "X-Tune-Key": self.key,
            "Content-Type": "application/json",
            **{name.replace("_", "-"): value for name, value in changes.items()},
        }
        return {name: value for name, value in headers.items() if value is not None}


def serving(folder: Path, *options: object) -> Server:
    """Start `tune dashboard` and go in by the address that it prints."""
    process = subprocess.Popen(
        command("dashboard", folder, "--port", "0", *options),
        cwd=folder.parent,
        env=environment(),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    text = ""
    while not (found := re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", text)):
        line = process.stdout.readline().decode()
        assert line, f"it ended: {process.wait()}"
        text += line
    server = Server(process, int(found[1]), found[2])
    status, _, headers = server.ask(f"/?token={server.token}")
    assert status == 303 and headers["Location"] == "/"
    server.cookie = headers["Set-Cookie"].split(";")[0]
    server.key = re.findall(r'name="tune-key" content="(\w+)"', server.get("/")[1])[0]
    return server


@dataclass
class Place:
    """Runs of every kind, configs, and a secret outside."""

    root: Path
    fast: Run
    slow: Run
    open: Run
    hostile: Run
    linked: Run
    server: Server = field(init=False)

    @property
    def runs(self) -> Path:
        return self.root / "runs"


def with_study(run: Run) -> Run:
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(run.journal_path))
    )
    study = optuna.create_study(study_name="tune", storage=storage, direction="minimize")
    choices = optuna.distributions.CategoricalDistribution([64, 128])
    for number in range(12):
        study.add_trial(
            optuna.create_trial(
                value=1500.0 + number,
                params={"block_m": 64 << number % 2},
                distributions={"block_m": choices},
            )
        )
    storage.set_study_system_attr(study._study_id, "dashboard:note_ver", 1)
    storage.set_study_system_attr(study._study_id, "dashboard:note_str:0", f"NOTE {HOSTILE}")
    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("dashboard")
    runs, secret = root / "runs", root / "secret"
    secret.mkdir()
    (secret / "environment.json").write_text('{"title": "SECRET"}')
    (secret / "source.cu").write_text("SECRET")
    made = trials(40)
    fast, slow = (raced_result(made, speedup) for speedup in (2.4, 2.0))
    other = {"machine": {"driver": "590.2", "torch": "2.13"}, "op": "gemm"}
    bad = {"title": HOSTILE, "device": {"name": HOSTILE, "kind": "cpu"}, "accuracy": HOSTILE}
    place = Place(
        root,
        fast=with_study(made_run(runs, made, fast, environment=other)),
        slow=made_run(runs, made, slow, config=CONFIG + "search: {seed: 3}\n"),
        open=made_run(runs, trials(12), environment={"title": "Layer norm", "op": "layer"}),
        hostile=made_run(
            runs, [trial(0, 900.0, mode=HOSTILE), trial(1)], environment=bad, config=HOSTILE
        ),
        linked=made_run(runs, trials(3)),
    )
    (place.linked.path / "environment.json").unlink()
    (place.linked.path / "environment.json").symlink_to(secret / "environment.json")
    (runs / "outside").symlink_to(made_run(root / "elsewhere", trials(3)).path)
    configs = root / "configs"
    configs.mkdir()
    family = write_family(root / "family")
    (configs / "tiny.yaml").write_text(
        config_text(
            family,
            space={"mode": ["ok"], "salt": list(range(60)), "step": [1, 2, 4]},
            search={"trials": 180},
        )
    )
    (root / "other.yaml").write_text(config_text(family))
    (configs / "linked.yaml").symlink_to(root / "other.yaml")
    place.server = serving(runs, "--configs", configs)
    yield place
    place.server.end()


@pytest.fixture(scope="module")
def server(place: Place) -> Server:
    return place.server


# ---- who may ask ----------------------------------------------------------------------------


def test_nothing_is_answered_without_the_token(place, server):
    for path in (
        "/",
        "/events",
        f"/runs/{place.fast.path.name}/data",
        "/assets/site.js",
        "/api/studies",
        "/dashboard",
        "/nowhere",
    ):
        status, text, _ = server.ask(path)
        assert status == 403 and text.startswith("refused: no valid token"), path
    for cookie in (server.cookie[:-1] + "x", server.cookie.split("=")[0] + "=", "nonsense;;=\x7f"):
        assert server.get("/", Cookie=cookie)[0] == 403


def test_a_wrong_token_is_refused_and_the_right_one_leaves_the_address(server):
    for token in ("", "x", server.token[:-1], server.token + "x"):
        assert server.ask(f"/?token={token}")[0] == 403
    assert server.ask(f"/?token=x&token={server.token}")[0] == 403
    status, _, headers = server.ask(f"/compare?run=a&token={server.token}")
    assert (status, headers["Location"]) == (303, "/compare?run=a")
    flags = {flag.strip().lower() for flag in headers["Set-Cookie"].split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/"} <= flags
    assert server.token not in headers["Set-Cookie"]
    assert server.ask(f"//evil.example/?token={server.token}")[2]["Location"].startswith("/evil")


def test_a_foreign_host_is_refused_also_with_the_cookie(server):
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example", ""):
        assert server.get("/", Host=host)[0] in (400, 403), host
        assert server.ask(f"/?token={server.token}", headers={"Host": host})[0] in (400, 403)
    for host in (f"localhost:{server.port}", "127.0.0.1:9", "[::1]:80"):  # 9: through a tunnel
        assert server.get("/", Host=host)[0] == 200, host


def test_a_request_of_another_page_is_refused(server):
    for site in ("cross-site", "same-site"):
        assert server.get("/", **{"Sec-Fetch-Site": site})[0] == 403
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "http://localhost:1"):
        assert server.get("/", Origin=origin)[0] == 403, origin
    assert server.get("/", **{"Sec-Fetch-Site": "same-origin"})[0] == 200


@pytest.mark.parametrize(
    "changes",
    [
        {"X_Tune_Key": None},
        {"X_Tune_Key": "0" * 64},
        {"Cookie": None},
        {"Origin": "http://evil.example"},
        {"Sec_Fetch_Site": "same-site"},
        {"Origin": None, "Sec_Fetch_Site": None},
        {"Host": "evil.example"},
    ],
)
def test_a_post_that_is_not_the_pages_own_starts_nothing(server, changes):
    status, _ = server.post("/start", {"config": "tiny.yaml"}, **changes)
    assert status in (400, 403, 413)
    assert psutil.Process(server.process.pid).children() == []


def test_a_post_of_two_lengths_is_refused_by_its_head(server):
    # Only the head is sent: a body that meets the closed socket would reset the connection,
    # sometimes before the answer is read.
    headers = server.of_a_page(Transfer_Encoding="chunked", Content_Length="1e9")
    status, _, _ = server.ask("/start", "POST", headers)
    assert status in (400, 403, 413)
    assert psutil.Process(server.process.pid).children() == []


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(server, method):
    headers = {"Cookie": server.cookie, "X-Tune-Key": server.key, "Origin": server.url}
    assert server.ask("/", method, headers)[0] == 405


def test_every_answer_forbids_inline_scripts_and_frames(place, server):
    for path in ("/", f"/runs/{place.fast.path.name}", "/assets/site.js", "/nowhere"):
        _, _, headers = server.ask(path, headers={"Cookie": server.cookie})
        policy = headers["Content-Security-Policy"]
        assert "script-src 'self';" in policy and "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy and headers["X-Frame-Options"] == "DENY"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "server" not in headers
    assert server.ask("/")[2]["Cache-Control"] == "no-store"


# ---- what may be read and started -----------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/runs/../secret",
        "/runs/..%2fsecret/data",
        "/runs/%2e%2e%2fsecret",
        "/runs/..%2f..%2fsecret",
        "/runs//etc/data",
        "/runs/%2fetc/data",
        "/runs/outside",
        "/runs/outside/data",
        "/runs/{linked}",
        "/runs/{linked}/data",
        "/runs/{linked}/source/0",
        "/compare?run={linked}&run={fast}",
        "/compare?run=..%2fsecret&run={fast}",
        "/assets/..%2f..%2fguard.py",
        "/assets/%2e%2e%2fguard.py",
        "/static/..%2f..%2findex.html",
        "/static/../../../secret/source.cu",
        "/runs/{fast}/source/-1",
        "/runs/{fast}%00",
    ],
)
def test_nothing_outside_of_the_runs_is_read(place, server, path):
    names = {"linked": place.linked.path.name, "fast": place.fast.path.name}
    status, text = server.get(path.format(**names))
    assert status in (400, 403, 404) and "SECRET" not in text, text[:300]


def test_only_listed_configs_and_plain_totals_are_started(server):
    for config in ("../other.yaml", "other.yaml", "/etc/passwd", "", "linked.yaml", "--help"):
        status, text = server.post("/start", {"config": config})
        assert (status, "not a config of the folder" in text) == (409, True), config
    for name, value in (
        ("trials", "--help"),
        ("trials", "5; rm -rf /"),
        ("timeout", "-1"),
        ("device", "cpu"),
        ("runs-dir", "/tmp"),
    ):
        status, text = server.post("/start", {"config": "tiny.yaml", name: value})
        assert (status, "expected 50 trials" in text) == (409, True), (name, value)
    for words in ([], "x", {"config": 3}, {"config": ["tiny.yaml"]}):
        assert server.post("/start", words)[0] == 409
    assert psutil.Process(server.process.pid).children() == []


def test_a_run_is_resumed_only_with_a_config_of_the_folder_as_it_is(tmp_path):
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / "a.yaml").write_text(CONFIG)
    facts = {"config_folder": str(configs.resolve())}
    same = made_run(tmp_path / "runs", trials(3), environment=facts)
    changed = made_run(tmp_path / "runs", trials(3), environment=facts, config=CONFIG + "# x\n")
    elsewhere = made_run(tmp_path / "runs", trials(3), environment={"config_folder": "/tmp"})
    launcher = Launcher(RunIndex(tmp_path / "runs"), configs)
    may = [launcher.may_resume(run.path.name) for run in (same, changed, elsewhere)]
    assert may == [True, False, False]
    assert not Launcher(RunIndex(tmp_path / "runs"), None).may_resume(same.path.name)


def test_what_was_not_started_here_is_not_stopped_here(place, server):
    status, text = server.post(f"/runs/{place.open.path.name}/stop", {})
    assert status == 409 and "not started from this dashboard" in text


# ---- Optuna's own ---------------------------------------------------------------------------


def test_optunas_dashboard_shows_the_study_and_changes_nothing(place, server):
    name, before = place.fast.path.name, place.fast.journal_path.read_bytes()
    _, _, headers = server.ask(f"/runs/{name}/study", headers={"Cookie": server.cookie})
    number = int(headers["Location"].removeprefix("/dashboard/studies/"))
    status, text = server.get(f"/api/studies/{number}")
    data = json.loads(text)
    assert (status, data["name"], len(data["trials"])) == (200, name, 12)
    assert [t["values"] for t in data["best_trials"]] == [[1500.0]]
    assert "NOTE" not in text
    studies = json.loads(server.get("/api/studies")[1])["study_summaries"]
    assert [s["study_name"] for s in studies] == [name]
    for method, path in (
        ("DELETE", f"/api/studies/{number}"),
        ("POST", f"/api/studies/{number}/rename"),
        ("POST", "/api/studies"),
        ("PUT", f"/api/studies/{number}/note"),
        ("POST", "/api/trials/0/tell"),
        ("POST", "/api/trials/0/user-attrs"),
    ):
        headers = {"Cookie": server.cookie, "X-Tune-Key": server.key, "Origin": server.url}
        status, text, _ = server.ask(path, method, headers, '{"study_name": "x"}')
        assert status == 405, (method, path, text)
    assert place.fast.journal_path.read_bytes() == before
    assert not Path(f"{place.fast.journal_path}.lock").exists()
    # A run without a journal is given none by being looked at.
    assert not place.slow.journal_path.exists()
    assert server.get(f"/runs/{place.slow.path.name}/study")[0] == 404


# ---- in a browser ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def reader(browser: Any, server: Server) -> Iterator[Reader]:
    """A reader who came in by the printed address; nothing may go wrong while one reads."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    reader = Reader(context, server.url)
    reader.page.goto(f"{server.url}/?token={server.token}")
    assert reader.page.url == f"{server.url}/"
    yield reader
    context.close()
    assert reader.complaints == []


def cells(page: Any, selector: str) -> list[list[str]]:
    """Return a table's body as texts."""
    rows = page.eval_on_selector_all(
        f"{selector} tbody tr", "rows => rows.map(r => [...r.cells].map(c => c.innerText.trim()))"
    )
    return [[" ".join(text.split()) for text in row] for row in rows]


def serious_faults(page: Any, part: str | None = None) -> list[tuple[str, str]]:
    """Return what axe-core finds serious or worse: the rule and the first element."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, context=part).response["violations"]
    worst = [fault for fault in found if fault["impact"] in ("serious", "critical")]
    return [(fault["id"], fault["nodes"][0]["html"]) for fault in worst]


def test_the_list_has_every_run_by_value_and_filters_and_sorts(place, reader):
    page = reader.page
    page.wait_for_selector(f"#runs tr[data-run='{place.slow.path.name}']")
    rows = {row[-1]: row for row in cells(page, "#runs")}
    assert set(rows) == {
        run.path.name for run in (place.fast, place.slow, place.open, place.hostile, place.linked)
    }
    speed = place.fast.result().exported.interval
    assert rows[place.fast.path.name][1:6] == [
        "finished",
        "Gemm + Scale batch=1024, features=8192 gemm, float32",
        "NVIDIA H200",
        f"{speed.speedup:.2f}x {speed.low:.2f}x to {speed.high:.2f}x",
        "40",
    ]
    assert rows[place.open.path.name][1:6] == [
        "stopped",
        "Layer norm batch=1024, features=8192 layer, float32",
        "NVIDIA H200",
        "~1.996x",
        "12",
    ]
    assert rows[place.linked.path.name][1] == "unreadable"
    assert serious_faults(page) == []
    page.fill("#filter", "LAYER stopped")
    assert [row[-1] for row in cells(page, "#runs")] == [place.open.path.name]
    assert page.inner_text("#shown") == "1 of 5 runs shown"
    page.fill("#filter", "")
    page.select_option("#state", "finished")
    page.click("th[data-by=speedup] button")
    assert [row[4][:4] for row in cells(page, "#runs")] == ["2.40", "2.00"]
    page.click("th[data-by=speedup] button")
    assert [row[4][:4] for row in cells(page, "#runs")] == ["2.00", "2.40"]
    assert page.get_attribute("th[data-by=speedup]", "aria-sort") == "ascending"


def test_what_a_run_says_is_text_and_never_markup(place, reader):
    page = reader.page
    page.wait_for_selector(f"#runs tr[data-run='{place.hostile.path.name}']")
    assert HOSTILE in page.inner_text("#runs")
    page.goto(f"{reader.home}/runs/{place.hostile.path.name}")
    page.wait_for_selector("body[data-drawn='2']")
    assert HOSTILE in page.inner_text("h1")
    assert HOSTILE[:30] in page.inner_text("#trials")
    page.goto(f"{reader.home}/compare?run={place.hostile.path.name}&run={place.open.path.name}")
    page.wait_for_selector("#chart-search .main-svg")
    assert HOSTILE in page.inner_text("main")
    assert page.evaluate("window.hacked") is None
    assert page.query_selector("img") is None


def test_a_comparison_says_which_is_better_and_what_differs_by_value(place, reader):
    page, (fast, slow) = reader.page, (place.fast.path.name, place.slow.path.name)
    for name in (slow, fast):
        page.check(f"#runs tr[data-run='{name}'] input")
    page.click("#compare")
    page.wait_for_selector("#chart-search .main-svg")
    assert page.url == f"{reader.home}/compare?run={slow}&run={fast}"
    # s = ln 1.05 / t(4) / sqrt(6 / 5); exp(t(8) s sqrt(2 / 5)) = 1.0236, as in test_versus.
    assert page.inner_text(".verdict p") == "B is 1.200x as fast as A (1.200x to 1.200x)"
    assert page.inner_text(".verdict span").startswith("confidence above 99.9 %")
    assert "best" in page.inner_text(".chosen li:nth-child(2)")
    sides = {row[0]: row[1:] for row in cells(page, "#sides")}
    assert sides["verdict"] == ["2.00x faster than PyTorch", "2.40x faster than PyTorch"]
    assert sides["trials"] == ["40 tried of 20,000 possible: 36 correct, 4 compile"] * 2
    tables = page.eval_on_selector_all(
        "main .scroll table",
        "tables => tables.map(t => t.innerText.trim().split(/\\s+/).join(' '))",
    )
    assert tables[1:] == ["A B search.seed 3 –", "A B machine.driver 580.1 590.2"]
    traces = page.evaluate(
        "document.getElementById('chart-speedups').data.map(t => [t.x[0], t.y[0]])"
    )
    assert traces == [[2.0, "A"], [2.4, "B"]]
    assert serious_faults(page) == []
    last = "document.getElementById('chart-search').data.map(t => [t.x.at(-1), t.y.at(-1)])"
    assert page.evaluate(last) == [[39, 3000 / 1506], [39, 3000 / 1506]]
    page.click("[data-x=seconds]")
    page.click("[data-y=latency_us]")
    assert page.evaluate(last) == [[20.5, 1506], [20.5, 1506]]
    page.select_option("select[name=run]", place.open.path.name)
    page.click("form button")
    page.wait_for_selector("#chart-search .main-svg")
    assert "not comparable: different operators: gemm and layer" in page.inner_text("main")


def test_a_runs_page_has_its_figures_table_sources_and_optunas_study(place, reader):
    page = reader.page
    page.goto(f"{reader.home}/runs/{place.fast.path.name}")
    page.wait_for_selector("body[data-drawn='40']")
    assert "2.40x faster than PyTorch" in page.inner_text(".verdict")
    assert page.inner_text("#count") == "40 trials, best 2.40x"
    assert page.inner_text("#state") == "finished"
    assert len(cells(page, "#trials")) > 20
    assert serious_faults(page, "header") == []  # the rest is the report's, tested there
    page.fill("#filter", "block_m=128 latency_us<1520")
    # Trial n takes 1500 + 3 (40 - n) us; 39 did not compile.
    assert page.inner_text("#shown") == "2 of 40 shown"
    assert [row[0] for row in cells(page, "#trials") if len(row) > 1] == ["35", "37"]
    page.select_option("#other", "3")
    page.wait_for_selector("#diff:not([hidden])")
    assert "trial 3" in page.inner_text("#diff")
    page.click("#study")
    page.wait_for_selector(f"text={place.fast.path.name}")
    assert page.url.startswith(f"{reader.home}/dashboard/studies/")


def test_two_hundred_runs_are_listed_and_one_that_is_added_appears(browser, tmp_path):
    for number in range(200):
        made_run(
            tmp_path / "runs", trials(3), environment={"title": f"Op {number:03}"}, num_sources=0
        )
    server = serving(tmp_path / "runs")
    context = browser.new_context()
    reader = Reader(context, server.url)
    reader.page.goto(f"{server.url}/?token={server.token}")
    reader.page.wait_for_selector("#shown:has-text('200 of 200')")
    assert len(cells(reader.page, "#runs")) == 200
    added = made_run(tmp_path / "runs", trials(5), environment={"title": "Added"})
    row = reader.page.wait_for_selector(f"#runs tr[data-run='{added.path.name}']")
    assert "Added" in row.inner_text() and "~" in row.inner_text()
    append(added, trial(5, 500.0))
    reader.page.wait_for_selector(f"#runs tr[data-run='{added.path.name}']:has-text('~6.00x')")
    shutil.rmtree(added.path)
    reader.page.wait_for_selector("#shown:has-text('200 of 200')")
    assert reader.complaints == []
    context.close()
    server.end()


def test_a_run_is_started_followed_stopped_and_resumed_from_the_page(place, server, reader):
    page = reader.page
    page.fill("input[name=trials]", "170")
    page.click("#start button")
    page.wait_for_selector("#jobs a", timeout=60_000)
    page.click("#start button")  # a second one would disturb it
    page.wait_for_selector("#notice:has-text('two at once')")
    assert [said for said in reader.complaints if "409" not in said] == []
    reader.complaints.clear()  # the browser tells every refusal
    name = page.inner_text("#jobs a")
    page.click("#jobs a")  # not `link`: the list is drawn anew meanwhile
    page.evaluate("window.isTheSamePage = true")
    page.wait_for_selector("body[data-shown]:not([data-shown='0'])", timeout=60_000)
    first = int(page.get_attribute("body", "data-shown"))
    page.wait_for_selector(f"body:not([data-shown='{first}'])", timeout=60_000)
    assert page.inner_text("#state") == "running"
    assert int(page.get_attribute("body", "data-shown")) > first
    traces = page.evaluate("document.getElementById('chart-progress-trial').data")
    assert [len(trace["x"]) >= first for trace in traces if trace["name"] == "correct"] == [True]
    page.click("#stop")
    page.click("#stop:has-text('Stop at once')")
    page.wait_for_selector("#state:has-text('stopped')", timeout=60_000)
    before = len(RunIndex(place.runs).run_data(name).trials)
    assert before < 170
    assert page.evaluate("window.isTheSamePage")  # no reload until here

    page.click("#resume")
    page.wait_for_selector("#state:has-text('running')", timeout=60_000)
    more = "least => parseInt(document.getElementById('count').textContent) > least"
    page.wait_for_function(more, arg=before, timeout=60_000)  # two may come between two looks
    page.click("#stop")
    page.click("#stop:has-text('Stop at once')")
    page.wait_for_selector("#state:has-text('stopped')", timeout=60_000)


# ---- the command ----------------------------------------------------------------------------


def test_a_port_that_is_taken_and_a_folder_that_is_not_there_are_reported(server, tmp_path):
    said = tune("dashboard", "--port", server.port, cwd=tmp_path)
    assert said.code == 3 and "is taken\n  next: --port 0" in said.err
    said = tune("dashboard", "--configs", tmp_path / "x", cwd=tmp_path)
    assert said.code == 2 and "no such folder" in said.err
