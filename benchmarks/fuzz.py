"""Feed the readers of foreign text with hostile text, and count what that does.

python -m benchmarks.fuzz                     1000 cases of each kind: some minutes
python -m benchmarks.fuzz --cases 20000       more
python -m benchmarks.fuzz --seed 7            others

Kinds: expressions, configs, sound configs of absurd spaces, damaged configs, certificates.
A case passes when it is read or refused with an error of ours, in seconds, and when meanwhile
Python ran no code of it, started no process, opened no file for writing and no socket. Exit
code 0 when every case passes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

from tuner.config.run_config import parse_config
from tuner.errors import ConfigError, InputError
from tuner.export.certificate import MARK, read_certificate
from tuner.space.expression import Expression
from tuner.space.grammar import COMPILED_AS
from tuner.space.search_space import SearchSpace
from tuner.trial import Value

CASE_S = 20.0  # of processor time; the largest space that is not refused takes half of it
MEMORY_BYTES = 4 * 2**30  # on top of what is in use at the start
FACTS: dict[str, Value] = {
    "device.kind": "cpu",
    "device.smem_bytes_max": 232448,
    "rows": 64,
    "cols": 100,
}

# ---- what must not happen meanwhile ---------------------------------------------------------

FORBIDDEN = (
    "exec", "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "os.remove",
    "os.rename", "os.mkdir", "socket.connect", "socket.bind", "ctypes.dlopen", "pickle.find_class",
)  # fmt: skip


@dataclass
class Watch:
    """What Python's audit told while foreign text was read."""

    is_on: bool = False
    seen: list[str] = field(default_factory=list)


WATCH = Watch()


def _hear(event: str, args: tuple[Any, ...]) -> None:
    # What the tuner compiles of an expression is run: names, literals and the grammar's operators.
    if not WATCH.is_on or (event == "exec" and args[0].co_filename == COMPILED_AS):
        return
    is_write = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if event in FORBIDDEN or is_write:
        WATCH.seen.append(f"{event} {args[:2]!r}"[:200])


