"""What a rendered text declares beside what the plan's steps pass: found before it is compiled.

While searching, a C function is called through its address, so a wrong number or type of arguments
is no compiler's error: it would be wrong numbers, or a crash. What cannot be read here (macros,
types by other names) is passed over: only what is surely wrong is reported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tuner.errors import did_you_mean
from tuner.machine.platforms import platform_of
from tuner.plans import Plan, Step
from tuner.trial import Candidate

__all__ = ["Mismatches", "mismatches"]

_QUALIFIERS = {"const", "volatile", "__restrict__", "__restrict", "restrict", "struct", "register"}
_WORDS = {"unsigned", "signed", "long", "short", "int", "char", "float", "double", "void", "bool"}
_INT64 = {
    *("int64_t", "uint64_t", "size_t", "ssize_t", "ptrdiff_t", "intptr_t", "uintptr_t"),
    *("long", "long int", "long long", "long long int"),
    *("unsigned long", "unsigned long int", "unsigned long long", "unsigned long long int"),
}
_INT32 = {"int", "int32_t", "uint32_t", "unsigned", "unsigned int", "signed", "signed int"}
_SMALL = {*_INT32, "short", "unsigned short", "int16_t", "uint16_t", "char", "bool", "uint8_t"}
_SMALL |= {"signed char", "int8_t"}
_FLOATS = {"float", "half", "__half", "__nv_bfloat16", "nv_bfloat16"}
_FLOATS |= {"halves::Float16", "halves::Bfloat16"}  # of templates/_lib/cpu_halves.hpp
_SCALARS = {*_INT64, *_SMALL, *_FLOATS, "double", "void"}
# What a pointer to each may be given; one to bytes, to void or to an unknown type may be anything.
_POINTED: dict[str, set[str]] = {
    "float": {"float32"},
    "double": {"float64"},
    **{key: {"int32"} for key in _INT32},
    **{key: {"int64"} for key in _INT64},
    **{key: {"int16"} for key in ("short", "int16_t")},
    **{key: {"float16"} for key in ("half", "__half", "halves::Float16")},
    **{key: {"bfloat16"} for key in ("__nv_bfloat16", "nv_bfloat16", "halves::Bfloat16")},
}


@dataclass(frozen=True, slots=True)
class Mismatches:
    """What cannot work, and what works only for small numbers; each names its place."""

    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def mismatches(candidate: Candidate, places: Callable[[], Sequence[str]]) -> Mismatches:
    """Compare the functions of a candidate's text with the steps that call them.

    Args:
        candidate: rendered.
        places: gives the template's `file:line` for each line of the text, or nothing; it is
            asked only where something is wrong.
    """

    def place(line: int) -> str:
        known = places()
        return known[line - 1] if 0 < line <= len(known) else f"{candidate.template}: line {line}"

    errors: list[str] = []
    warnings: list[str] = []
    text: _CText | _PythonText
    if candidate.language == "triton":
        text = _PythonText(candidate.source)
        if text.error:
            line, why = text.error
            return Mismatches((f"{place(line)}: not valid Python: {why}",))
    else:
        text = _CText(candidate.source, platform_of(candidate.language).is_gpu)
    for plan in candidate.plan.calls:
        passed = _kinds_of(plan)
        for step in plan.steps:
            if step.kind == "call":
                _compare(text, step, [passed(a) for a in step.args], place, errors, warnings)
    return Mismatches(tuple(dict.fromkeys(errors)), tuple(dict.fromkeys(warnings)))


def _kinds_of(plan: Plan) -> Callable[[str], str]:
    """Return a function that says what an argument of a step is: a dtype, "int", "double"..."""
    made = {tensor.name: tensor.dtype for tensor in (*plan.outputs, *plan.workspace)}
    made = {**dict.fromkeys(plan.given, "float32"), **made}
    tensors: Mapping[str, str] = {
        **{a.name: a.dtype for a in plan.arguments if a.shape is not None},
        **made,
    }
    numbers = {a.name: a.dtype for a in plan.arguments if a.shape is None}

    def kind(argument: str) -> str:
        if argument == "null":
            return "null"
        if argument in tensors:
            return f"{tensors[argument]}*"
        return "double" if numbers.get(argument) == "float" else "int64_t"

    return kind


def _compare(
    text: _CText | _PythonText,
    step: Step,
    kinds: Sequence[str],
    place: Callable[[int], str],
    errors: list[str],
    warnings: list[str],
) -> None:
    pairs = zip(step.args, kinds, strict=True)
    expected = f"{step.function}({', '.join(text.wanted(*pair) for pair in pairs)}"
    if isinstance(text, _CText) and text.has_stream:
        expected += f"{', ' if kinds else ''}void* stream"
    expected = f"  expected: {expected}), as the step passes them"
    found = text.function(step.function)
    if found is None:
        if text.lacks(step.function):
            known = ", ".join(text.known) or "none"
            hint = did_you_mean(step.function, text.known) or "next: name one, or add it"
            errors.append(
                f"{place(1).rpartition(':')[0]}: no function {step.function}, which a step calls\n"
                f"  known: {known}\n{expected}\n  {hint}"
            )
        return
    got = f"  got: {found.words}"
    end = f"\n{got}\n{expected}\n  next: make the step and the function agree"
    for reason in text.wrong(found, kinds, step.args):
        errors.append(f"{place(found.line)}: {step.function}: {reason}{end}")
        return
    for reason in found.narrow(kinds, step.args):
        warnings.append(f"{place(found.line)}: {step.function}: {reason}")


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter: its type without qualifiers, empty where it could not be read."""

    base: str
    is_pointer: bool
    words: str


