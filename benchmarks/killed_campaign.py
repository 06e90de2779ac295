"""Tune small modules on a cluster of this host while all that works on them is killed at random.

    python -m benchmarks.killed_campaign [--problems 12] [--agents 4] [--seed 0] \
        [--agent-every 15] [--parent-every 60]

Each problem is tuned undisturbed, two side by side; meanwhile the same campaign goes on agents of
a cluster: every few seconds one of the agents gets SIGKILL, or SIGSTOP for a while, and a new one
joins; more seldom the campaign, or the `tune` that it started, or one of that one's processes is
killed, and begun again. In the end every problem must have ended as it did undisturbed. What is
compared is what no clock and no chance decides (`ended`):

    the status of the problem
    of each question, by its number: what was asked, the key of the candidate's source, the status
        of its outcome, and the reason in words; so none is lost, and none is there twice
    the winner but for its salt: two salts are equally fast
    that its file passed all probes that it was asked; which sizes they have, chance draws
    the exported file but for its header and its salt

Takes 520 s of CPU time, 16 minutes of two busy cores. Exit code 0 where all of that is so.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.kills import CONFIG, TEMPLATE, write_problem
from tuner.command.problems import problems_of, states_of
from tuner.export.module import VERIFIED
from tuner.run import open_run

MODES = """{% if mode == "wrong" %}
  y[n / 2] += 1.0f;
{% elif mode == "raises" %}
  return "it does not like this shape";
{% elif mode == "slow" %}
  for (volatile int64_t i = 0; i < 400 * n; i = i + 1) {}
{% endif %}
  return nullptr;