sys.addaudithook(_hear)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Fail if the block runs code, writes, starts or connects anything, or takes too long."""
    WATCH.seen.clear()
    WATCH.is_on = True
    begun_s = time.process_time()
    try:
        yield
    finally:
        WATCH.is_on = False
        used_s = time.process_time() - begun_s
    assert not WATCH.seen, list(WATCH.seen)
    assert used_s < CASE_S, f"{used_s:.1f} s of processor time"


# ---- expressions ----------------------------------------------------------------------------

NAMES = ["rows", "cols", "a", "b", "block_m", "device.kind", "device.smem_bytes_max"]
ATTACKS = [
    "9**9**9**9", "2**64", "10**400", "1e308*10", "1 << 10**9", "-9**99", "(lambda: 0)()",
    "__import__('os').system('x')", "().__class__.__bases__[0].__subclasses__()", "rows.__class__",
    "open('x', 'w')", "exec('1')", "eval('1')", "[a for a in rows]", "f'{rows}'", "a := 1", "*a",
    "min(*[1])", "'a' * 10**9", "a if b else c", "yield 1", "await a", "rows[0]", "rows(1)", "...",
    "None", "b'x'", "1j", "0x_1", "device.kind.x", "not not not a", "'" + "x" * 200 + "'",
    "(" * 70 + "1" + ")" * 70, "-" * 200 + "1", "1" + "+1" * 400, "max(" * 60 + "1" + ")" * 60,
    "\x00", "a\x00b", "\ud800", "ａ", "a # b", "a\nb", "a;b", "1if 1else 2", "9" * 5000,
]  # fmt: skip
TOKENS = [
    *NAMES, "1", "0", "2", "64", "0.5", "1e9", "1e-9", "9223372036854775807", "True", "'cpu'",
    "+", "-", "*", "/", "//", "%", "**", "<", "<=", "==", "!=", ">", ">=", "and", "or", "not",
    "in", "not in", "is", "(", ")", "[", "]", ",", "min", "max", "cdiv", "abs", "if", "else",
    "&", "|", "^", "~", "<<", ">>", "@", ".", ":", "lambda", "{", "}", "=",
]  # fmt: skip


def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    operators = ["+", "-", "*", "/", "//", "%", "**", "<", "==", "!=", "and", "or", "in"]
    return st.one_of(
        st.tuples(inner, st.sampled_from(operators), inner).map(lambda t: f"({' '.join(t)})"),
        st.tuples(st.sampled_from(["min", "max", "cdiv", "pow"]), inner, inner).map(
            lambda t: f"{t[0]}({t[1]}, {t[2]})"
        ),
        inner.map(lambda text: f"not {text}"),
        inner.map(lambda text: f"-{text}"),
        st.lists(inner, max_size=3).map(lambda items: f"a in [{', '.join(items)}]"),
    )


numbers = st.one_of(
    st.integers(-(2**70), 2**70), st.integers(-3, 70), st.floats(), st.just(10**30)
).map(str)
leaves = st.one_of(st.sampled_from(NAMES), numbers, st.sampled_from(["'cpu'", "True", "False"]))
expressions = st.one_of(
    st.recursive(leaves, nested, max_leaves=25),
    st.recursive(st.one_of(leaves, st.sampled_from(ATTACKS)), nested, max_leaves=6),
    st.lists(st.sampled_from(TOKENS), max_size=40).map(" ".join),
    st.text(max_size=80),
)


def try_expression(text: str, a: int, b: float) -> None:
    """Read an expression and compute it."""
    with watched(), contextlib.suppress(InputError):
        expression = Expression.parse(text)
        assert expression.names is not None
        expression.evaluate({**FACTS, "a": a, "b": b, "block_m": 64})


# ---- configs, and the spaces that they describe ---------------------------------------------

words = st.one_of(
    st.sampled_from(["a", "b", "block_m", "template", "x y", "", "__class__", "é", "1", "<b>"]),
    st.text(alphabet=string.printable, max_size=12),
)
scalars = st.one_of(
    words,
    st.integers(-(2**70), 2**70),
    st.integers(-2, 300),
    st.floats(),
    st.booleans(),
    st.none(),
)
bounds = st.one_of(st.integers(-2, 40), st.integers(-(2**70), 2**70), st.floats(), st.none())
values = st.one_of(
    st.lists(scalars, max_size=8),
    st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True),
    st.fixed_dictionaries({"range": st.lists(bounds, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"pow2": st.lists(bounds, min_size=1, max_size=3)}),
    st.fixed_dictionaries(
        {"values": st.lists(scalars, max_size=4)}, optional={"when": expressions}
    ),
    st.fixed_dictionaries(
        {"range": st.tuples(st.integers(0, 9), st.integers(10, 10**6))},
        optional={"when": st.fixed_dictionaries({"a": st.lists(scalars, max_size=3)})},
    ),
    scalars,
)
rules = st.fixed_dictionaries({"expr": expressions, "why": words}, optional={"more": scalars})
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=4)
    ),
    max_leaves=12,
)
configs = st.fixed_dictionaries(
    {"problem": st.one_of(st.just({"op": "x"}), anything)},
    optional={
        "space": st.one_of(
            st.dictionaries(st.sampled_from(["a", "b", "block_m", "c", "d"]), values, max_size=5),
            anything,
        ),
        "constraints": st.one_of(st.lists(rules, max_size=4), anything),
        "search": anything,
        "measure": anything,
        "device": scalars,
        "accuracy": anything,
        "templates": anything,
    },
)


sound_values = st.one_of(
    st.lists(st.integers(-5, 300), min_size=1, max_size=8, unique=True),
    st.tuples(st.integers(0, 9), st.integers(10, 9000)).map(lambda ends: {"range": list(ends)}),
)
sound_leaves = st.one_of(
    st.sampled_from(["a", "b", "c", "rows", "device.smem_bytes_max"]), st.integers(0, 99).map(str)
)
sound_rules = st.fixed_dictionaries(
    {"expr": st.recursive(sound_leaves, nested, max_leaves=8), "why": st.just("a rule")}
)
spaces = st.fixed_dictionaries(
    {
        "problem": st.just({"op": "x"}),
        "space": st.fixed_dictionaries({name: sound_values for name in "abc"}),
        "constraints": st.lists(sound_rules, max_size=3),
    }
)


def try_config(config: Any) -> None:
    """Read a config, and find the feasible set of the space that it describes."""
    _try_config(json.dumps(config, ensure_ascii=False))


def _try_config(text: str) -> None:
    with watched():
        try:
            found = parse_config(text, Path("/nowhere/x.yaml"))
            space = SearchSpace.build(found.space, found.constraints, FACTS)
            assert 1 <= space.num_feasible <= space.num_cartesian
            assert space.index(space.at(0)) == 0
        except ConfigError as error:
            assert all(p.startswith("/nowhere/x.yaml:") for p in error.problems), error.problems
            message = str(error)
        except InputError as error:
            message = str(error)
        else:
            message = ""
    message.encode()  # can be printed
    assert len(message) < 1_000_000


WHOLE = """
problem: {op: x, sizes: {rows: 64, cols: 100}}
device: cpu
accuracy: {rtol: 1e-4, atol: 1e-4}
space:
  a: [1, 2, 4]
  b: {range: [2, 20], when: "a > 1"}
  c: {pow2: [1, 1024]}
  d: ["on", v1.2, "no", 1e-4, -3, 2020-01-01]
