"""Any module: from a file with a `Model` to the config of an operator that is derived from it.

The file's code runs in a process of its own. What is derived lies in the cache, by content, and
is an operator's folder like any: `tune --config` takes it, and an editor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from tuner.capture.any_batch import if_size, moved_rows, with_batch_numbers
from tuner.capture.by_hand import ByHand, written_by_hand
from tuner.capture.derive import Derived, derived, space_of_templates
from tuner.capture.modules.rows_text import has_rows, ways_in
from tuner.capture.nests.index_space import NothingToGenerate, NotOneNest
from tuner.capture.rewrites.rewriting import rewritten
from tuner.capture.steps.step_text import rows_of_steps
from tuner.capture.tasks.step_records import Captured
from tuner.config.document import read_document
from tuner.config.quantities import parse_choice, parse_mode, parse_rows
from tuner.errors import InputError, NothingToGainError, input_errors
from tuner.evaluate.contender import QUIET, import_ahead, importing_later
from tuner.evaluate.job_spec import explained, new_worker
from tuner.evaluate.worker import JobFailed, Worker, WorkerCrashed
from tuner.kernel.family import load_family
from tuner.machine.host import has_many_cores, modules_folder
from tuner.machine.importing import import_from
from tuner.machine.platforms import SOURCE_NAMES
from tuner.planning.matched import family_of, space_of_family
from tuner.planning.observing import Observer
from tuner.planning.planning import Planned
from tuner.problem.asked_once import conditions_in, data_line
from tuner.problem.packages import import_root, text_of
from tuner.problem.reference import ROWS
from tuner.storage import require_file, storage_errors, write_whole
from tuner.trial import from_json

__all__ = ["derive_config", "derive_operator", "edited_since", "start_by_hand", "write_sources"]

MODEL = "model_new.py"  # of an operator's folder
ORIGIN_NAME = "made_from.txt"  # beside the reference: the user's file, the last one of its text
CAPTURE_S = 300.0  # importing PyTorch and the file, and recording its forward


def derive_operator(
    path: Path,
    observer: Observer | None = None,
    *,
    mode: str | None = None,
    rewrites: str | None = None,
    match: str | None = None,
    batch: object = None,
    has_eval: bool = True,
) -> Derived:
    """Capture the forward of a KernelBench-format file; write an operator that computes it.

    Args:
        path: the file: `class Model`, `get_inputs()`, `get_init_inputs()`; trusted like code.
        observer: that it begins is reported to it.
        mode: in which it is captured, and tuned: "train", "eval", or None: as the constructor
            leaves it.
        rewrites: of its graph, "exact" or "none"; None is exact.
        match: "any": where the forward is a family's reference, the operator is that family's;
            "none": it is not looked at. None: that is reported, and the operator is generated.
        batch: how many rows (dim 0) inputs have, where it is not as many as the file gives: a
            whole number, or several as a list or as text (`64,1024`), of which the largest counts.
        has_eval: whether a module that is tuned in training has kernels for eval mode as well.

    Raises:
        InputError: the file cannot be used, its forward cannot be captured, or no kernel is
            generated for what it computes yet, or none for other numbers of rows.
        NothingToGainError: the forward is PyTorch's own operations alone.
        StorageError: the cache cannot be written.
    """
    require_file(path)
    import_from(path.parent, import_root(path))
    asked = _asked(path, mode, rewrites, match, batch, has_eval)
    observer = observer or Observer()
    folder = modules_folder()
    observer.on_stage(f"capturing the forward of {path}")
    if has_many_cores():  # on few, what a file that is refused never needs takes time from others
        import_ahead()
        # In this process PyTorch says how a captured operation is called. No daemon: an import
        # that is cut off where a process ends may crash it.
        Thread(target=import_module, args=("torch",), name="import").start()
    with importing_later(), new_worker("", name="capture", env=QUIET, is_ours=True) as worker:
        module = _Module(path, asked, observer, folder, _found(worker, path, asked))
        module.say_what_was_captured()
        if asked.match != "none":
            same = module.family(worker)
            if same is not None and asked.match:
                return same
    return module.generated()


@dataclass(frozen=True, slots=True)
class _Asked:
    """How a file is made an operator.

    Where `match` is None, what the file matches is said alone; where `most_rows` is, inputs have
    as many as it gives.
    """

    mode: str
    is_exact: bool
    match: str | None
    most_rows: int | None
    has_eval: bool


def _asked(
    path: Path,
    mode: str | None,
    rewrites: str | None,
    match: str | None,
    batch: object,
    has_eval: bool,
) -> _Asked:
    with input_errors(f"{path}: mode"):
        chosen = parse_mode(mode or "as_given")
    with input_errors(f"{path}: rewrites"):
        is_exact = parse_choice(rewrites or "exact", "exact", "none") == "exact"
    with input_errors(f"{path}: match"):
        matches = None if match is None else parse_choice(match, "any", "none")
    with input_errors(f"{path}: batch"):
        most_rows = None if batch is None else max(parse_rows(batch))
    return _Asked(chosen, is_exact, matches, most_rows, has_eval)


def _found(worker: Worker, path: Path, asked: _Asked) -> Mapping[str, Any]:
    """Return what a process of its own captures of a file."""
    try:
        job = {"path": str(path.resolve()), "mode": asked.mode, "batch": asked.most_rows}
        return worker.call("capture", job, timeout_s=CAPTURE_S).data
    except JobFailed as failure:
        raise explained(failure) from failure
    except WorkerCrashed as crash:
        line = data_line(text_of(path))
        if line is None:
            raise
        raise InputError(
            f"{path}:{line}: `.data` in a forward: PyTorch's own capture of it ended with its "
            f"process, {crash.reason}\n  next: write .detach() there, which is the same"
        ) from crash


class _Module:
    """A module whose forward was captured; what becomes of it is told to the observer."""

    def __init__(
        self, path: Path, asked: _Asked, observer: Observer, folder: Path, found: Mapping[str, Any]
    ) -> None:
        self._path, self._asked, self._observer, self._folder = path, asked, observer, folder
        self._found = found
        forwards = [from_json(Captured, json.dumps(f)) for f in found["forwards"]]
        if not asked.has_eval:
            forwards = [replace(forward, in_eval=None) for forward in forwards]
        if len(forwards) == 2:  # before it is rewritten: what both have in common may not stay so
            forwards = [*with_batch_numbers(*forwards)]
        self._forwards = forwards
        is_own = found["source"] == str(path.resolve())
        self._source = path if is_own else found["source"]  # where the class of a live one stands

    def say_what_was_captured(self) -> None:
        """Say of inputs, and of numbers of rows, that are other than the file's user may think."""
        for line, test in conditions_in(text_of(self._path)):
            self._say(
                f"line {line}: `{test}` is answered once, in the capture; where a call's answer "
                "is another one, kernels do not do what the module does, and are rejected"
            )
        if self._found["strided"]:
            names = ", ".join(self._found["strided"])
            self._say(
                f"{names}: not contiguous in get_inputs(); tuned, checked and timed "
                "as contiguous, so the speed-up is of calls with .contiguous()"
            )
        for other in self._forwards[1:]:
            if (most := other.graph.most_rows) is not None:
                self._say(
                    f"kernels are for up to {most} rows: forward does other work "
                    "with more, or counts rows further than floats are exact"
                )

    def family(self, worker: Worker) -> Derived | None:
        """Return the family that computes what the module does, and say so."""
        graphs = [forward.graph for forward in self._forwards]
        with storage_errors(self._folder, is_cache=True):
            same = family_of(self._path, worker, self._found, graphs, self._folder)
        if same is not None:
            is_taken = self._asked.match is not None
            taken = "its templates are searched" if is_taken else "--match any searches its own"
            self._observer.on_stage(
                f"{self._path.name} computes what {same.name} does ({same.matched}): {taken}"
            )
        return same

    def generated(self) -> Derived:
        """Return the operator, of the forward as it was rewritten where that can be."""
        try:
            if self._asked.is_exact:
                # Where nothing is generated for what it was rewritten to, it stays as it is.
                with suppress(NotOneNest, NothingToGenerate):
                    again = (f.with_forwards(rewritten) for f in self._forwards)
                    return self._written(*again)
            return self._written(*self._forwards)
        except NothingToGenerate as error:
            raise NothingToGainError(f"{self._path}: {error}", {}) from error
        except NotOneNest as error:
            by_hand = "write the operator by hand (CONTRIBUTING.md), or tune a part of it"
            advice = "" if "\n  next: " in str(error) else f"\n  next: {by_hand}"
            raise InputError(f"{self._source}: {error}{advice}") from error

    def _written(self, captured: Captured, *others: Captured) -> Derived:
        path, found = self._path, self._found
        with storage_errors(self._folder, is_cache=True):
            made = derived(
                captured, text_of(path), path.stem, found["settings"], found["has_modes"],
                self._folder, *others, beside=found["beside"],
                settings_in_eval=found["settings_in_eval"],
            )  # fmt: skip
            write_whole(made.folder / made.name / ORIGIN_NAME, str(path.resolve()))
            text = (made.folder / made.name / MODEL).read_text()
            if self._asked.most_rows is not None and not has_rows(text):
                raise InputError(
                    f"{self._source}: batch: its forward is generated for one number of rows "
                    "alone\n  next: leave batch out, and give inputs of that many rows"
                )
        if others and not has_rows(text):
            self._say(
                f"kernels are for {captured.graph.batch} rows alone: with others PyTorch's own "
                f"operations run{moved_rows(captured.graph, others[0].graph)}"
            )
        if found["has_modes"] and captured.graph.is_training and "eval" not in ways_in(text):
            self._say("calls in eval mode run PyTorch's own operations; --mode eval tunes those")
        if made.without_step:
            self._say(f"a step of training takes PyTorch's own operations: {made.without_step}")
        elif (rows := rows_of_steps(text)) is not None and has_rows(text):
            self._say(
                f"a step of training takes kernels at {rows} rows alone"
                + if_size(captured.graph, rows)
            )
        return made

    def _say(self, words: str) -> None:
        self._observer.on_stage(f"{self._path.name}: {words}")


