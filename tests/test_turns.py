"""Tuners that share a GPU: who times has it alone; real processes hold and wait."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest

from tuner.machine import platforms
from tuner.machine.turns import ALL, HALF, LITTLE, MOST, PARTS_OF_FEW, SOME, Turns, turns_of

HOLDER = """
import sys, time
from pathlib import Path
from tuner.machine.turns import Turns
turns = Turns(Path(sys.argv[1]))
ways = {
    "all": lambda: turns.memory(1.0), "half": lambda: turns.memory(0.5),
    "most": lambda: turns.memory(0.75),
    "some": turns.memory, "little": lambda: turns.memory(0.0625),
    "check": turns.checking, "heavy": lambda: turns.checking(True),
}
with ways.get(sys.argv[2], getattr(turns, sys.argv[2], None))():
    print("has it", flush=True)
    time.sleep(60)
"""
SHORT_S, LONG_S = 0.2, 30.0


@pytest.fixture
def held(tmp_path):
    """Let another process have the device, in a way; ends it."""
    processes = []

    def begin(how):
        command = [sys.executable, "-c", HOLDER, str(tmp_path), how]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "has it\n"
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


@contextmanager
def waiting_for(how, folder):
    """Let another process wait for memory, and end it at the end."""
    command = [sys.executable, "-c", HOLDER, str(folder), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            until_s = time.monotonic() + LONG_S
            while not Turns(folder).is_memory_wanted and time.monotonic() < until_s:
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


def begins(turn, within_s):
    """Whether a turn begins in that time; it goes on waiting if it does not."""
    begun, done = threading.Event(), threading.Event()

    def take():
        with turn():
            begun.set()
            done.wait(LONG_S)

    threading.Thread(target=take, daemon=True).start()
    has_begun = begun.wait(within_s)
    done.set()
    return has_begun


@pytest.mark.parametrize(
    ("theirs", "ours", "waits"),
    [
        ("alone", "alone", True), ("alone", "shared", True), ("shared", "alone", True),
        ("shared", "shared", False),
    ],
)  # fmt: skip
def test_who_times_waits_for_all_others_and_they_for_him(tmp_path, held, theirs, ours, waits):
    other = held(theirs)
    turns = Turns(tmp_path)
    assert begins(getattr(turns, ours), SHORT_S if waits else LONG_S) is not waits
    other.kill()  # in the middle of its turn
    other.wait()
    assert begins(getattr(turns, ours), LONG_S)


@pytest.mark.parametrize(
    ("theirs", "share", "waits"),
    [
        (["all"], ALL, True), (["all"], SOME, True), (["some"], ALL, True), (["half"], ALL, True),
        (["some"], SOME, False), (["half"], SOME, False), (["half"], HALF, True),
        (["half", "some"], SOME, True), (["half", "some"], LITTLE, False),
        (["some"] * 3, SOME, True), (["some"] * 3, 2 * LITTLE, False),
        (["some"] * 3 + ["little"] * 3, 2 * LITTLE, True),
        (["some"] * 3 + ["little"] * 4, LITTLE, True), (["most"], LITTLE, False),
        (["little"] * 4, MOST, False), (["little"] * 5, MOST, True), (["most"], SOME, True),
        (["little"] * 8, HALF, False), (["little"] * 9, HALF, True), (["little"], ALL, True),
        (["alone"], ALL, False), (["shared"], ALL, False),
    ],
)  # fmt: skip
def test_memory_is_shared_as_far_as_it_reaches(tmp_path, held, theirs, share, waits):
    others = [held(how) for how in theirs]
    turns = Turns(tmp_path)
    assert begins(lambda: turns.memory(share), SHORT_S if waits else LONG_S) is not waits
    for other in others:
        other.kill()
        other.wait()
    assert begins(lambda: Turns(tmp_path).memory(share), LONG_S)


def test_who_waits_for_memory_is_overtaken_for_a_while(tmp_path, held, monkeypatch):
    """Else all others would wait for a race of somebody, behind one who waits for it."""
    other = held("half")
    with waiting_for("half", tmp_path) as waiting:
        turns = Turns(tmp_path)
        with turns.memory():
            assert turns.is_memory_wanted
            monkeypatch.setattr("tuner.machine.turns.OVERTAKEN_S", 0.0)
            assert not begins(Turns(tmp_path).memory, SHORT_S)
        other.kill()
        assert waiting.stdout.readline() == "has it\n"


def test_who_waits_for_much_memory_is_not_overtaken_for_long(tmp_path, held, monkeypatch):
    monkeypatch.setattr("tuner.machine.turns.OVERTAKEN_S", 0.0)
    other = held("some")
    with waiting_for("all", tmp_path) as waiting:
        assert not begins(Turns(tmp_path).memory, SHORT_S)
        other.kill()
        assert waiting.stdout.readline() == "has it\n"
    assert begins(Turns(tmp_path).memory, LONG_S)


def test_memory_is_let_go_for_who_waits_unless_another_thread_uses_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tuner.machine.turns.HELD_S", 0.0)
    turns = Turns(tmp_path)
    with turns.memory():
        assert not turns.gives_way
        with waiting_for("all", tmp_path):
            assert turns.gives_way
            with turns.memory(LITTLE):
                assert not turns.gives_way


def test_who_takes_few_parts_waits_for_nobody_who_waits_for_more(tmp_path, held, monkeypatch):
    monkeypatch.setattr("tuner.machine.turns.OVERTAKEN_S", 0.0)
    held("half")
    with waiting_for("half", tmp_path):
        assert not begins(Turns(tmp_path).memory, SHORT_S)
        with ExitStack() as stack:
            for _ in range(PARTS_OF_FEW):
                stack.enter_context(Turns(tmp_path, patience_s=LONG_S).memory(LITTLE))
            assert not begins(lambda: Turns(tmp_path).memory(LITTLE), SHORT_S)


def test_two_tuners_check_at_a_time_and_others_search_meanwhile(tmp_path, held, monkeypatch):
    monkeypatch.setattr("tuner.machine.turns.usable_cores", lambda: 2)
    other, turns = held("check"), Turns(tmp_path)
    held("check")
    assert begins(turns.memory, LONG_S) and begins(turns.alone, LONG_S)
    assert not begins(turns.checking, SHORT_S)
    other.kill()
    other.wait()
    mine = Turns(tmp_path)
    with mine.checking():
        assert begins(mine.checking, LONG_S)
        assert not begins(Turns(tmp_path).checking, SHORT_S)
    assert begins(Turns(tmp_path).checking, LONG_S)


def test_one_heavy_check_at_a_time_beside_others(tmp_path, held):
    held("heavy")
    turns = Turns(tmp_path)
    assert turns.has_others
    assert not begins(lambda: turns.checking(True), SHORT_S)
    for way in (turns.checking, turns.shared, lambda: turns.memory(MOST)):
        assert begins(way, LONG_S)
    own = Turns(tmp_path / "own")
    with own.checking(True), own.checking(True):  # of several files of one tuner
        assert own.num_checks == 2 and not own.has_others


@pytest.mark.parametrize(("cores", "number"), [(1, 2), (5, 2), (7, 3), (64, 8)])
def test_as_many_check_at_a_time_as_there_are_cores_for(tmp_path, monkeypatch, cores, number):
    monkeypatch.setattr("tuner.machine.turns.usable_cores", lambda: cores)
    with ExitStack() as stack:
        for _ in range(number):
            stack.enter_context(Turns(tmp_path, patience_s=LONG_S).checking())
        assert not begins(Turns(tmp_path).checking, SHORT_S)
    assert begins(Turns(tmp_path).checking, LONG_S)


def test_others_that_search_check_or_race_are_seen(tmp_path, held):
    turns = Turns(tmp_path)
    with turns.memory():
        assert not turns.has_others
        other = held("some")
        assert turns.has_others
        other.kill()  # and leaves its file behind
        other.wait()
        assert len([*tmp_path.glob("user-*")]) == 2
        assert not turns.has_others
        assert len([*tmp_path.glob("user-*")]) == 1
    assert not turns.has_others and not [*tmp_path.glob("user-*")]
    held("shared")
    assert not turns.has_others
    held("check")
    assert turns.has_others


def test_a_part_of_a_process_waits_for_the_rest_of_it_and_is_no_other_tuner(tmp_path):
    turns = Turns(tmp_path)
    with turns.apart().memory():
        assert not turns.has_others
        assert not begins(lambda: turns.memory(ALL), SHORT_S)
    with turns.memory(ALL):
        assert not begins(lambda: turns.apart().memory(), SHORT_S)
    assert begins(lambda: Turns(tmp_path).memory(ALL), LONG_S)


def test_checks_of_one_process_do_not_wait_for_each_other(tmp_path, held):
    turns = Turns(tmp_path)
    with turns.memory(ALL):
        assert begins(lambda: turns.memory(ALL), LONG_S)
        with turns.shared():  # each question also takes the device
            pass
        assert not turns.is_memory_wanted
        command = [sys.executable, "-c", HOLDER, str(tmp_path), "some"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            until_s = time.monotonic() + LONG_S
            while not turns.is_memory_wanted and time.monotonic() < until_s:
                time.sleep(0.01)
            assert turns.is_memory_wanted
            other.kill()
    other = held("all")  # nothing is held any more
    assert not begins(turns.memory, SHORT_S)


def test_waiting_is_counted_while_it_lasts(tmp_path, held):
    other, turns = held("shared"), Turns(tmp_path)
    assert turns.waited_s < SHORT_S
    assert not begins(turns.alone, 2 * SHORT_S)
    assert turns.waited_s >= 2 * SHORT_S  # and goes on
    other.kill()
    other.wait()
    assert begins(turns.alone, LONG_S)
    before_s = turns.waited_s
    time.sleep(SHORT_S)
    assert turns.waited_s == before_s


def test_who_waits_to_be_alone_is_not_overtaken(tmp_path, held):
    other, turns = held("shared"), Turns(tmp_path)
    assert not begins(turns.alone, SHORT_S)  # it still waits
    assert not begins(Turns(tmp_path).shared, SHORT_S)
    other.kill()
    other.wait()
    assert begins(Turns(tmp_path).shared, LONG_S)


def test_a_tuner_that_was_stopped_is_not_waited_for_again_and_again(tmp_path, held):
    held("alone")
    turns = Turns(tmp_path, patience_s=SHORT_S)
    assert begins(turns.alone, LONG_S)
    before_s = turns.waited_s
    for _ in range(10):
        with turns.alone():
            pass
    assert turns.waited_s - before_s < 5 * SHORT_S


def test_nobody_waits_for_a_cpu_nor_where_nothing_can_be_locked(tmp_path, monkeypatch):
    with turns_of("cpu").alone(), turns_of("cpu").alone():
        pass
    (tmp_path / "file").write_text("")
    turns = Turns(tmp_path / "file" / "folder")
    with turns.alone(), turns.alone():
        pass


def test_a_gpu_is_known_by_its_visible_name(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-12")
    turns_of.cache_clear()
    for device, name in (("cuda:0", "3"), ("cuda", "3"), ("cuda:1", "GPU-12"), ("cuda:2", "2")):
        with turns_of(device).alone():
            assert (tmp_path / "tuner" / "turns" / name / "device").exists()
    turns_of.cache_clear()


@pytest.mark.parametrize(
    ("num_gpus", "given", "seen"),
    [(4, None, "0"), (4, "7, 9", "7"), (4, "", ""), (1, None, None), (0, None, None)],
)
def test_of_several_gpus_a_module_that_is_tuned_alone_sees_the_first(
    tmp_path, monkeypatch, num_gpus, given, seen
):
    """To start CUDA takes longer where it sees more."""
    monkeypatch.setenv(platforms.VISIBLE, "" if given is None else given)
    if given is None:
        monkeypatch.delenv(platforms.VISIBLE)
    for number in range(num_gpus):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(platforms, "GPU_FILES", str(tmp_path / "nvidia[0-9]*"))
    platforms.see_first_gpu()
    assert os.environ.get(platforms.VISIBLE) == seen