@dataclass(frozen=True, slots=True)
class _Function:
    """What a text declares under one name."""

    line: int
    words: str
    parameters: tuple[_Parameter, ...]
    returns: str = ""
    least: int = 0  # of Python: how many must be given, and at most
    most: float = 0
    is_kernel: bool = False
    is_c: bool = True

    def narrow(self, kinds: Sequence[str], args: Sequence[str]) -> list[str]:
        """Name integers of fewer bits than they are given."""
        return [
            f"{parameter.words!r} keeps 32 bits or fewer of {arg}, which is an int64_t"
            for parameter, kind, arg in zip(self.parameters, kinds, args, strict=False)
            if kind == "int64_t" and not parameter.is_pointer and parameter.base in _SMALL
        ]


# ---- C++ and CUDA -----------------------------------------------------------------------------

_COMMENT = re.compile(
    r'//(?:\\\n|[^\n])*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'', re.S
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.M)
_ATTRIBUTE = re.compile(
    r"__attribute__\s*\(\(.*?\)\)|\[\[.*?\]\]|__(?:host|device|global)__", re.S
)
_TYPE = re.compile(r"^(?:[\w:\s*]|<[\w:\s,*]*>)+$")


class _CText:
    """A text of C++ or CUDA with its comments blanked."""

    def __init__(self, source: str, has_stream: bool) -> None:
        self.has_stream = has_stream
        self.whole = _COMMENT.sub(_blanked, source)
        self.text = _DIRECTIVE.sub(_blanked, self.whole)

    @cached_property
    def known(self) -> list[str]:
        found = re.findall(r'\bextern\s+"C"[^;{}()]*?\b(\w+)\s*\(', self.text)
        return list(dict.fromkeys(found))

    def wanted(self, argument: str, kind: str) -> str:
        return f"{'pointer' if kind == 'null' else kind} {argument}"

    def lacks(self, name: str) -> bool:
        """Whether a name is surely nowhere: no macro pastes it, no header may have it."""
        is_open = "##" in self.whole or re.search(r'#\s*include\s*"', self.whole)
        return not is_open and not re.search(rf"\b{name}\b", self.whole)

    def function(self, name: str) -> _Function | None:
        """Return what a name is declared as; None where that is not clear."""
        found: dict[tuple[object, ...], _Function] = {}
        for match in re.finditer(rf"\b{re.escape(name)}\s*\(", self.text):
            declared = self._declared(match.start(), match.end())
            if declared is not None:
                types = ((p.base, p.is_pointer) for p in declared.parameters)
                found[(declared.returns, *types)] = declared  # the last is the definition
        return next(iter(found.values())) if len(found) == 1 else None

    def _declared(self, start: int, opened: int) -> _Function | None:
        before = self.text[:start]
        begin = max(before.rfind(mark) for mark in ";{}") + 1
        head = _ATTRIBUTE.sub(" ", before[begin:]).strip()
        is_c = re.match(r'extern\s+"C"', head) is not None
        head = re.sub(r'^extern\s+"C"\s*', "", head)
        words = re.findall(r"\w+", head)
        if not words or not _TYPE.match(head) or {"return", "else", "new", "goto"} & set(words):
            return None  # a call, not a declaration
        end = _closing(self.text, opened - 1)
        if end is None:
            return None
        inside = self.text[opened:end]
        parts = [part for part in _split(inside) if part]
        parameters = [] if parts == ["void"] else [_parameter(part) for part in parts]
        if any(parameter is None for parameter in parameters):
            return None
        name = self.text[start:opened]
        return _Function(
            line=before.count("\n") + 1,
            words=" ".join(f"{head} {name}{inside})".split()),
            parameters=tuple(p for p in parameters if p is not None),
            returns=" ".join(head.split()),
            is_c=is_c or self._is_in_block(start),
        )

    def _is_in_block(self, at: int) -> bool:
        for match in re.finditer(r'\bextern\s+"C"\s*\{', self.text):
            end = _closing(self.text, match.end() - 1)
            if match.end() <= at and (end is None or at < end):
                return True
        return False

    def wrong(self, found: _Function, kinds: Sequence[str], args: Sequence[str]) -> list[str]:
        """Return why a step cannot call a function; the first reason is enough."""
        if not found.is_c:
            return ['it is not extern "C", so that nobody finds it by its name']
        returns = found.returns.replace("const", "").replace("static", "").replace("inline", "")
        if returns.strip() in _SCALARS:
            return [f"it returns {returns.strip()}, not const char* (nullptr, or a message)"]
        num = len(kinds) + self.has_stream
        if len(found.parameters) != num:
            stream = ", the stream included" if self.has_stream else ""
            return [f"it takes {len(found.parameters)} arguments; the step passes {num}{stream}"]
        reasons = [
            reason
            for parameter, kind, arg in zip(found.parameters, kinds, args, strict=False)
            if (reason := _unfit(parameter, kind, arg))
        ]
        if self.has_stream:
            last = found.parameters[-1]
            if not last.is_pointer and last.base in _SCALARS:
                reasons.append(f"{last.words!r} is last, where the stream comes (void*)")
        return reasons