def edited_since(reference: Path) -> Path | None:
    """Return the file that a module was captured from, where its text is another one now.

    Args:
        reference: of the operator that was derived from it; of any other it is None.
    """
    try:
        origin = Path(reference.with_name(ORIGIN_NAME).read_text(encoding="utf-8"))
        is_same = text_of(origin) == reference.read_bytes().decode()
    except (OSError, ValueError):
        return None
    return None if is_same else origin


def derive_config(
    path: Path,
    observer: Observer | None = None,
    *,
    mode: str | None = None,
    rewrites: str | None = None,
    match: str | None = None,
    batch: str | None = None,
) -> Path:
    """Return a config that names an operator in place of `problem: {module: FILE.py, mode: eval}`.

    `mode`, `rewrites`, `match` and `batch` stand in for the file's. All else that the file says
    holds: the space's values stand in for those that were derived. A config that names an operator
    itself is returned as it is, and so is one that cannot be read.

    Raises:
        InputError, StorageError: as for `derive_operator`; or the problem says more.
    """
    try:
        document = read_document(path, path.read_text())
    except (OSError, ValueError):
        return path  # who loads it says what is wrong
    given = document.data
    problem = given.get("problem") if isinstance(given, dict) else None
    if not isinstance(problem, dict) or "module" not in problem:
        for option, value in (("rewrites", rewrites), ("match", match)):
            if value is not None:
                raise InputError(
                    f"{path}: --{option}: expected a config of a module, got one of an operator\n"
                    "  next: leave the option out: an operator is neither rewritten nor matched"
                )
        return path
    more = sorted(map(str, problem.keys() - {"module", "mode", "rewrites", "match", "sizes"}))
    if more or not isinstance(problem["module"], str):
        raise InputError(
            f"{path}: problem: expected a module, mode, rewrites, match and sizes; "
            f"got {more or problem}\n"
            "  next: leave the rest out, for a module's templates are generated; or name an op "
            "without a module"
        )
    sizes = problem.get("sizes") or {}
    if not isinstance(sizes, dict) or sizes.keys() - {ROWS}:
        raise InputError(
            f"{path}: problem.sizes: expected {ROWS} alone, got {sizes}\n"
            f"  next: {ROWS} is how many rows inputs have; all else is as get_inputs() gives it"
        )
    module = path.parent / problem["module"]
    made = derive_operator(
        module,
        observer,
        mode=mode or problem.get("mode"),
        rewrites=rewrites or problem.get("rewrites"),
        match=match or problem.get("match"),
        batch=batch or sizes.get(ROWS),
    )
    own = json.loads(made.config.read_text())
    space = given.get("space")
    if space is None or isinstance(space, dict):
        given["space"], rules = _space(made, own["space"], space or {})
        if rules:
            given.setdefault("constraints", rules)
    given["problem"] = {**own["problem"], **({"sizes": sizes} if sizes else {})}
    given.setdefault("accuracy", own["accuracy"])
    search = given.get("search")
    if isinstance(search, dict) and isinstance(search.get("warm_start"), list):
        search["warm_start"] = [
            str((path.parent / str(p)).resolve()) for p in search["warm_start"]
        ]
    written = made.folder / path.name
    with storage_errors(made.folder, is_cache=True):
        write_whole(written, json.dumps(given, indent=1) + "\n")
    return written


