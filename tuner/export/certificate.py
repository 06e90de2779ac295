"""What an exported file claims, with all that is needed to repeat it.

    export/model_new.py       its header holds the certificate in short: `# certificate: {...}`
    export/certificate.json   the whole of it: every probe, every sample, the reference's text

The hash is of the code, which begins below the header. The seed from which the secret probes were
drawn is revealed here, after the fact.
"""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, model_validator

from tuner.by_batch import ByBatch
from tuner.errors import InputError
from tuner.measured import keys_of
from tuner.problem.modes import TuneMode
from tuner.problem.timed_data import FILE, WORKLOADS
from tuner.storage import storage_errors, write_whole
from tuner.trial import Interval, ProbeResult, from_json, to_json

__all__ = [
    "AtSize", "Certificate", "OnDataClaim", "Samples", "certify", "code_sha256", "has_certificate",
    "read_certificate", "whole_path",
]  # fmt: skip

FORMAT = 2  # 2: November 2026, of any number of workloads
FORMATS = (1, FORMAT)  # that are read
MARK = "# certificate: "
LINE_CHARS = 84  # of a header line's content
HEADER_BYTES = 2**20  # looked at for a certificate; a longer header is somebody's joke
WHOLE_BYTES = 256 * 2**20
NUM_SHOWN = 3  # probes in the short form: as given, and those with the largest errors
MOST_SIZES = 64  # of which each is raced again, one after the other
MOST_WORKLOADS = 64  # likewise

Samples = tuple[tuple[tuple[float, ...], ...], ...]
"""What a race counted in us, [baseline, file][process][round]; empty in the short form."""


WorkloadName = Annotated[str, Field(pattern=rf"^({'|'.join(WORKLOADS)}|{FILE}[^/\\]+)$")]


@dataclass(frozen=True, slots=True)
class OnDataClaim:
    """The claim of speed on data beside the given ones; `words` say what these are.

    Of a file of tensors it has the hash.
    """

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings")

    name: WorkloadName
    words: str
    interval: Interval
    samples_us: Samples = ()
    tensors_sha256: str = ""

    def shortened(self) -> OnDataClaim:
        """Return what fits into a header."""
        return replace(self, samples_us=())


OnOthers = Annotated[tuple[OnDataClaim, ...], Field(max_length=MOST_WORKLOADS)]


def _with_others(values: Any) -> Any:
    """Read what earlier releases claimed, of ordinary data alone beside the given ones."""
    keys = keys_of(values)
    interval, samples = keys.pop("ordinary", None), keys.pop("ordinary_samples_us", ())
    if interval is not None:
        claim = {"interval": interval, "samples_us": samples}
        keys["others"] = [{"name": "ordinary", "words": "ordinary data", **claim}]
    return values


@dataclass(frozen=True, slots=True)
class AtSize:
    """The claim of speed at one of several tuned sizes; `sizes` replace the reference's own."""

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings")

    sizes: dict[str, int]
    interval: Interval
    latency_us: float | None = None
    baseline_us: float | None = None
    num_throttled: int = 0
    samples_us: Samples = ()
    others: OnOthers = ()  # on other data, where it was raced on them

    _of_earlier_releases = model_validator(mode="before")(_with_others)

    def shortened(self) -> AtSize:
        """Return what fits into a header."""
        others = tuple(each.shortened() for each in self.others)
        return replace(self, samples_us=(), others=others)


@dataclass(frozen=True, slots=True)
class Certificate:
    """The claims of one file.

    `interval`, times and samples are of the given data, `others` are the speed-ups on other ones;
    the least of all counts. `workloads` are the data on which the file was raced, by name: those
    of earlier releases claim nothing of others than the given ones.

    `clocks` and `versions` name the machine. A file of several tuned sizes has the largest in
    `sizes`, of which all claims are, and races of the others in `at_sizes`; the certificates of
    earlier releases have none of these. The short form lacks `reference`, samples and most
    `probes`.
    """

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings")

    code_sha256: str
    reference_sha256: str
    device: str  # as PyTorch names it: cpu, cuda:0
    accuracy: str
    seed: int  # of the probes
    num_probes: int
    is_deterministic: bool = True
    sizes: dict[str, int] = field(default_factory=dict)  # that replace the reference's own
    mode: TuneMode = "as_given"  # in which it was raced, and mostly asked
    workloads: tuple[WorkloadName, ...] = ("given",)
    interval: Interval | None = None
    others: OnOthers = ()
    latency_us: float | None = None
    baseline_us: float | None = None
    num_throttled: int = 0
    seconds: float = 0.0  # of samples, for each process
    rewrites: tuple[str, ...] = ()  # exact steps by which the module's graph was rewritten
    effort: str = "normal"  # quick: few candidates were tried, the race was short
    by_batch: ByBatch | None = None  # at which rows it takes kernels, and what was measured
    clocks: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    origin: str = ""  # run and trial
    made_at: str = ""  # UTC, ISO 8601
    command: str = ""  # that repeats it
    format: int = FORMAT
    probes: tuple[ProbeResult, ...] = ()
    reference: str = ""
    samples_us: Samples = ()
    at_sizes: Annotated[tuple[AtSize, ...], Field(max_length=MOST_SIZES)] = ()

    _of_earlier_releases = model_validator(mode="before")(_with_others)

    def shortened(self) -> Certificate:
        """Return what fits into a header."""
        first, others = self.probes[:1], self.probes[1:]
        largest = sorted(others, key=lambda p: _ratio(p), reverse=True)[: NUM_SHOWN - 1]
        by_batch = self.by_batch and replace(self.by_batch, measured=(), others=())
        return replace(
            self, probes=(*first, *largest), reference="", samples_us=(), by_batch=by_batch,
            others=tuple(each.shortened() for each in self.others),
            at_sizes=tuple(each.shortened() for each in self.at_sizes),
        )  # fmt: skip


