"""Tuners that share a GPU take turns: who times has it alone, who checks shares it.

Files of each GPU below `cache_folder()`, locked while it is used; whoever is killed lets go.

    device      held alone to time, shared to check
    memory-0 .. parts of its memory, held alone: one or a few to search, check or race, half, most
                or all of them for a question of a check that may take so much; the last parts are
                for who takes few, unless somebody needs them all
    check-0, .. held alone to check, by as many at a time as there are processors for
    heavy       held alone for a whole check whose questions take most of the memory
    ...-gate    held while waiting for one of these: who waits to be alone is not overtaken, who
                waits for memory after a while no longer
    user-...    held by each process that searches, checks, waits for that or races

Only tuners of one user on one machine see each other, and only where all name the GPU alike in
`CUDA_VISIBLE_DEVICES`. A CPU is not shared by turns: all that a machine does is on it.
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, flock
from pathlib import Path
from typing import IO

from tuner.machine.host import cache_folder, usable_cores
from tuner.machine.platforms import is_gpu, visible_as

__all__ = ["ALL", "HALF", "LITTLE", "MOST", "SOME", "Turns", "more_than", "turns_of"]

# Of the memory. Some is what a search or a race takes of which nothing is known; little is a part
# that the others are made of: who wants half of it waits for none of eight who have little. All of
# it is there when nobody else is at work; most of it leaves the parts of those who take few.
LITTLE, SOME, HALF, MOST, ALL = 0.0625, 0.25, 0.5, 0.75, 1.0
MEMORY_PARTS, PARTS_OF_FEW = 16, 4
LOOK_EVERY_S = 0.002
CHECKS_OF_OTHERS = 8  # that may come before one's own
# Most of a check is the work of four processes of the host, which wait for those who time for
# half of it. What takes all memory asks for it.
CORES_OF_A_CHECK, FEWEST_CHECKS, MOST_CHECKS = 2, 2, 8
OVERTAKEN_S = 15.0  # who waits for memory, by those who need no more of it than is free
HELD_S = 2.0  # of memory, before who can let it go for a while does, for one who waits
PATIENCE_S = 180.0  # more than one turn of any tuner takes that is not stopped, by Ctrl-Z say


@dataclass(slots=True)
class _Hold:
    """What the threads of a process hold together: the first takes it, the last lets it go."""

    stack: ExitStack = field(default_factory=ExitStack)
    num_users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def taken(self, take: Callable[[], None]) -> Iterator[None]:
        with self.lock:
            self.num_users += 1
            if self.num_users == 1:
                take()
        try:
            yield
        finally:
            with self.lock:
                self.num_users -= 1
                if self.num_users == 0:
                    self.stack.close()


def more_than(share: float) -> float:
    """Return which share of the memory to wait for where one did not suffice.

    It is half as much again at least, but as little as that: who waits for all of it stops all
    other tuners.
    """
    return next((more for more in (SOME, HALF, MOST) if 1.5 * share <= more), ALL)


def checks_at_once() -> int:
    """Return how many tuners check at a time on a GPU of this host."""
    return min(MOST_CHECKS, max(FEWEST_CHECKS, usable_cores() // CORES_OF_A_CHECK))


class Turns:
    """The turns of this process's threads on one device; without a folder nobody waits.

    Args:
        folder: where the files are, created when the first turn begins.
        patience_s: after which a turn begins in any case, and all later ones at once.
    """

    def __init__(self, folder: Path | None, patience_s: float = PATIENCE_S) -> None:
        self._folder = folder
        self._patience_s = patience_s
        self._waited_s = 0.0
        self._waiting_since: float | None = None
        self._memory, self._check, self._heavy = _Hold(), _Hold(), _Hold()
        self._shares: list[float] = []  # of the memory, of turns that have begun
        self._held_since_s = 0.0
        self._seen_as: set[Path] = set()

    def apart(self) -> Turns:
        """Return turns for a part of this process that waits for the rest of it as for others."""
        other = Turns(self._folder, self._patience_s)
        other._seen_as = self._seen_as
        return other

    @property
    def waited_s(self) -> float:
        """Seconds that this process has waited for others, until now."""
        since = self._waiting_since
        return self._waited_s + (0.0 if since is None else time.monotonic() - since)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the device alone, to time something; one thread of a process at a time."""
        with ExitStack() as stack:
            with self._waiting():
                self._take(stack, "device", LOCK_EX)
            yield

    @contextmanager
    def shared(self, *, is_counted: bool = False) -> Iterator[None]:
        """Use the device beside others that do not time anything.

        `is_counted`: to wait for it counts in `waited_s`; one thread of a process at a time.
        """
        with ExitStack() as stack:
            with self._waiting() if is_counted else nullcontext():
                self._take(stack, "device", LOCK_SH)
            yield

    @contextmanager
    def memory(self, share: float = SOME) -> Iterator[None]:
        """Use a share of the memory, beside others whose shares leave as much.

        Who uses it beside another thread of this process begins at once: that memory suffices for
        both is this process's affair.
        """
        num_parts = math.ceil(share * MEMORY_PARTS)

        def take() -> None:
            with self._waiting():
                self._take(
                    self._memory.stack, "memory", LOCK_EX,
                    num_places=MEMORY_PARTS, num_wanted=num_parts, num_of_few=PARTS_OF_FEW,
                    overtaken_s=OVERTAKEN_S,
                )  # fmt: skip
            self._be_seen(self._memory.stack)
            self._held_since_s = time.monotonic()

        with self._memory.taken(take):
            self._shares.append(share)
            try:
                yield
            finally:
                self._shares.remove(share)

    @contextmanager
    def checking(self, is_heavy: bool = False) -> Iterator[None]:
        """Check while few other tuners do; threads of this process do so side by side.

        What is heavy takes most of the memory again and again. Of such checks there is one at a
        time: two would wait for each other with each question, and what either keeps from question
        to question would be lacking to the other.
        """

        def alone() -> None:
            self._be_seen(self._heavy.stack)  # also while it waits
            self._take(self._heavy.stack, "heavy", LOCK_EX, CHECKS_OF_OTHERS)

        def take() -> None:
            self._be_seen(self._check.stack)
            self._take(
                self._check.stack, "check", LOCK_EX, CHECKS_OF_OTHERS, num_places=checks_at_once()
            )

        with self._heavy.taken(alone) if is_heavy else nullcontext(), self._check.taken(take):
            yield

    @property
    def num_checks(self) -> int:
        """How many threads of this process check now."""
        return self._check.num_users

    @property
    def are_taken(self) -> bool:
        """Whether there may be others, whose memory it is that is lacking."""
        return self._folder is not None

    @property
    def has_all_memory(self) -> bool:
        """Whether a turn of this process was taken for all of the memory."""
        return ALL in self._shares

    @property
    def has_others(self) -> bool:
        """Whether other tuners search, check or race on this device now."""
        if self._folder is None:
            return False
        others = {*self._folder.glob("user-*")} - self._seen_as
        return any([_is_held(file) for file in others])  # all: what nobody holds is removed

    @property
    def is_memory_wanted(self) -> bool:
        """Whether another tuner waits for memory that this one has."""
        if self._folder is None or not (self._folder / "memory-gate").is_file():
            return False
        with (self._folder / "memory-gate").open("a") as gate:
            try:
                flock(gate, LOCK_SH | LOCK_NB)
            except BlockingIOError:
                return True
            return False

    @property
    def gives_way(self) -> bool:
        """Whether memory should go to another tuner that waits for it, and be asked for again.

        Who waits for most of it holds up all that come later. What another thread of this process
        uses as well does not become free by that.
        """
        is_long = time.monotonic() > self._held_since_s + HELD_S
        return is_long and self._memory.num_users == 1 and self.is_memory_wanted

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waiting_since = begun_s = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None
            self._waited_s += time.monotonic() - begun_s

    def _be_seen(self, stack: ExitStack) -> None:
        """Hold a file that others look for, until the stack is closed."""
        if self._folder is None:
            return
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            place, name = tempfile.mkstemp(prefix="user-", dir=self._folder)
            file = Path(name)
            stack.callback(self._seen_as.discard, file)
            stack.callback(
                file.unlink, missing_ok=True
            )  # who saw it before it was held removed it
            stack.callback(os.close, place)
            self._seen_as.add(file)
            flock(place, LOCK_EX)

    def _take(
        self,
        stack: ExitStack,
        what: str,
        how: int,
        num_turns: int = 1,
        num_places: int = 1,
        num_wanted: int = 1,
        num_of_few: int = 0,
        overtaken_s: float = 0.0,
    ) -> None:
        """Take the lock of a file, or of as many as are wanted of several places, any of them.

        `num_turns` of others may be waited for without losing patience. The last `num_of_few`
        places are for those who want few, who pass the gate by while these are free. Who has
        waited at the gate for less than `overtaken_s` is overtaken by whom free places suffice.
        """
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            names = [what] if num_places == 1 else [f"{what}-{n}" for n in range(num_places)]
            files = [stack.enter_context((self._folder / name).open("a")) for name in names]
            few, rest = files[num_places - num_of_few :], files[: num_places - num_of_few]
            if num_wanted <= num_of_few // 2:
                if _lock_all(few, how, num_wanted):
                    return
                files = [*few, *rest]
            elif num_wanted <= len(rest):
                files = rest
            with (self._folder / f"{what}-gate").open("a") as gate:
                until_s = time.monotonic() + num_turns * self._patience_s
                has_gate, locked = False, set[IO[str]]()
                while True:
                    if not has_gate and _lock_some([gate], LOCK_EX, 1, set()):
                        has_gate = True
                        os.utime(gate.fileno())
                    is_new = time.time() < os.fstat(gate.fileno()).st_mtime + overtaken_s
                    if is_new:  # all of them may overtake who has the gate
                        has_all = _lock_all(files, how, num_wanted)
                    else:
                        has_all = has_gate and _lock_some(files, how, num_wanted, locked)
                    if has_all:
                        return
                    if time.monotonic() > until_s:
                        self._patience_s = 0.0
                        return
                    time.sleep(LOOK_EVERY_S)
        except OSError:  # a file system without locks, or a full one: as if there were one tuner
            self._folder = None


def _lock_some(files: Sequence[IO[str]], how: int, num_wanted: int, locked: set[IO[str]]) -> bool:
    """Lock what is free beside what is `locked`; return whether that is as much as is wanted."""
    for file in files:
        if len(locked) < num_wanted and file not in locked:
            with suppress(BlockingIOError):
                flock(file, how | LOCK_NB)
                locked.add(file)
    return len(locked) == num_wanted


def _lock_all(files: Sequence[IO[str]], how: int, num_wanted: int) -> bool:
    """Lock as many as are wanted, or none: who has the gate may be waiting for them."""
    locked: set[IO[str]] = set()
    if _lock_some(files, how, num_wanted, locked):
        return True
    for file in locked:
        flock(file, LOCK_UN)
    return False


def _is_held(file: Path) -> bool:
    """Whether a process holds its file; removes one whose process has ended."""
    try:
        with file.open("a") as opened:
            flock(opened, LOCK_EX | LOCK_NB)
            file.unlink(missing_ok=True)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@functools.cache
def turns_of(device: str) -> Turns:
    """Return this process's turns on a device, `cpu` or `cuda:0`."""
    if not is_gpu(device):
        return Turns(None)
    return Turns(cache_folder() / "turns" / visible_as([device], os.environ))