"""
STOPPED_S = 3.0
KILLS_OF_TUNE = 2  # in one life of a campaign: at the third it gives a problem up


def write_problems(folder: Path, count: int) -> Path:
    """Write that many configs, no two of which share a candidate; return their list."""
    write_problem(folder)
    template = TEMPLATE.replace(
        'default: 1}\n', 'default: 1}\n  mode: {about: "how it behaves", default: ok}\n'
        '  salt: {about: "stands in a comment", default: 0}\n'
    )  # fmt: skip
    text = template.replace("  return nullptr;\n", MODES)
    text = text.replace("#include <cstdint>\n", "#include <cstdint>\n// salt {{ salt }}\n")
    (folder / "kernels" / "doubled" / "sweep.cpp.j2").write_text(text)
    names = []
    for number in range(count):
        modes = ["ok", "slow", "wrong", "raises"]
        space = {"step": [1], "mode": modes, "salt": [2 * number, 2 * number + 1]}
        search = {"sampler": "random", "trials": 8, "seed": number}
        measure = {**CONFIG["measure"], "num_finalists": 1}  # type: ignore[dict-item]
        config = {**CONFIG, "space": space, "search": search, "measure": measure}
        names.append(f"problem_{number}.yaml")
        (folder / names[-1]).write_text(json.dumps(config))
    listed = folder / "list.yaml"
    listed.write_text(json.dumps({"problems": names}))
    return listed


def ended(listed: Path, runs: Path, options: list[str]) -> dict[str, Any]:
    """Return what each problem ended with, without what a clock says or chance draws."""
    found: dict[str, Any] = {}
    for name, state in states_of(problems_of(listed), runs, options).items():
        found[name] = {"status": state.status}
        if state.run is None:
            continue
        run = open_run(state.run)
        trials, result = run.trials(), run.result()
        questions = sorted(
            (t.question, json.dumps(t.params), t.candidate_key, t.outcome.status, t.outcome.reason)
            for t in trials
        )
        winner = result and next(t for t in trials if t.number == result.winner)
        found[name] |= {
            "questions": questions,
            "winner": winner and {k: v for k, v in winner.params.items() if k != "salt"},
            "passed": result and result.exported and result.exported.check.is_accepted,
            "file": _file(run.export_path) if run.export_path.exists() else None,
        }
    return found


def _file(path: Path) -> dict[str, Any]:
    """Return what an exported file says, but for the header and what differs with the salt."""
    first, *lines = path.read_text().splitlines()
    code = "\n".join(line for line in lines if not line.startswith("#"))
    code = re.sub(r"salt \d+|tuner_[0-9a-f]{8}", "", code)  # the latter is the text's digest
    return {"is_verified": VERIFIED in first, "code": code}


class Cluster:
    """A scheduler and agents on this host, which are killed and replaced."""

    def __init__(self, folder: Path, num_agents: int, draw: random.Random) -> None:
        self.folder, self.draw, self.num = folder, draw, 0
        self.kills = Counter[str]()
        certificates = folder / "certificates"
        command = ["cluster", "start", "--host", "127.0.0.1", "--port", "0"]
        self.scheduler = subprocess.Popen(
            [sys.executable, "-m", "tuner", *command, "--certificates", str(certificates)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.scheduler.stdout is not None
        line = next(line for line in self.scheduler.stdout if "tune worker" in line)
        self.address = line.split()[2]
        self.agents = [self.started() for _ in range(num_agents)]

    def started(self) -> subprocess.Popen[bytes]:
        """Start an agent of this host."""
        self.num += 1
        command = ["worker", self.address, "--device", "cpu", "--devices", "0"]
        file = self.folder / "certificates" / "agents.pem"
        name = ["--name", f"agent-{self.num}", "--certificate", str(file)]
        return subprocess.Popen(
            [sys.executable, "-m", "tuner", *command, *name],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def harm(self) -> None:
        """Kill an agent, and start another one; or stop one for a while."""
        place = self.draw.randrange(len(self.agents))
        agent = self.agents[place]
        if self.draw.random() < 0.2:
            family = [psutil.Process(agent.pid)]
            family += family[0].children(recursive=True)
            for process in family:
                with suppress(psutil.Error):
                    process.suspend()
            time.sleep(STOPPED_S)
            for process in family:
                with suppress(psutil.Error):
                    process.resume()
            self.kills["agents stopped and continued"] += 1
            return
        agent.kill()
        agent.wait()
        self.kills["agents"] += 1
        self.agents[place] = self.started()

    def close(self) -> None:
        """End all of it."""
        for agent in self.agents:
            agent.kill()
            agent.wait()
        self.scheduler.kill()
        self.scheduler.wait()


def harmed(command: list[str], cluster: Cluster, log: Path, every_s: float) -> int:
    """Run a campaign, again and again killed; return the exit code of its last life."""
    draw = cluster.draw
    while True:
        with log.open("ab") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        num_left = KILLS_OF_TUNE
        while True:
            try:
                return process.wait(draw.expovariate(1.0 / every_s))
            except subprocess.TimeoutExpired:
                pass
            with suppress(psutil.Error):
                tunes = psutil.Process(process.pid).children()
                inner = [p for tune in tunes for p in tune.children(recursive=True)]
                what = draw.choice(["campaign", "tune", "inner"])
                if what == "inner" and inner:
                    draw.choice(inner).kill()
                    cluster.kills["processes of a tune"] += 1
                elif what == "tune" and tunes and num_left:
                    num_left -= 1
                    tunes[0].kill()
                    cluster.kills["tunes"] += 1
                else:
                    process.kill()
                    process.wait()
                    cluster.kills["campaigns"] += 1
                    break


def main() -> None:
    """Run both campaigns and print what differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=12)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--agent-every", type=float, default=15.0, help="seconds, on average")
    parser.add_argument("--parent-every", type=float, default=60.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tuner-campaign-") as name:
        folder = Path(name)
        listed = write_problems(folder, asked.problems)
        tune = [sys.executable, "-m", "tuner", "campaign", str(listed), "--runs-dir"]
        began_s = time.monotonic()
        undisturbed = subprocess.Popen(
            [*tune, str(folder / "alone"), "--devices", "0,1"], stdout=subprocess.DEVNULL
        )
        cluster = Cluster(folder, asked.agents, random.Random(asked.seed))
        is_over = threading.Event()

        def harm() -> None:
            while not is_over.wait(cluster.draw.expovariate(1.0 / asked.agent_every)):
                cluster.harm()

        harming = threading.Thread(target=harm)
        options = ["--cluster", cluster.address]
        options += ["--certificate", str(folder / "certificates" / "tuner.pem")]
        command, log = [*tune, str(folder / "harmed"), *options], folder / "log.txt"
        harming.start()
        try:
            code = harmed(command, cluster, log, asked.parent_every)
            code += undisturbed.wait()
            print(f"both campaigns: {time.monotonic() - began_s:.0f} s", flush=True)
        finally:
            undisturbed.kill()
            is_over.set()
            harming.join()
            cluster.close()
        alone = ended(listed, folder / "alone", [])
        found = ended(listed, folder / "harmed", options)
        reported = ", ".join(f"{count} {what}" for what, count in cluster.kills.items())
        print(f"killed: {reported}; exit code {code}")
        differing = [name for name in alone if alone[name] != found[name]]
        for name in differing:
            print((folder / "harmed" / "logs" / f"{name}.txt").read_text()[-4000:])
            for what in sorted({*alone[name], *found[name]}):
                left, right = alone[name].get(what), found[name].get(what)
                if left != right:
                    print(f"{name}, {what}:\n  undisturbed {left}\n  harmed      {right}")
        is_right = not code and not differing
        print(
            f"{len(alone) - len(differing)} of {len(alone)} problems ended as they did undisturbed"
        )
        if not is_right:
            print(log.read_text()[-4000:])
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
