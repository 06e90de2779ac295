"""From which number of rows on a file takes its kernels: measured, kept, written into the file.

It is measured before the file is checked, so that what is checked is what is kept. What was found
is on disk in `batches.jsonl`: a later session does not measure again, which would give another
file.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tuner.by_batch import ANY_ROWS, MOST, NO_ROWS, AtBatch, ByBatch, Way, rows_taken
from tuner.capture.modules.rows_text import has_rows, ways_in
from tuner.capture.steps.step_text import rows_of_steps
from tuner.choosing import decided
from tuner.errors import TunerError
from tuner.evaluate.contender import CALL_TIMEOUT_S
from tuner.evaluate.job_spec import asked, new_worker
from tuner.evaluate.worker import Worker
from tuner.kernel.compiler_words import require_disk
from tuner.machine.turns import turns_of
from tuner.planning.planning import Planned
from tuner.run import Run, RunWriter
from tuner.trial import from_json
from tuner.verification.exporting import ExportFile
from tuner.wording import one_line

__all__ = ["Batching", "seconds_for", "seconds_of"]

MEASURED_S = {"quick": 4.0, "normal": 6.0, "thorough": 15.0}  # by effort
USUAL_WAYS = 2  # to call a module: calls and steps
SHARE_OF_ORDINARY = 0.25  # of that, where the file is for ordinary data as well
MOST_S = 2 * CALL_TIMEOUT_S  # with all that is compiled at first calls


def seconds_of(planned: Planned) -> float:
    """Return what measuring one file takes, 0 where its sizes are fixed."""
    text = planned.family.model_new
    usual_s = MEASURED_S[planned.config.effort]
    return seconds_for(usual_s, ways_in(text), 1) if has_rows(text) else 0.0


def seconds_for(usual_s: float, ways: Sequence[Way], num_kernels: int) -> float:
    """Return what measuring a file of these ways and so many kernels takes."""
    return usual_s * max(1.0, len(ways) / USUAL_WAYS) * (1 + num_kernels) / 2


class Batching:
    """Measures files at many numbers of rows, each once.

    Args:
        run: where what was measured is read.
        writer: and written.
        on_stage: what begins is reported to it.
    """

    def __init__(self, run: Run, writer: RunWriter, on_stage: Callable[[str], None]) -> None:
        self._writer, self._on_stage = writer, on_stage
        self._found = {found.key: found for found in run.batches()}
        self._lock = threading.Lock()  # files may be checked side by side; these times are alone

    def known(self, file: ExportFile) -> ExportFile | None:
        """Return the file as it is kept, None where that has to be measured first."""
        if file.with_batches is None:
            return file
        found = self._found.get(file.key)
        return None if found is None else file.with_batches(found)

    def kept(self, file: ExportFile) -> ExportFile:
        """Return the file as it is kept; it must be compiled. What fails decides nothing."""
        with self._lock:
            known = self.known(file)
            if known is not None:
                return known
            assert file.with_batches is not None
            self._on_stage(f"timing {file.unverified_path.name} at other numbers of rows")
            file.write()
            found = self._measured(file)
            self._writer.append_batches(found)
            self._found[found.key] = found
        for line in found.words:
            self._on_stage(f"  {line}")
        return file.with_batches(found)

    def _measured(self, file: ExportFile) -> ByBatch:
        task, config = file.planned.spec, file.planned.config
        ways, num_kernels = file.ways, file.kernels.num_kernels if file.kernels else 1
        most_s = seconds_for(MEASURED_S[config.effort], ways, num_kernels)
        loads = {**task.payload(), "file": str(file.unverified_path), "ways": ways}
        asks: dict[str, object] = {"ways": ways}
        if rows_of_steps(file.planned.family.text_of_steps) is not None:
            asks["fixed"] = ["step"]  # elsewhere they are PyTorch's, which would be beside itself
        if file.kernels is not None:
            asks["tuned"] = file.kernels.rows
            if num_kernels > 1:
                loads["kernels"] = file.kernels.offers
        on_ordinary_s = SHARE_OF_ORDINARY * most_s if "ordinary" in config.others else 0.0
        asks["most_s"] = most_s - on_ordinary_s
        found = ByBatch(file.planned.sizes.get("batch", 1), key=file.key)
        failures: dict[str, str] = {}
        turns = turns_of(task.device).apart()
        try:
            # Of large outputs it holds as much as a check: who lacks memory waits for its end.
            held = turns.memory(task.memory_share)
            with held, new_worker(task.device, name="batches") as worker:
                about = asked(worker, "load_beside", loads, timeout_s=MOST_S).data
                found = replace(found, tuned_rows=about["num_rows"])
                with turns.alone():
                    data = asked(worker, "by_batch", asks, timeout_s=MOST_S).data
                    failures = data["failures"]
                    found = replace(
                        found, measured=_records(data), refuses_one=data["refuses_one"]
                    )
                    if on_ordinary_s:
                        found = _on_ordinary(worker, found, file, failures, on_ordinary_s)
        except TunerError as error:  # the check will say more of the file
            require_disk(str(error))
            failures = {way: one_line(str(error), 200) for way in ways}
        return _decided(found, file, failures)


def _records(data: dict[str, Any]) -> tuple[AtBatch, ...]:
    return tuple(from_json(AtBatch, json.dumps(at)) for at in data["measured"])


def _on_ordinary(
    worker: Worker, found: ByBatch, file: ExportFile, failures: dict[str, str], most_s: float
) -> ByBatch:
    """Time the fewest rows at which kernels would be taken on ordinary data as well.

    Where they lose there, more rows are the fewest, and so on, while there is time.
    """
    begun_s = time.monotonic()
    for num_ways, way in zip(range(len(file.ways), 0, -1), file.ways, strict=True):
        while True:
            decided_now = _decided(found, file, failures)
            fewest, _ = decided_now.rows.get(way, ANY_ROWS)
            mine = [at for at in found.measured if at.way == way]
            given = {at.num_rows for at in mine if not at.data}
            rows = min((n for n in given if n >= fewest), default=MOST)
            is_known = any(at.data and at.num_rows == rows for at in mine)
            left_s = (most_s - (time.monotonic() - begun_s)) / num_ways
            if rows >= found.tuned_rows or is_known or left_s <= 0.0:  # there it is raced on both
                break
            asks = {"rows": rows, "way": way, "most_s": left_s}
            try:
                reply = asked(worker, "on_ordinary", asks, timeout_s=MOST_S)
                more = _records(reply.data)
            except TunerError:  # of this data: what the given ones say stays
                return found
            if not more:
                break
            found = replace(found, measured=(*found.measured, *more))
    return found


def _decided(found: ByBatch, file: ExportFile, failures: dict[str, str]) -> ByBatch:
    if file.kernels is not None:
        found = decided(found, file.kernels)
        rows = dict(found.rows)
    else:
        rows = rows_taken(
            found.measured, found.tuned_rows, file.ways, refuses_one=found.refuses_one
        )
    only = rows_of_steps(file.planned.family.text_of_steps)
    if only is not None and "step" in file.ways:
        rows = rows or dict.fromkeys(file.ways, ANY_ROWS)
        fewest, most = rows.get("step", ANY_ROWS)
        rows["step"] = (only, only) if fewest <= only <= most else NO_ROWS
    if failures.get("step") == "" and rows:  # nothing has gradients
        rows["step"] = ANY_ROWS
    if all(each == ANY_ROWS for each in rows.values()) and not found.gaps:
        rows = {}
    note = "; ".join(f"{way}: {why}" for way, why in failures.items() if why)
    return replace(found, rows=rows, note=note)
