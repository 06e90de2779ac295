"""Pointwise work behind a large product, as the epilogue of the kernel that makes the product.

Behind a product of matrices it is a class of CUDA C++ beside `templates/_lib/wgmma_halves.cuh`,
which calls it with each value and its place; behind a convolution it is a function of Triton that
`templates/_lib/triton_convolutions.py` calls with a block of values, and such a class beside
`templates/_lib/wgmma_images.cuh`. What the work reads besides lies as the product does, or varies
over its rows or its columns alone: in an image over some of samples, channels and pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

from tuner.capture.nests.batch_numbers import BatchNumber
from tuner.capture.nests.nest import COLUMN, Nest, Statement, emitted
from tuner.capture.nests.operations import OPERATIONS, converted, operation_of
from tuner.capture.tasks.convolutions import is_convolution
from tuner.capture.tasks.library import Call
from tuner.capture.tasks.stages import Stages
from tuner.trial import Language

__all__ = [
    "MATRICES", "computed", "cuda_text", "epilogue_of", "is_computable", "place_of_number",
    "python_text", "started_by", "tasks_behind",
]  # fmt: skip


def epilogue_of(stages: Stages, call: Call, results: Container[str]) -> Nest | None:
    """Return the nest that can be a product's epilogue: the next task, which alone reads it.

    Args:
        stages: of the graph.
        call: the product.
        results: what the graph gives, which is stored.
    """
    behind = tasks_behind(stages, call)
    if not behind or not isinstance(behind[0], Nest) or call.name in results:
        return None
    nest, later = behind[0], behind[1:]
    later_reads = {n for t in later if isinstance(t, Nest) for n in (a.name for a in t.arguments)}
    later_reads |= {n for t in later if isinstance(t, Call) for n in t.reads}
    (output, *others), num = nest.outputs, math.prod(call.shape)
    is_one = not (
        others or nest.reductions or nest.scans or nest.taps or nest.parts or len(nest.passes) > 1
    )
    is_plain = not (nest.is_wide or nest.is_transposed or nest.space.last)
    if call.name in later_reads or not is_one or not is_plain or output.dtype != "float32":
        return None
    if math.prod(nest.space.sizes) != num or output.count != num:
        return None
    is_known = is_computable(_statements(nest))
    read = [*(t.name for t in nest.arguments), *nest.indices]
    found: Mapping[str, object]
    if is_convolution(call):
        found = {name: _image_place(nest, name, call) for name in read}
        sizes = (*call.shape[:2], math.prod(call.shape[2:]))
        is_whole = found.get(call.name) == tuple(size > 1 for size in sizes) and not nest.indices
    else:
        places = {name: place_of_number(nest, name, call.shape[-1]) for name in read}
        found, is_whole = places, places.get(call.name) == _PLACES[True, True]
    is_read = None not in found.values() and {t.dtype for t in nest.arguments} == {"float32"}
    return nest if is_known and is_read and is_whole else None


def tasks_behind(stages: Stages, call: Call) -> Sequence[Nest | Call]:
    """Return the tasks that follow a product, but for operands of others that are turned first."""
    behind = stages.tasks[stages.tasks.index(call) + 1 :]
    for place, task in enumerate(behind):
        if not isinstance(task, Call) or task.function != "permute" or call.name in task.reads:
            return behind[place:]
    return ()


def is_computable(statements: Sequence[Statement]) -> bool:
    """Whether an epilogue can compute statements.

    A number that depends on the batch is computed from sizes, which an epilogue has not.
    """
    operands = [o for s in statements for o in s.operands]
    is_known = COLUMN not in operands and all(s.op in OPERATIONS for s in statements)
    return is_known and not any(isinstance(operand, BatchNumber) for operand in operands)


# Where an element lies, by whether it varies over rows and over columns.
_PLACES = {
    (True, True): "row * columns + column",
    (True, False): "row",
    (False, True): "column",
    (False, False): "0",
}


def place_of_number(nest: Nest, name: str, columns: int) -> str | None:
    """Return where a value's number for a row and a column of a product lies in memory.

    None where that is not as simple.
    """
    sizes, varies = nest.space.sizes, nest.space.varies[name]
    cuts = [k for k in range(len(sizes) + 1) if math.prod(sizes[k:]) == columns]
    if len(cuts) != 1:
        return None
    own = [{*range(cuts[0])}, {*range(cuts[0], len(sizes))}]  # rows, columns
    if any(varies & part not in (set(), part) for part in own):
        return None
    rows, cols = (bool(varies & part) for part in own)
    return _PLACES[rows, cols]


# The same of an image, by whether it varies over samples, channels and pixels, and what is there.
_IMAGE_PLACES = {
    (True, True, True): ("first[None, :] * MADE + pixel[:, None]", "inside"),
    (True, True, False): ("first[None, :]", "is_column[None, :]"),
    (True, False, True): (
        "tl.cast(sample, tl.int64) * MADE + pixel[:, None]",
        "is_pixel[:, None]",
    ),
    (True, False, False): ("sample", ""),
    (False, True, True): ("column[None, :] * MADE + pixel[:, None]", "inside"),
    (False, True, False): ("column[None, :]", "is_column[None, :]"),
    (False, False, True): ("pixel[:, None]", "is_pixel[:, None]"),
    (False, False, False): ("0", ""),
}
# The same in CUDA C++, of one value.
_IMAGE_PLACES_OF_ONE = {
    (True, True, True): "(sample * columns + column) * made + pixel",
    (True, True, False): "sample * columns + column",
    (True, False, True): "sample * made + pixel",
    (True, False, False): "sample",
    (False, True, True): "column * made + pixel",
    (False, True, False): "column",
    (False, False, True): "pixel",
    (False, False, False): "0",
}


def _image_place(nest: Nest, name: str, call: Call) -> tuple[bool, bool, bool] | None:
    """Return over which of an image's samples, channels and pixels a value varies, or None.

    A dimension of the nest may be several of these where all values vary alike over them.
    """
    ends = [1, call.shape[0], math.prod(call.shape[:2]), math.prod(call.shape)]
    varies, before = nest.space.varies[name], 1
    found: list[set[bool]] = [set(), set(), set()]
    for dim, size in enumerate(nest.space.sizes):
        after = before * size
        for which in range(3):
            if before < ends[which + 1] and after > ends[which]:
                found[which].add(dim in varies)
        before = after
    if any(len(each) > 1 for each in found):
        return None
    samples, channels, pixels = (True in each for each in found)
    return samples, channels, pixels


def _statements(nest: Nest) -> list[Statement]:
    return [*nest.before, *nest.passes[0].statements]


def _half_plane(nest: Nest, call: Call) -> tuple[str, bool, list[Statement]] | None:
    """Return the mask by which alone a product is read, where that is half of its places.

    So for `triu` and `tril`. With the mask are the value at which the product is read, and the
    statements that the mask needs. It compares a sum of multiples of row and column with a number:
    where no corner of a rectangle of places is read, none of it is.
    """
    linear, masks = {*nest.indices}, set[str]()
    found: list[Statement] = []
    for statement in _statements(nest):
        names = statement.refs
        is_sum = statement.op in ("add", "sub")
        is_multiple = statement.op == "mul" and len(names) == 1
        if not linear.issuperset(names):
            continue
        if is_sum or is_multiple:
            linear.add(statement.name)
        elif statement.op in ("ge", "gt", "le", "lt"):
            masks.add(statement.name)
        else:
            continue
        found.append(statement)
    readers = [s for s in _statements(nest) if call.name in s.operands]
    if [s.op for s in readers] != ["where"] or nest.outputs[0].name == call.name:
        return None
    mask, *branches = readers[0].operands
    if not isinstance(mask, str) or mask not in masks or branches.count(call.name) != 1:
        return None
    return mask, branches[0] == call.name, found


def computed(
    nest: Nest, names: dict[str, str], language: Language, statements: Sequence[Statement]
) -> Iterator[tuple[str, str]]:
    """Yield kind and text of each statement, whose value is then called `v0`, `v1`, ..."""
    for i, statement in enumerate(statements):
        value = emitted(statement, nest, names.__getitem__, language)
        names[statement.name] = f"v{i}"
        yield "bool" if operation_of(statement.op).gives == "mask" else "float", value


# What an epilogue in CUDA C++ is given of a value's place.
_PLACE = ("row", "column", "columns")
_PLACE_IN_IMAGE = ("sample", "column", "pixel", "columns", "made")
# Functions that start a product with an epilogue: what is behind their names, what their arguments
# are called, what starts it, and kinds and names of what they are given behind the epilogue's own.
# The last two are there where the weight is converted. Products of pieces have no epilogue, but
# what adds them up has.
_IMAGES = (
    ("", "IMAGE", "images::convolution", (("const int64_t*", "numbers"), ("int64_t", "count"))),
)
MATRICES = (
    ("", "PRODUCT", "halves::product",
     (("int64_t", "rows"), ("int64_t", "columns"), ("int64_t", "padded"),
      ("int64_t", "x_batches"), ("int64_t", "w_batches"))),
    ("_in_pieces", "PIECES", "halves::sum_of_pieces",
     (("int64_t", "rows"), ("int64_t", "columns"), ("int64_t", "pieces"))),
    ("_converted", "CONVERTED", "converted::product",
     (("int64_t", "rows"), ("int64_t", "columns"), ("int64_t", "depth"))),
    ("_turned", "TURNED", "converted::turned_product",
     (("const int64_t*", "numbers"), ("int64_t", "count"))),
)  # fmt: skip


def cuda_text(nest: Nest, call: Call, function: str) -> str:
    """Return the epilogue's class, and the functions that a product with it is started by.

    Args:
        nest: the epilogue.
        call: the product, or the convolution.
        function: the name of the function.
    """

    def placed(name: str) -> str | None:
        if not is_image:
            return place_of_number(nest, name, call.shape[-1])
        varies = _image_place(nest, name, call)
        return None if varies is None else _IMAGE_PLACES_OF_ONE[varies]

    is_image = is_convolution(call)
    given = [t.name for t in nest.arguments if t.name != call.name]
    names = {call.name: "sum"} | {name: f"a{i}" for i, name in enumerate(given)}
    lines = [f"struct {function}_epilogue {{"]
    lines += [f"  const float* g{i};" for i in range(len(given))]
    where = _PLACE_IN_IMAGE if is_image else _PLACE
    lines += [
        "  __device__ __forceinline__ float operator()(",
        f"      float sum, {', '.join(f'int64_t {name}' for name in where)}) const {{",
    ]
    for i, name in enumerate(given):
        lines.append(f"    const float a{i} = __ldg(g{i} + {placed(name)});")
    for i, name in enumerate(nest.indices):
        names[name] = f"i{i}"
        lines.append(f"    const float i{i} = static_cast<float>({placed(name)});")
    for i, (kind, text) in enumerate(computed(nest, names, "cuda", _statements(nest))):
        lines.append(f"    const {kind} v{i} = {text};")
    output = nest.outputs[0].name
    kinds = nest.kinds.get(output, "float")
    lines += [f"    return {converted(names[output], kinds, 'float', 'cuda')};", "  }"]
    if not is_image:
        lines += ["  static constexpr bool kHasMoments = false;"]
        lines += _reads_text(nest, call, placed)
    lines.append("};")
    pointers = [("const float*", f"g{i}") for i in range(len(given))]
    lines += started_by(function, pointers, _IMAGES if is_image else MATRICES)
    return "\n".join(lines) + "\n"


def started_by(
    function: str,
    pointers: Sequence[tuple[str, str]],
    starts: Sequence[tuple[str, str, str, Sequence[tuple[str, str]]]],
) -> Iterator[str]:
    """Write the functions that start a product with an epilogue.

    Args:
        function: its name; `<function>_epilogue` is the epilogue's class.
        pointers: kinds and names of the epilogue's members, in order.
        starts: such as `MATRICES`.
    """
    for behind, what, product, sizes in starts:
        yield from (f"#ifdef {what}_ARGUMENTS", f'extern "C" const char* {function}{behind}(')
        more = ", ".join(" ".join(each) for each in (*pointers, *sizes))
        yield from (f"    {what}_ARGUMENTS, {more},", "    void* stream) {")
        members = ", ".join(name for _, name in pointers)
        yield f"  const {function}_epilogue epilogue = {{{members}}};"
        own = ", ".join(name for _, name in sizes)
        yield from (f"  return {product}({what}_NAMES, epilogue, {own}, stream);", "}", "#endif")


def _reads_text(nest: Nest, call: Call, placed: Callable[[str], str | None]) -> list[str]:
    """Return a method that tells whether the product's value at a place is read."""
    half = _half_plane(nest, call)
    names = {name: f"i{i}" for i, name in enumerate(nest.indices)}
    where = _PLACE if half else ("", "", "")
    lines = [
        "  __device__ __forceinline__ bool reads(",
        f"      {', '.join(f'int64_t {name}'.strip() for name in where)}) const {{",
    ]
    if half is None:
        return [*lines, "    return true;", "  }"]
    mask, value, statements = half
    for name, own in names.copy().items():
        lines.append(f"    const float {own} = static_cast<float>({placed(name)});")
    for i, (kind, text) in enumerate(computed(nest, names, "cuda", statements)):
        lines.append(f"    const {kind} v{i} = {text};")
    return [*lines, f"    return {'' if value else '!'}{names[mask]};", "  }"]


