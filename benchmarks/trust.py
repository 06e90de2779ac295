"""Run everything that holds a promise of docs/trust.md, and print the numbers as one table.

python -m benchmarks.trust                    the suites, and 5 + 5 kills: 10 min on two cores
python -m benchmarks.trust --kills 50         the whole of the kills: 20 min more
python -m benchmarks.trust --kills 0          the suites alone

What needs a GPU is skipped where there is none, and counted. Exit status 1 when anything failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
FUZZ = "fuzz"


@dataclass
class Row:
    """One line of the table: the tests whose name matches, and how they ended."""

    what: str
    done: str  # what a test that passed stands for
    files: tuple[str, ...]
    names: str = ".*"
    ends: dict[str, int] = field(default_factory=dict)

    def takes(self, file: str, name: str) -> bool:
        """Whether a test belongs to this line."""
        return file in self.files and re.search(self.names, name) is not None

    def reported(self) -> str:
        """Return the line's numbers in words."""
        tried = sum(n for end, n in self.ends.items() if end != "skipped")
        text = f"{tried} tried, {self.ends.get('passed', 0)} {self.done}"
        skipped = self.ends.get("skipped", 0)
        return text + (f"; {skipped} need a GPU or a tool that is absent" if skipped else "")


def fuzzed() -> tuple[list[str], str]:
    """Return the files and names of the tests that hypothesis feeds."""
    files, names = [], []
    for path in sorted(TESTS.glob("test_*.py")):
        found = re.findall(r"^@given\b.*?^def (\w+)", path.read_text(), re.MULTILINE | re.DOTALL)
        files += [path.stem] if found else []
        names += found
    return files, "^(" + "|".join(names) + r")\b"


def rows() -> list[Row]:
    """Return the table's lines."""
    cheats = (
        "cheat|takes_all_memory|worth_nothing|cache_lines|leaves_behind|put_together|cannot_use"
    )
    honest = "honest_module_is|in_another_order|split_bfloat16|traced_or_scripted"
    classes = ("test_trust_classes",)
    seldom = ("test_trust_unusual", "test_trust_shortcuts")
    files, names = fuzzed()
    return [
        Row("cheats", "rejected or named", ("test_check", "test_cheats"), cheats),
        Row("honest modules", "accepted", ("test_check",), honest),
        Row("wrong modules, nine classes", "rejected", classes, "wrong_module_is_rejected"),
        Row("wrong modules, seldom met", "rejected", seldom, "wrong_module_is_rejected"),
        Row("honest, of such classes", "right, differences listed", classes, "honest"),
        Row("fewer bits than declared", "refused", ("test_check",), "fewer_bits"),
        Row("times that cannot be true", "refused", ("test_evaluate",), "cannot_be_true|floor"),
        Row("measurement", "as stated", ("test_measure",)),
        Row("drop-in", "like the reference", ("test_drop_in",)),
        Row("faults", "survived", ("test_faults", "test_resume", "test_worker")),
        Row("hostile text", "read or refused", ("test_fuzz",)),
        Row("certificate", "as stated", ("test_certificate",)),
        Row(FUZZ, "without a flaw", tuple(files), names),
    ]


def run_suites(table: list[Row]) -> tuple[bool, int]:
    """Run the tests of all lines at once; return whether all passed, and the cases drawn."""
    files = sorted({file for row in table for file in row.files})
    found = [str(TESTS / f"{file}.py") for file in files if (TESTS / f"{file}.py").is_file()]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={results}"]
        done = subprocess.run(
            [*command, "--hypothesis-show-statistics", *found],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        sys.stderr.write("".join(f"{x}\n" for x in done.stdout.splitlines() if "FAILED" in x))
        for case in ElementTree.parse(results).iter("testcase"):
            file = case.get("classname", "").removeprefix("tests.").partition(".")[0]
            kinds = {child.tag for child in case}
            end = "skipped" if "skipped" in kinds else "failed" if kinds & BAD else "passed"
            for row in table:
                if row.takes(file, case.get("name", "")):
                    row.ends[end] = row.ends.get(end, 0) + 1
    drawn = sum(int(n) for n in re.findall(r"- (\d+) passing", done.stdout))
    return done.returncode == 0, drawn


BAD = {"failure", "error"}


def run_kills(number: int) -> tuple[bool, list[str]]:
    """Kill searches and tunings that often; return whether nothing was lost, and what it says."""
    command = [sys.executable, "-m", "benchmarks.faults", "--kills", str(number)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode == 0, done.stdout.strip().splitlines()


def run_fuzz(number: int) -> tuple[bool, list[str]]:
    """Feed each kind of reader with that many hostile texts; return whether all was well."""
    command = [sys.executable, "-m", "benchmarks.fuzz", "--cases", str(number)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode == 0, done.stdout.strip().splitlines()


def main() -> int:
    """Run, print one line a row, and say whether all of it held."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--kills", type=int, default=5, help="of a search, and of whole tunings")
    parser.add_argument("--cases", type=int, default=200, help="of hostile text, of each kind")
    options = parser.parse_args()
    table = rows()
    is_fine, drawn = run_suites(table)
    for row in table:
        cases = f"; {drawn} cases drawn by hypothesis" if row.what == FUZZ else ""
        print(f"{row.what:28} {row.reported()}{cases}", flush=True)
    if options.kills:
        survived, lines = run_kills(options.kills)
        is_fine = is_fine and survived
        for line in lines:
            print(f"{'kill -9':28} {line}")
    if options.cases:
        was_refused, lines = run_fuzz(options.cases)
        is_fine = is_fine and was_refused
        for line in lines:
            print(f"{'hostile text':28} {line}")
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