def _unfit(parameter: _Parameter, kind: str, arg: str) -> str:
    base, words = parameter.base, parameter.words
    if kind == "null" or kind.endswith("*"):
        if not parameter.is_pointer:
            return f"{words!r} is given the tensor {arg}, a pointer" if base in _SCALARS else ""
        dtype = kind.removesuffix("*")
        if kind != "null" and dtype not in _POINTED.get(base, {dtype}):
            return f"{words!r} is given the tensor {arg} of {dtype}"
        return ""
    if parameter.is_pointer:
        return f"{words!r} is given {arg}, a number ({kind})"
    fits = {"double": {"double"}, "int64_t": {*_INT64, *_SMALL}}[kind]
    return f"{words!r} is given {arg}, which is a {kind}" if base in _SCALARS - fits else ""


def _blanked(match: re.Match[str]) -> str:
    """Return as many lines without words; a short string, such as "C", stays."""
    text = match[0]
    return text if text == '"C"' else re.sub(r"[^\n]", " ", text) if text[0] != '"' else '""'


def _closing(text: str, opened: int) -> int | None:
    """Return where the bracket that is opened there is closed."""
    pairs = {"(": ")", "{": "}"}
    one, other, depth = text[opened], pairs[text[opened]], 0
    for at in range(opened, len(text)):
        depth += (text[at] == one) - (text[at] == other)
        if not depth:
            return at
    return None


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for char in text:
        depth += (char in "(<[{") - (char in ")>]}")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [" ".join(part.split()) for part in parts]


