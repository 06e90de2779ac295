"""Steps of training of an operator that was written by hand: its reference, captured like any.

A family names one call and how a module uses it; of gradients it needs to say nothing. What its
reference computes is derived as any module is, and files take steps of training by that.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tuner.capture.modules.rows_text import takes_generated_steps, why_no_steps
from tuner.config.run_config import load_config
from tuner.errors import InputError, MachineError, NothingToGainError, StorageError
from tuner.kernel.family import OwnSteps
from tuner.machine.host import modules_folder
from tuner.planning.deriving import derive_operator
from tuner.planning.observing import Observer
from tuner.planning.planning import Planned, plan
from tuner.problem.overrides import text_at
from tuner.problem.packages import text_of
from tuner.storage import storage_errors, write_whole
from tuner.trial import content_key
from tuner.wording import one_line

__all__ = ["with_own_steps"]


def with_own_steps(planned: Planned, observer: Observer) -> Planned:
    """Return the plan of an operator by hand whose files have kernels for steps of training.

    It stays as it is where the operator was captured from a module or offers gradients itself,
    in eval mode, where the config leaves them to PyTorch, and where its reference cannot be
    captured or its steps not be generated, which is said.

    Raises:
        StorageError: the cache cannot be written.
    """
    family, config = planned.family, planned.config
    is_by_hand = not takes_generated_steps(family.model_new) and "gradients" not in family.extra
    if not is_by_hand or config.problem.mode == "eval" or config.problem.steps == "pytorch":
        return planned
    observer.on_stage("capturing the reference, for kernels of steps of training")
    try:
        made = derive_operator(
            _at_sizes(planned), mode=config.problem.mode, match="none", has_eval=False
        )
        own = plan(load_config(made.config, {"device": config.device}))
        why = why_no_steps(own.family.model_new)
        if not why:
            candidate = own.family.render(own.defaults[0], own.facts)
            if candidate.plan.extra.get("gradients") is not None:
                steps = OwnSteps(own.family, candidate)
                return replace(planned, family=replace(family, steps=steps))
            why = f"template {candidate.template} has none"
    except StorageError:
        raise
    except (InputError, MachineError, NothingToGainError) as error:
        why = one_line(str(error), 200)
    observer.on_stage(f"steps of training take PyTorch's own operations: {why}")
    return planned


def _at_sizes(planned: Planned) -> Path:
    """Return a file of the reference in which the config's sizes stand."""
    reference, sizes = planned.reference, planned.config.problem.sizes
    if not sizes:
        return reference
    text = text_at(text_of(reference), sizes) + "\n"
    path = modules_folder() / "references" / content_key(text)[:12] / f"{planned.family.name}.py"
    with storage_errors(path, is_cache=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    return path