def python_text(
    nest: Nest, call: Call, function: str, apart: str, host: str
) -> tuple[str, list[str]]:
    """Return the function that a step calls, and the values that it is given besides, in order.

    Args:
        nest: the epilogue.
        call: the product.
        function: the name of both functions, of Python and of CUDA C++.
        apart: the function of the nest's own kernel, for products too small for ours.
        host: the function that starts products or convolutions.
    """
    given = [t.name for t in nest.arguments if t.name != call.name]
    words = {call.name: "made"} | {name: f"given[{i}]" for i, name in enumerate(given)}
    arguments = ", ".join([*(words[t.name] for t in nest.arguments), "out", "rows", "cols"])
    if is_convolution(call):
        own = "".join(f"g{i}, " for i in range(len(given)))
        own_cuda = f', function="{function}"' if host == "convolution_by_wgmma" else ""
        text = f"""

{_triton_text(nest, call, function, given)}

def {function}(x, filters, bias, out, rows, cols, {own}*how):
    given = ({own})
    {host}(
        x, filters, bias, out, *how, epilogue={function}_epilogue, given=given,
        apart=lambda made: {apart}({arguments}){own_cuda},
    )
"""
        return text, given
    return (
        f'''

@replayed
def {function}(
    x, weight, bias, out, num_rows, num_columns, depth, x_turned, weight_turned, rows, cols, *given
):
    {host}(
        x, weight, bias, out, num_rows, num_columns, depth, x_turned, weight_turned,
        "{function}", given, lambda made: {apart}({arguments}),
    )
''',
        given,
    )