constraints:
  - {expr: "a * b <= 64 or c == 1", why: "it fits"}
search: {sampler: tpe, trials: 200, timeout: 10m, seed: 0}
measure: {screen: 20ms, finalists: 200ms, max_noise: 0.5%}
"""
patches = st.one_of(
    st.text(alphabet="abc019.:,-[]{}'\"\n #&*!?|>%@\\\t~é\ud7ff", max_size=8),
    st.sampled_from(
        ["!!python/object/apply:os.system ['x']", "&a [*a]", "<<: *a", "!!binary x", "? ", "%YAML"]
    ),
)


def try_damaged(edits: list[tuple[int, int, str]]) -> None:
    """Read a whole config with some of its text replaced."""
    text = WHOLE
    for place, length, patch in edits:
        text = text[: place % len(text)] + patch + text[place % len(text) + length :]
    _try_config(text)


# ---- certificates ---------------------------------------------------------------------------

FIELDS = [
    "code_sha256", "reference_sha256", "device", "accuracy", "seed", "num_probes", "sizes",
    "interval", "probes", "samples_us", "format", "versions", "reference",
]  # fmt: skip
certificates = st.one_of(
    anything.map(lambda value: json.dumps(value, ensure_ascii=True)),
    st.fixed_dictionaries({name: anything for name in FIELDS}).map(json.dumps),
    st.integers(1, 20_000).map(lambda depth: "[" * depth),
    st.text(max_size=200),
)


def try_certificate(file: Path, text: str) -> None:
    """Read a certificate from a file's header."""
    lines = "".join(f"{MARK}{line}\n" for line in text.splitlines())
    file.write_text(f"# A file.\n{lines}import os\n", encoding="utf-8", errors="replace")
    with watched(), contextlib.suppress(InputError):
        read_certificate(file)


# ---- all of it ------------------------------------------------------------------------------


def kinds(folder: Path) -> dict[str, Callable[[int, int], None]]:
    """Return what may be fuzzed: functions of a number of cases and a seed."""
    file = folder / "model_new.py"
    # What is made once at the first use, by code of ours, is made now.
    SearchSpace.build(parse_config(WHOLE, file).space, (), FACTS)
    file.write_text(MARK + "{}")
    with contextlib.suppress(InputError):
        read_certificate(file)
    edits = st.lists(
        st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 12), patches), min_size=1, max_size=4
    )
    floats = st.floats(allow_nan=True)
    cases: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
        "expressions": (try_expression, (expressions, st.integers(-(2**63), 2**63), floats)),
        "configs": (try_config, (configs,)),
        "spaces": (try_config, (spaces,)),
        "damaged configs": (try_damaged, (edits,)),
        "certificates": (lambda text: try_certificate(file, text), (certificates,)),
    }

    def runner(
        check: Callable[..., None], given_by: tuple[Any, ...]
    ) -> Callable[[int, int], None]:
        def run(num_cases: int, number: int) -> None:
            def case(*args: Any) -> None:
                check(*args)

            # Hypothesis counts only cases that it could draw, so this is what was run.
            limits = settings(
                max_examples=num_cases,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            limits(seed(number)(given(st.tuples(*given_by))(lambda args: case(*args))))()

        return run

    return {name: runner(*parts) for name, parts in cases.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=1000, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    in_use = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    limit = in_use + MEMORY_BYTES  # a blow-up is a MemoryError here
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    num_failed = 0
    with tempfile.TemporaryDirectory(prefix="tuner-fuzz-") as folder:
        for name, run in kinds(Path(folder)).items():
            begun_s = time.monotonic()
            try:
                run(options.cases, options.seed)
                verdict = "all read or refused"
            except Exception as error:
                num_failed += 1
                notes = getattr(error, "__notes__", [])
                verdict = "\n  ".join([f"FAILED: {type(error).__name__}: {error}", *notes])[:3000]
            seconds = time.monotonic() - begun_s
            print(f"fuzz, {name}: {options.cases} cases, {seconds:.0f} s: {verdict}", flush=True)
    sys.exit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