def _space(
    made: Derived, own: Mapping[str, object], given: Mapping[str, object]
) -> tuple[object, object]:
    """Return a user's space, with ours for its templates where it says nothing, and our rules."""
    templates = given.get("template", own["template"])
    names = [str(n) for n in (templates if isinstance(templates, list) else [templates])]
    if made.matched:
        ours = space_of_family(load_family(made.name), names)
        return {**ours["space"], **given}, ours["constraints"]
    return {**space_of_templates(made.folder / made.name, names), **given}, []


def start_by_hand(
    path: Path,
    task: str | None,
    folder: Path | None = None,
    observer: Observer | None = None,
    *,
    mode: str | None = None,
    rewrites: str | None = None,
) -> ByHand:
    """Write an operator's folder for somebody who writes one task of a module by hand.

    Args:
        path: the file, as for `derive_operator`.
        task: its name, as `tune FILE.py --dry-run` shows it; None is an error that lists them.
        folder: to write to, new or empty; `<file>_by_hand` here unless named.
        observer: that it begins is reported to it.
        mode: as for `derive_operator`.
        rewrites: as for `derive_operator`.

    Raises:
        InputError: as for `derive_operator`; there is no such task, or the folder has files.
        NothingToGainError, StorageError: as for `derive_operator`.
    """
    made = derive_operator(path, observer, mode=mode, rewrites=rewrites, match="none")
    return written_by_hand(made, path, task, folder or Path(f"{path.stem}_by_hand"))


def write_sources(planned: Planned) -> dict[str, Path]:
    """Render each feasible template of a derived operator once; return where the texts stand.

    They lie beside the operator's folder, and are of the configurations nearest to the defaults.

    Raises:
        StorageError: they cannot be written.
    """
    folder = planned.family.model_file.parent.parent / "sources"
    written: dict[str, Path] = {}
    with storage_errors(folder, is_cache=True):
        folder.mkdir(exist_ok=True)
        for params in planned.defaults:
            candidate = planned.family.render(params, planned.facts)
            name = f"{candidate.template}{Path(SOURCE_NAMES[candidate.language]).suffix}"
            write_whole(folder / name, candidate.source)
            written[candidate.template] = folder / name
    return written
