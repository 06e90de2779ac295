"""A certificate says what was found, survives where it is written, and is put to the test."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import tune
from tiny_operator import REFERENCE

from tuner.by_batch import ByBatch
from tuner.errors import InputError
from tuner.evaluate.measure import ratio_interval
from tuner.export.certificate import (
    MARK,
    AtSize,
    Certificate,
    OnDataClaim,
    certify,
    code_sha256,
    read_certificate,
    whole_path,
)
from tuner.kernel.family import builtin_folder
from tuner.machine.limits import clocks_of
from tuner.session.tuning import verify_certificate
from tuner.storage import sha256_of
from tuner.trial import Check, Finalist, Interval, ProbeResult, to_json
from tuner.verification import recheck as room
from tuner.verification.recheck import Rechecked, reference_for

CODE = """
import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x + x
"""
TEXT = "# A module.\n# Deterministic: yes\n" + CODE


def probe(name: str, rms_rel: float = 1e-7, baseline: float = 2e-7) -> ProbeResult:
    return ProbeResult(name, rms_rel, 1e-6, baseline, 2e-6, True)


PROBES = tuple(probe(f"probe {n}", n * 1e-8) for n in range(9))
CERTIFICATE = Certificate(
    code_sha256="",
    reference_sha256=hashlib.sha256(REFERENCE.encode()).hexdigest(),
    device="cpu",
    accuracy="float32",
    seed=1234,
    num_probes=9,
    is_deterministic=False,
    sizes={"rows": 64},
    interval=Interval(1.5, 1.4, 1.6, 0.95, 3),
    latency_us=10.0,
    baseline_us=15.0,
    seconds=0.02,
    versions={"torch": "9.9", "note": "let it pass, try: except: nothing"},
    origin="run x, trial 3",
    command="tune verify model_new.py --certificate",
    probes=PROBES,
    reference=REFERENCE,
    samples_us=(((15.0, 15.1), (15.2, 15.0)), ((10.0, 10.1), (10.2, 10.0))),
)

SAMPLES_US = (
    ((15.0, 15.1, 15.2), (15.2, 15.0, 15.1), (15.1, 15.3, 15.0)),
    ((10.0, 10.1, 10.2), (10.2, 10.0, 10.1), (10.1, 10.0, 10.1)),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model_new.py"
    path.write_text(TEXT)
    return path


# ---- written and read -----------------------------------------------------------------------


def test_the_whole_of_it_lies_beside_and_the_short_form_in_the_header(file):
    certified = certify(file, CERTIFICATE)
    assert certified == replace(CERTIFICATE, code_sha256=code_sha256(TEXT))
    assert read_certificate(file) == certified
    beside = json.loads((file.parent / "certificate.json").read_text())
    assert len(beside["samples_us"][1]) == 2 and beside["reference"] == REFERENCE
    whole_path(file).unlink()
    short = read_certificate(file)
    assert short == certified.shortened() and not short.samples_us and not short.reference
    # The first probe, and those whose errors are largest beside the baseline's.
    assert [p.probe for p in short.probes] == ["probe 0", "probe 8", "probe 7"]
    assert short.interval == CERTIFICATE.interval and short.is_deterministic is False


def test_the_code_is_left_as_it_was_and_its_hash_with_it(file):
    certify(file, CERTIFICATE)
    text = file.read_text()
    assert text.endswith(CODE) and text.startswith("# A module.\n# Deterministic: yes\n" + MARK)
    assert code_sha256(text) == code_sha256(TEXT) == code_sha256(CODE)
    compile(text, "model_new.py", "exec")
    assert code_sha256(text.replace("x + x", "x * 2")) != code_sha256(text)
    assert all(len(line) <= 99 for line in text.splitlines() if line.startswith(MARK))


def test_certified_again_there_is_one_certificate(file):
    certify(file, CERTIFICATE)
    once = file.read_text()
    certify(file, replace(CERTIFICATE, seed=99))
    assert read_certificate(file).seed == 99
    assert file.read_text().count('"seed"') == 1 and code_sha256(file.read_text()) == (
        code_sha256(once)
    )


def test_no_word_that_a_static_checker_looks_for_stands_in_the_header(file):
    certify(file, CERTIFICATE)
    header = file.read_text().split("\nimport")[0]
    assert not re.search(r"\b(pass|try|except)\b", header)
    whole_path(file).unlink()
    assert read_certificate(file).versions == CERTIFICATE.versions


def test_text_that_cannot_be_wrapped_stays_in_one_line(file):
    odd = {"note": "two  spaces, a\ttab and " + "x" * 300}
    certify(file, replace(CERTIFICATE, versions=odd))
    whole_path(file).unlink()
    assert read_certificate(file).versions == odd


def test_an_export_of_another_name_has_a_certificate_of_its_own(tmp_path):
    assert whole_path(tmp_path / "model_new.py").name == "certificate.json"
    assert whole_path(tmp_path / "trial_7.py").name == "trial_7.certificate.json"


def test_a_certificate_of_another_file_beside_it_is_not_believed(file):
    certify(file, CERTIFICATE)
    other = replace(CERTIFICATE, code_sha256="0" * 64, seed=7)
    whole_path(file).write_text(to_json(other))
    assert read_certificate(file).seed == 1234


def test_a_file_without_one_is_refused_with_what_to_do(file):
    with pytest.raises(InputError, match=r"no certificate in its header.*\n  next: export it"):
        read_certificate(file)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "damaged: Invalid JSON"),
        ("{}", "damaged: Field required"),
        ('{"seed": "x"}', "damaged: "),
        ("[" * 5000, "damaged: "),
    ],
)
def test_a_damaged_one_is_refused_with_the_reason(file, line, reason):
    file.write_text(f"# A module.\n{MARK}{line}\n{CODE}")
    with pytest.raises(InputError, match=reason):
        read_certificate(file)


def test_one_of_another_format_is_refused(file):
    certify(file, replace(CERTIFICATE, format=3))
    with pytest.raises(InputError, match="format 3; this tuner reads 1 and 2\n  next: "):
        read_certificate(file)


# ---- the reference --------------------------------------------------------------------------


def test_the_reference_is_the_one_given_or_one_that_was_installed(tmp_path):
    mine = tmp_path / "mine.py"
    assert reference_for(CERTIFICATE, mine) == mine
    ours = sorted(builtin_folder().glob("*/reference.py"))[0]
    digest = hashlib.sha256(ours.read_bytes()).hexdigest()
    assert reference_for(replace(CERTIFICATE, reference_sha256=digest), None) == ours


def test_the_text_of_a_reference_in_a_certificate_is_never_taken():
    assert hashlib.sha256(CERTIFICATE.reference.encode()).hexdigest() == (
        CERTIFICATE.reference_sha256
    )
    with pytest.raises(InputError, match=r"never run\n  next: --reference REF\.py"):
        reference_for(CERTIFICATE, None)


# ---- point by point -------------------------------------------------------------------------


def test_errors_hold_while_they_do_not_grow():
    grown = {"as certified": 1.0, "smaller": 0.5, "a little": 1.2, "a quarter more": 1.3}
    for name, factor in grown.items():
        now = Check(True, "float32", probes=(probe("a"), probe("b", 3e-7 * factor)))
        then = replace(CERTIFICATE, probes=(probe("a"), probe("b", 3e-7), probe("not asked")))
        point = room._errors(then, now)
        assert point.holds == (factor < 1.25), name
        assert "2 probes compared" in point.detail
    none = room._errors(CERTIFICATE, Check(False, "float32", "no", probes=(probe("other"),)))
    assert none.holds is False


def test_an_error_where_there_was_none_is_growth():
    assert room._growth(0.0, 1e-9) == float("inf") and room._growth(0.0, 0.0) == 1.0
    assert room._growth(float("nan"), 1.0) == 1.0 and room._growth(1e-7, float("nan")) > 1e9


def test_a_rejection_is_reported_with_its_reason():
    point = room._accepted("right", Check(False, "float32", "offset: 3 elements"))
    assert point.holds is False and "offset: 3 elements" in point.detail
    assert Rechecked((point,)).holds is False


def test_notes_are_no_claims():
    note = room.Point("another torch", None, "", is_claim=False)
    assert Rechecked((note, room._same("x", "a", "a"))).holds


def interval(speedup: float, low: float, high: float) -> Interval:
    return Interval(speedup, low, high, 0.95, 5)


@pytest.mark.parametrize(
    ("then", "now", "holds", "why"),
    [
        ((1.5, 1.4, 1.6), (1.45, 1.35, 1.55), True, ""),
        ((4.18, 4.16, 4.20), (4.10, 4.08, 4.12), True, ""),  # nobody need know of 2 %
        ((1.5, 1.4, 1.6), (1.0, 0.95, 1.05), False, ""),
        ((900.0, 890.0, 910.0), (4.0, 0.2, 30.0), False, ""),
        ((1.0, 0.95, 1.05), (1.5, 1.4, 1.6), False, ""),  # neither may claim less
        ((50.0, 0.5, 60.0), (1.0, 0.98, 1.02), False, "claims nothing"),
        ((50.0, 0.5, 60.0), (1.0, 0.1, 90.0), False, "claims nothing"),
        ((2.2, 0.9, 3.5), (1.0, 0.95, 1.05), False, ""),  # today's lies within, the claim does not
        ((1.5, 1.4, 1.6), (1.4, 0.8, 2.4), None, "too wide to tell"),
        ((9.0, 8.0, 10.0), (1.4, 0.1, 20.0), False, "factor of two"),
        ((1.0, 0.9, 1.1), (9.0, 1.0, 90.0), False, "factor of two"),
        ((1.5, 0.0, float("inf")), (1.5, 1.4, 1.6), False, "no interval"),
        ((50.0, 0.9, 1.1), (1.0, 0.9, 1.1), False, "no interval"),
        ((1.5, 1.4, float("nan")), (1.5, 1.4, 1.6), False, "no interval"),
    ],
)
def test_a_speed_up_holds_where_claim_and_race_agree_both_ways(then, now, holds, why):
    point = room.compared(interval(*then), interval(*now))
    assert point.holds is holds and why in point.detail, point


def test_what_cannot_be_determined_is_no_success():
    reported = room.compared(interval(1.5, 1.4, 1.6), interval(1.4, 0.8, 2.4))
    assert reported.holds is None and reported.is_claim and not Rechecked((reported,)).holds


@pytest.mark.parametrize(
    ("then", "holds"),
    [
        ((1.0, 0.9, 1.1), True),
        ((0.91, 0.33, 2.54), True),
        ((1.3, 1.2, 1.4), False),
        ((50.0, 0.5, 60.0), False),
        ((0.8, 0.7, 0.9), False),
    ],
)
def test_a_file_of_pytorchs_own_modules_holds_where_it_claims_no_speed_up(then, holds):
    assert room.of_fallback(interval(*then)).holds is holds


def test_an_interval_is_computed_again_from_its_own_samples():
    pairs = [list(zip(*lanes, strict=True)) for lanes in zip(*SAMPLES_US, strict=True)]
    true = replace(CERTIFICATE, samples_us=SAMPLES_US, interval=ratio_interval(pairs))
    assert true.interval is not None
    (claim,) = room._claims(true)
    assert room._own_samples(claim).holds is True
    for forged in (replace(true.interval, speedup=50.0), replace(true.interval, high=60.0)):
        assert room._own_samples(replace(claim, interval=forged)).holds is False
    odd = replace(claim, samples_us=(SAMPLES_US[0], ((1.0,),)))
    assert room._own_samples(odd).holds is False
    short = room._own_samples(room._claims(true.shortened())[0])
    assert (short.holds, short.is_claim) == (None, False)


def test_each_of_several_sizes_is_a_claim_with_words_and_samples_of_its_own(file):
    pairs = [list(zip(*lanes, strict=True)) for lanes in zip(*SAMPLES_US, strict=True)]
    few = AtSize({"rows": 8, "cols": 3}, ratio_interval(pairs), 10.1, 15.1, 0, SAMPLES_US)
    many = replace(few, sizes={"rows": 64, "cols": 3})
    certify(file, replace(CERTIFICATE, sizes={"rows": 99, "cols": 3}, at_sizes=(few, many)))
    whole = read_certificate(file)
    own, *further = room._claims(whole)
    assert [claim.at for claim in (own, *further)] == [f" at rows = {n}" for n in (99, 8, 64)]
    assert [room._own_samples(claim).holds for claim in further] == [True, True]
    assert room._own_samples(further[0]).what == "the interval at rows = 8, from its own samples"
    whole_path(file).unlink()
    assert read_certificate(file).at_sizes == tuple(
        replace(one, samples_us=()) for one in (few, many)
    )
    (only,) = room._claims(CERTIFICATE)
    assert only.at == ""


def test_the_speed_up_on_other_data_is_a_claim_with_samples_of_its_own(file):
    pairs = [list(zip(*lanes, strict=True)) for lanes in zip(*SAMPLES_US, strict=True)]
    found = ratio_interval(pairs)
    others = (
        OnDataClaim("ordinary", "normal inputs", found, SAMPLES_US),
        OnDataClaim("file:mine.pt", "the tensors of mine.pt", found, SAMPLES_US, "abc"),
    )
    few = AtSize({"rows": 8}, found, samples_us=SAMPLES_US, others=others)
    certify(file, replace(CERTIFICATE, at_sizes=(few,), others=others))
    own, further = room._claims(read_certificate(file))
    assert [claim.at for claim in (*own.others, *further.others)] == [
        " at rows = 64 on ordinary data",
        " at rows = 64 on the tensors of mine.pt",
        " at rows = 8 on ordinary data",
        " at rows = 8 on the tensors of mine.pt",
    ]
    for claim in (*own.others, *further.others):
        assert room._own_samples(claim).holds is True
        forged = replace(claim, interval=replace(found, speedup=50.0))
        assert room._own_samples(forged).holds is False
    whole_path(file).unlink()
    short = read_certificate(file)
    assert (
        short.others
        == short.at_sizes[0].others
        == tuple(replace(other, samples_us=()) for other in others)
    )
    assert [claim.others for claim in room._claims(CERTIFICATE)] == [()]


def test_a_certificate_of_ordinary_data_alone_is_read(file):
    """As they were written before data had names: a field for them, and one for samples."""
    pairs = [list(zip(*lanes, strict=True)) for lanes in zip(*SAMPLES_US, strict=True)]
    others = (OnDataClaim("ordinary", "ordinary data", ratio_interval(pairs), SAMPLES_US),)
    few = AtSize({"rows": 8}, others[0].interval, samples_us=SAMPLES_US, others=others)
    named = ("given", "ordinary")
    today = replace(CERTIFICATE, at_sizes=(few,), others=others, workloads=named)
    written = certify(file, today)
    beside = json.loads(whole_path(file).read_text())
    for claim in (beside, *beside["at_sizes"]):
        (data,) = claim.pop("others")
        claim |= {"ordinary": data["interval"], "ordinary_samples_us": data["samples_us"]}
    whole_path(file).write_text(json.dumps(beside))
    assert read_certificate(file) == written


@pytest.mark.parametrize("name", ["sparser", "file:", "file:a/b.pt", "file:..\\x"])
def test_a_certificate_of_data_that_nobody_knows_is_damaged(file, name):
    certify(file, replace(CERTIFICATE, workloads=("given", "sparse")))
    beside = whole_path(file).read_text()
    whole_path(file).write_text(beside.replace('"sparse"', json.dumps(name)))
    with pytest.raises(InputError, match="the certificate is damaged"):
        read_certificate(file)


def test_a_file_that_falls_back_has_no_speed_up_on_any_data():
    same, fast = (Interval(x, 0.98 * x, 1.02 * x, 0.95, 3) for x in (1.0, 3.0))
    claim = room._Claim("", {}, same, ())
    sparse = room._Claim(" on sparse data", {}, fast, (), name="sparse")
    check = Check(True, "float32", "", (), is_thorough=True)
    entry = Finalist(0, check, same, falls_back=True)
    points = room._points_of(claim, [sparse], entry)
    assert [(point.what, point.holds) for point in points] == [
        ("the speed-up", True), ("the speed-up on sparse data", False),
    ]  # fmt: skip


def test_which_data_are_raced_again(tmp_path):
    interval = Interval(2.0, 1.9, 2.1, 0.95, 3)
    stored = tmp_path / "mine.pt"
    stored.write_bytes(b"numbers")
    sha256 = sha256_of(stored)
    claims = [
        room._Claim("", {}, interval, (), (
            room._Claim("", {}, interval, (), name="sparse"),
            room._Claim("", {}, interval, (), name="file:mine.pt", tensors_sha256=sha256),
        ))
    ]  # fmt: skip
    both = {"sparse": "", "file:mine.pt": str(stored)}
    assert room._raced_again(claims, tmp_path, None) == (both, [])
    where = {"given": "", "file:mine.pt": str(stored)}
    found, (point,) = room._raced_again(claims, tmp_path / "else", where)
    assert found == {"file:mine.pt": str(stored)}
    assert (point.what, point.is_claim) == ("the speed-up on sparse data", False)
    found, (point,) = room._raced_again(claims, tmp_path / "else", None)
    assert found == {"sparse": ""} and point.holds is None and point.is_claim
    assert "next: put it there, or --workloads given,sparse,file:PATH" in point.detail
    stored.write_bytes(b"others")
    found, (point,) = room._raced_again(claims, tmp_path, None)
    assert found == {"sparse": ""} and point.holds is False
    assert point.what == "the tensors of mine.pt" and point.detail.startswith("changed: ")
    with pytest.raises(
        InputError, match="offset is not in the certificate\n  known: given, sparse"
    ):
        room._raced_again(claims, tmp_path, {"given": "", "offset": ""})


def test_a_certificate_of_an_earlier_release_claims_the_largest_size_alone(file):
    by_batch = ByBatch(64, tuned=(8, 32, 64))
    certify(file, replace(CERTIFICATE, by_batch=by_batch))
    beside = json.loads(whole_path(file).read_text())
    del beside["at_sizes"]  # which it did not have
    whole_path(file).write_text(json.dumps(beside))
    old = read_certificate(file)
    assert old.at_sizes == () and [claim.sizes for claim in room._claims(old)] == [{"rows": 64}]
    assert room._without_claim(old).startswith("8, 32: no speed-up is claimed there")
    known = replace(old, at_sizes=(AtSize({"rows": 32}, CERTIFICATE.interval),))
    assert room._without_claim(known).startswith("8: no speed-up is claimed there")
    assert not room._without_claim(CERTIFICATE)


def test_more_sizes_than_anybody_tunes_are_damage(file):
    many = tuple(AtSize({"rows": n}, CERTIFICATE.interval) for n in range(1, 66))
    certify(file, replace(CERTIFICATE, at_sizes=many))
    with pytest.raises(InputError, match=r"the certificate is damaged: .*at most 64 items"):
        read_certificate(file)


def test_clocks_are_reported_with_their_unit_or_not_at_all():
    assert all(name.startswith("cpu_mhz") for name in clocks_of("cpu"))
    assert isinstance(clocks_of("cuda:0"), dict)


# ---- `tune verify FILE --certificate` -------------------------------------------------------

VERIFY = ("verify", "mine.py", "--certificate")


def test_a_forged_reference_is_never_run(tmp_path):
    """Its hash is right, for whoever forges the text forges the hash."""
    file = tmp_path / "mine.py"
    file.write_text(TEXT)
    text = f"open({str(tmp_path / 'it_ran')!r}, 'w').close()\n{REFERENCE}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    certify(file, replace(CERTIFICATE, reference=text, reference_sha256=digest))
    said = tune(*VERIFY, cwd=tmp_path)
    assert said.code == 2, said
    assert "code in a certificate is never run" in said.err and "--reference REF.py" in said.err
    assert not (tmp_path / "it_ran").exists()


def test_absurd_tolerances_in_a_certificate_are_damage(tmp_path):
    file, reference = tmp_path / "mine.py", tmp_path / "ref.py"
    file.write_text(TEXT)
    reference.write_text(REFERENCE)
    certify(file, replace(CERTIFICATE, accuracy="rtol=0.99,atol=1e30"))
    said = tune(*VERIFY, "--reference", "ref.py", cwd=tmp_path)
    assert said.code == 2 and "Traceback" not in said.err, said
    assert "the certificate is damaged: accuracy: expected 0 <= rtol <= 0.1" in said.err


@pytest.mark.usefixtures("few")
def test_it_says_point_by_point_what_holds_and_what_no_longer_does(tmp_path):
    """A plain module whose claim of speed never held; the rest of its claims are true."""
    file, reference = tmp_path / "mine.py", tmp_path / "ref.py"
    file.write_text(TEXT)
    reference.write_text(REFERENCE)
    forged = replace(
        CERTIFICATE,
        interval=Interval(50.0, 0.5, 60.0, 0.95, 2),
        probes=(probe("as given", 0.0),),
    )
    certify(file, forged)
    said = tune(*VERIFY, "--reference", "ref.py", cwd=tmp_path)
    assert said.code == 1, said
    lines = [re.split(r"\s{2,}|: ", line) for line in said.out.splitlines()]
    found = {parts[1]: parts[0] for parts in lines if len(parts) > 2 and parts[0]}
    assert found["the code"] == found["the reference"] == "holds"
    assert found["right on the certified probes (seed 1234)"] == "holds"
    assert found["the errors against float64"] == "holds"
    assert found["right on probes that nobody has seen"] == "holds"
    words = " ".join(said.out.split())
    claimed = "50.000x [2 processes differ too much for bounds]"
    assert f"no longer holds the speed-up: {claimed} then" in words
    assert "so wide that it claims nothing" in words
    assert "no longer holds the interval, from its own samples: claimed 50.000x" in words
    assert "note other sizes: rows = 64; they replace the reference's own" in words
    assert found["another torch"] == "note" and "9.9 then" in said.out
    assert said.out.endswith("accuracy class float32: 2 of its points no longer hold here\n")


@pytest.mark.usefixtures("few")
def test_each_tuned_size_is_raced_and_one_that_no_longer_holds_is_named(tmp_path):
    """Nobody doubles 16 rows a million times as fast; who is faster elsewhere does not matter."""
    file, reference = tmp_path / "mine.py", tmp_path / "ref.py"
    file.write_text(TEXT)
    reference.write_text(REFERENCE)
    absurd = Interval(1e6, 0.9e6, 1.1e6, 0.95, 3)
    on_ordinary = OnDataClaim("ordinary", "normal inputs", absurd)
    usual = AtSize({"rows": 32}, Interval(1.5, 1.0, 3.0, 0.95, 3), others=(on_ordinary,))
    forged = AtSize({"rows": 16}, absurd, samples_us=SAMPLES_US)
    by_batch = ByBatch(64, tuned=(8, 16, 32, 64))
    certify(file, replace(CERTIFICATE, at_sizes=(forged, usual), by_batch=by_batch))
    said = tune(*VERIFY, "--reference", "ref.py", cwd=tmp_path)
    assert said.code == 1, said
    lines = [" ".join(line.split()) for line in said.out.splitlines()]

    def of(what: str) -> str:
        (line,) = [line for line in lines if f" {what}: " in line]
        return line

    assert of("the speed-up at rows = 16").startswith("no longer holds ")
    assert "1000000.000x [900000.000, 1100000.000] then" in of("the speed-up at rows = 16")
    ordinary = of("the speed-up at rows = 32 on ordinary data")
    assert ordinary.startswith("no longer holds ") and re.search(r"\] then, \d.*\] now", ordinary)
    for rows in (16, 32, 64):
        assert re.search(r"\] then, \d.*\] now", of(f"the speed-up at rows = {rows}"))
    assert of("the interval at rows = 16, from its own samples").startswith("no longer holds ")
    assert of("the interval at rows = 32, from its own samples").startswith("note ")
    assert of("other tuned rows").startswith("note other tuned rows: 8: no speed-up is claimed")
    races = [line for line in lines if "racing the file" in line]
    assert [line.rpartition(" = ")[2] for line in races] == ["64", "16", "32"]


def test_a_file_that_was_edited_is_found_out_and_judged(tmp_path):
    file, reference = tmp_path / "mine.py", tmp_path / "ref.py"
    file.write_text(TEXT)
    reference.write_text(REFERENCE)
    certify(file, CERTIFICATE)
    file.write_text(file.read_text().replace("x + x", "x + 1.001 * x"))
    said = tune(*VERIFY, "--reference", "ref.py", cwd=tmp_path)
    assert said.code == 1, said
    assert "no longer holds  the code: changed: sha256" in said.out
    assert "no longer holds  right on the certified probes (seed 1234): as given: " in said.out
    assert "nobody has seen" not in said.out


def test_arguments_that_cannot_be_used_are_refused(tmp_path):
    (tmp_path / "mine.py").write_text(TEXT)
    both = tune("verify", "mine.py", "--certificate", "--accuracy", "tf32", cwd=tmp_path)
    assert both.code == 2 and "names its own accuracy class" in both.err
    with pytest.raises(InputError, match="no certificate in its header"):
        verify_certificate(tmp_path / "mine.py")
    with pytest.raises(InputError, match=r"r\.py: no such file"):
        verify_certificate(tmp_path / "mine.py", reference=tmp_path / "r.py")
