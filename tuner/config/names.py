"""The names in a config, checked once the template family and the device are known."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tuner.config.run_config import RunConfig
from tuner.errors import ConfigError, did_you_mean
from tuner.problem.reference import ROWS
from tuner.space.expression import unknown_name
from tuner.trial import Value

__all__ = ["DEVICE_FACTS", "check_names", "unknown_values"]

DEVICE_FACTS = (  # of any kind of device; each device has those of its kind
    "device.kind",
    "device.memory_bytes",
    "device.l2_bytes",
    "device.capability",
    "device.num_sms",
    "device.smem_bytes_max",
    "device.smem_bytes_sm",
    "device.regs_per_sm",
    "device.max_threads_per_sm",
    "device.max_threads_per_block",
    "device.warp_size",
    "device.has_triton",
    "device.has_nvcc",
    "device.num_cores",
    "device.simd_bits",
    "device.simd_registers",
    "device.l3_bytes",
)


def check_names(
    config: RunConfig,
    *,
    sizes: Sequence[str],
    facts: Sequence[str],
    parameters: Sequence[str],
    renamed: Mapping[str, str],
    unused: Collection[str] = (),
) -> None:
    """Check every name of the config.

    Args:
        config: as read.
        sizes: names of the problem's sizes.
        facts: names of the device's facts; those of another kind of device are known as well.
        parameters: names that the templates in use have as parameters.
        renamed: what parameters were called by earlier releases, and are called now.
        unused: parameters of templates that the config leaves out, whose values it may keep.

    Raises:
        ConfigError: with every unknown size, parameter, and name in a `when` or constraint.
    """
    problems: list[tuple[int, str]] = []

    def report(place: str, message: str) -> None:
        problems.append((config.places.line(place), config.problem_at(place, message)))

    def unknown(name: str, known: Sequence[str]) -> str:
        if name not in renamed:
            return unknown_name(name, known)
        return f"unknown name {name!r}\n  hint: it is called {renamed[name]} now"

    for name in config.problem.sizes:
        if name not in (*sizes, ROWS):
            report(f"problem.sizes.{name}", unknown_name(name, sizes))
    declared = [parameter.name for parameter in config.space]
    for name in declared:
        if name not in (*parameters, *unused, "template"):
            message = unknown(name, parameters)
            report(f"space.{name}", message.replace("unknown name", "no template uses", 1))
    known = [*declared, *(["template"] if "template" not in declared else []), *sizes, *facts]
    rules = [(f"space.{p.name}.when", p.when) for p in config.space if p.when is not None]
    rules += [(f"constraints[{i}].expr", c.expression) for i, c in enumerate(config.constraints)]
    for place, rule in rules:
        for name in sorted(rule.names - {*known, *DEVICE_FACTS}):
            if name.startswith("device."):
                report(place, unknown_name(name, DEVICE_FACTS))
            elif name in parameters:
                hint = f"give {name} values under space"
                report(place, f"{name!r} is not among the parameters of space\n  hint: {hint}")
            else:
                report(place, unknown(name, known))
    if problems:
        in_order = sorted(problems, key=lambda problem: problem[0])
        raise ConfigError([text for _, text in in_order])


def unknown_values(
    config: RunConfig,
    known: Mapping[str, Sequence[Sequence[Value] | None]],
    renamed: Mapping[tuple[str, str], str],
) -> list[str]:
    """Name the values of the space that no template knows: no configuration will have them.

    Args:
        config: as read.
        known: by parameter, the values that each template in use lists; None where it takes any.
        renamed: what a parameter's values were called by earlier releases, and are called now.
    """
    found = []
    for parameter in config.space:
        lists = known.get(parameter.name, [None])
        values = list(dict.fromkeys(value for one in lists for value in one or ()))
        if None in lists:
            continue
        for value in parameter.values:
            if value not in values:
                near = did_you_mean(str(value), [str(one) for one in values])
                if now := renamed.get((parameter.name, str(value))):
                    near = f"it is called {now} now"
                found.append(
                    config.problem_at(
                        f"space.{parameter.name}",
                        f"no template in use knows {parameter.name} = {value!r}",
                        known=[str(one) for one in values],
                        hint=near or "remove it, or name a template that knows it",
                    )
                )
    return found
