"""Names that the texts of templates and exported files keep for themselves."""

from __future__ import annotations

import keyword
from collections.abc import Mapping

__all__ = ["FREE_NAMES", "refusal_of"]

# What every text may use beside its parameters.
FREE_NAMES = {"params", "op", "call_operands", "call_functions"}

# Names of tensors, numbers and sizes become variables of the exported file.
_RESERVED = {
    "stream": "it is the CUDA stream, which every function of CUDA gets last",
    "num_threads": "it is how many threads PyTorch uses, which any step may name",
    "null": "it is a tensor that is absent, in the arguments of a step",
    "guard": "the exported file guards the device by it",
    "torch": "the exported file needs PyTorch by it",
    **dict.fromkeys(
        ("prepared", "expect", "finished", "dense", "Pointer"),
        "the exported file has a function of it",
    ),
    **dict.fromkeys(("cdiv", "min", "max"), "it is a function of the expressions"),
}
_RESERVED_PARAMETERS = {
    "num_threads": _RESERVED["num_threads"],
    "template": "it is the parameter that picks the template",
    "params": "the text has all parameters under it",
    "op": "the text has the operator's name under it",
}
_CPP_WORDS = """
alignas alignof asm auto bool break case catch char class const constexpr const_cast
continue decltype default delete do double dynamic_cast else enum explicit export extern
false float for friend goto if inline int long mutable namespace new noexcept nullptr
operator private protected public register reinterpret_cast return short signed sizeof
static static_assert static_cast struct switch template this throw true try typedef
typeid typename union unsigned using virtual void volatile wchar_t while and or not xor
"""


def refusal_of(
    name: str, taken: Mapping[str, str], *, is_parameter: bool = False
) -> tuple[str, str] | None:
    """Return why a name cannot be given, and which ones cannot either; None for one that can.

    Args:
        name: of a tensor, a number or a size; or of a parameter, which is no variable of C++.
        taken: what has its names already, by name.
        is_parameter: of a template.
    """
    if not name.isidentifier():
        return f"this name is no identifier: {name!r}", "expected: letters, digits and _"
    if name in taken:
        return f"this name is taken: it is {taken[name]}", "next: choose another name"
    reserved = _RESERVED_PARAMETERS if is_parameter else _RESERVED
    listed = f"reserved: {', '.join(sorted(reserved))}, and the words of "
    listed += "Python" if is_parameter else "C++ and Python"
    if name in reserved:
        return f"this name is reserved: {reserved[name]}", listed
    if keyword.iskeyword(name) or (not is_parameter and name in _CPP_WORDS.split()):
        language = "Python" if keyword.iskeyword(name) else "C++"
        return f"this name is reserved: it is a word of {language}", listed
    return None