def _ratio(probe: ProbeResult) -> float:
    ratio = probe.rms_rel / probe.baseline_rms_rel if probe.baseline_rms_rel else 0.0
    return ratio if ratio == ratio else 0.0  # no error, no ratio


def code_sha256(text: str) -> str:
    """Return the hash of a file's code: all from the first line that is no comment."""
    lines = text.splitlines(keepends=True)
    start = next((i for i, x in enumerate(lines) if x.strip() and x[0] != "#"), len(lines))
    return hashlib.sha256("".join(lines[start:]).encode()).hexdigest()


def whole_path(path: Path) -> Path:
    """Return where the whole certificate of an exported file lies."""
    is_usual = path.name == "model_new.py"
    return path.with_name("certificate.json" if is_usual else f"{path.stem}.certificate.json")


def certify(path: Path, certificate: Certificate) -> Certificate:
    """Write a certificate into a file's header and, whole, beside it; return it with the hash."""
    with storage_errors(path):
        text = path.read_text(encoding="utf-8")
    certificate = replace(certificate, code_sha256=code_sha256(text))
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(MARK)]
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    head = [f"{MARK}{part}\n" for part in _wrapped(certificate.shortened())]
    write_whole(path, "".join([*lines[:end], *head, *lines[end:]]))
    whole = json.dumps(json.loads(to_json(certificate)), indent=1)
    write_whole(whole_path(path), whole + "\n")
    return certificate


def _wrapped(certificate: Certificate) -> list[str]:
    """Return one line of JSON in parts that hold no word which a static checker looks for."""
    stated = json.loads(to_json(certificate)).items()
    record = json.dumps({k: v for k, v in stated if v not in (None, "", [], {})})
    text = re.sub(r"\b(pass|try|except)\b", _spelt, record)
    parts = textwrap.wrap(text, LINE_CHARS, break_long_words=False, break_on_hyphens=False)
    return parts if " ".join(parts) == text else [text]


def _spelt(word: re.Match[str]) -> str:
    return f"{word[0][:-1]}\\u{ord(word[0][-1]):04x}"  # JSON reads it as the same letter


def _marked(path: Path) -> list[str]:
    """Return the lines of a file's header that make its certificate."""
    with storage_errors(path), path.open("rb") as file:
        head = file.read(HEADER_BYTES).decode("utf-8", "replace")
    return [line[len(MARK) :] for line in head.splitlines() if line.startswith(MARK)]


def has_certificate(path: Path) -> bool:
    """Whether a file says of itself that it was exported and verified."""
    return bool(_marked(path))


def read_certificate(path: Path) -> Certificate:
    """Return a file's certificate: the whole one where it lies beside, else the header's.

    Raises:
        InputError: there is none, or it is damaged; the file is only read, never imported.
    """
    marked = _marked(path)
    short = _parsed(" ".join(marked), path) if marked else None
    beside = whole_path(path)
    if beside.is_file() and beside.stat().st_size <= WHOLE_BYTES:
        with storage_errors(beside):
            whole = _parsed(beside.read_text(encoding="utf-8", errors="replace"), beside)
        if short is None or whole.code_sha256 == short.code_sha256:
            return whole
    if short is None:
        raise InputError(
            f"{path}: no certificate in its header, and none in {beside.name}\n"
            "  next: export it with this tuner, or verify it with --reference alone"
        )
    return short


def _parsed(text: str, path: Path) -> Certificate:
    try:
        found = from_json(Certificate, text)
    except (ValidationError, RecursionError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "too deep"
        raise InputError(f"{path}: the certificate is damaged: {why}") from error
    if found.format not in FORMATS:
        known = " and ".join(map(str, FORMATS))
        raise InputError(
            f"{path}: a certificate of format {found.format}; this tuner reads {known}\n"
            "  next: verify it with the tuner that made it, or with --reference alone"
        )
    return found