def _triton_text(nest: Nest, call: Call, function: str, given: Sequence[str]) -> str:
    """Return the epilogue of a convolution: of a block of pixels and channels of a sample."""
    names = {call.name: "value"} | {name: f"a{i}" for i, name in enumerate(given)}
    lines = [
        "@triton.jit",
        f"def {function}_epilogue(",
        "    value, sample, column, pixel, is_pixel, given, COLUMNS: tl.constexpr, "
        "MADE: tl.constexpr,",
        "):",
        "    is_column = column < COLUMNS",
        "    inside = is_pixel[:, None] & is_column[None, :]",
        "    first = tl.cast(sample, tl.int64) * COLUMNS + column",
    ]
    for i, name in enumerate(given):
        varies = _image_place(nest, name, call)
        assert varies is not None
        place, mask = _IMAGE_PLACES[varies]
        masked = f", mask={mask}, other=0.0" if any(varies[1:]) else ""
        lines.append(f"    a{i} = tl.load(given[{i}] + {place}{masked})")
    for i, (_, text) in enumerate(computed(nest, names, "triton", _statements(nest))):
        lines.append(f"    v{i} = {text}")
    output = nest.outputs[0].name
    made = converted(names[output], nest.kinds.get(output, "float"), "float", "triton")
    return "\n".join([*lines, f"    return {made}", ""])