def _parameter(text: str) -> _Parameter | None:
    """Read one parameter; None where it may be a macro, which may stand for several."""
    declared = text.partition("=")[0]
    is_pointer = "*" in declared or "[" in declared
    words = [w for w in re.findall(r"[A-Za-z_][\w:]*", declared) if w not in _QUALIFIERS]
    words = [word.removeprefix("std::") for word in words]
    taken = 0
    while taken < len(words) and words[taken] in _WORDS:
        taken += 1
    base = " ".join(words[: max(1, taken)])
    if not words or (len(words) == 1 and not is_pointer and base not in _SCALARS):
        return None
    is_plain = len(words) - max(1, taken) <= 1 and not re.search(r"[&<(]", declared)
    is_plain = is_plain and declared.count("*") <= 1
    return _Parameter(base if is_plain else "", is_pointer, " ".join(text.split()))


# ---- Python -----------------------------------------------------------------------------------


class _PythonText:
    """A text of Python, such as Triton's."""

    def __init__(self, source: str) -> None:
        self.error: tuple[int, str] | None = None
        self.functions: dict[str, ast.FunctionDef] = {}
        self.others: set[str] = set()
        self.is_open = False
        try:
            self._read(ast.parse(source).body)
        except SyntaxError as error:
            self.error = (error.lineno or 1, f"{error.msg}: {(error.text or '').strip()}")
        except (ValueError, RecursionError, MemoryError):
            self.is_open = True  # the build will say more

    def _read(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
                continue
            for child in ast.walk(node):  # bound in another way, or under a condition
                if isinstance(child, ast.alias):
                    self.others.add((child.asname or child.name).split(".")[0])
                    self.is_open |= child.name == "*"
                elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                    self.others.add(child.id)
                elif isinstance(child, ast.FunctionDef | ast.ClassDef):
                    self.others.add(child.name)

    @property
    def known(self) -> list[str]:
        return list(self.functions)

    def wanted(self, argument: str, kind: str) -> str:
        return "None" if kind == "null" else argument

    def lacks(self, name: str) -> bool:
        return not self.is_open and name not in self.others and name not in self.functions

    def function(self, name: str) -> _Function | None:
        node = self.functions.get(name)
        if node is None or name in self.others:
            return None
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        is_kernel = any(re.search(r"\bjit\b", text) for text in decorators)
        if decorators and not is_kernel:
            return None  # it may be called in another way
        given = node.args
        positional = [*given.posonlyargs, *given.args]
        needed_by_name = sum(default is None for default in given.kw_defaults)
        return _Function(
            line=node.lineno,
            words=f"def {name}({ast.unparse(given)})",
            parameters=(),
            least=len(positional) - len(given.defaults) if not needed_by_name else 10**6,
            most=float("inf") if given.vararg else len(positional),
            is_kernel=is_kernel,
        )

    def wrong(self, found: _Function, kinds: Sequence[str], args: Sequence[str]) -> list[str]:
        if found.is_kernel:
            return ["it is a kernel; a step calls a function of the host, which launches kernels"]
        if not found.least <= len(kinds) <= found.most:
            return [f"it does not take {len(kinds)} arguments by position, which the step passes"]
        return []
