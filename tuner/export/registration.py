"""A plan as C++ that registers the operator with PyTorch; `python_operators` is that for Triton.

The text keeps the promises that kernels rely on: contiguous, 16-byte aligned arguments on
one device, fresh outputs and workspace from PyTorch's allocator, everything on the current stream.
`binding` keeps the same ones while searching, in Python that `python_calls` writes for both.
"""

from __future__ import annotations

import inspect
from typing import Any

from tuner.export.aten_calls import header_of, made_by
from tuner.kernel import kept_memory
from tuner.kernel.operands import as_cpp
from tuner.kernel.python_calls import given, returned, tensor_names
from tuner.machine.platforms import platform_of
from tuner.plans import Argument, Plan, Step
from tuner.space.cpp import to_cpp
from tuner.space.expression import Expression
from tuner.trial import Language

__all__ = ["built_alone", "cpp_binding", "has_channels_last", "schema"]

_AT_TYPE = {
    "float32": "at::kFloat",
    "float64": "at::kDouble",
    "float16": "at::kHalf",
    "bfloat16": "at::kBFloat16",
    "int8": "at::kChar",
    "int16": "at::kShort",
    "int32": "at::kInt",
    "int64": "at::kLong",
    "uint8": "at::kByte",
}


def built_alone(name: str, **options: Any) -> None:
    """Build an extension and load it, while no other process that imports the file does.

    PyTorch's own lock is a file, which a process that is killed leaves: every later import waits
    for it, for ever. This one ends with its process, and who has it removes such a file. Exported
    files hold this function's text.
    """
    import contextlib
    import fcntl
    import os

    from torch.utils import cpp_extension

    folder = cpp_extension._get_build_directory(name, verbose=False)
    with open(os.path.join(folder, "owner"), "w") as owner:
        with contextlib.suppress(OSError):  # there is none, or a file system without locks
            fcntl.flock(owner, fcntl.LOCK_EX)
            os.remove(os.path.join(folder, "lock"))
        # Fewer headers where this PyTorch can do without them: half the time to compile.
        if "no_implicit_headers" in inspect.signature(cpp_extension.load_inline).parameters:
            options["no_implicit_headers"] = True
        cpp_extension.load_inline(name, is_python_module=False, **options)


def schema(plan: Plan) -> str:
    """Return the operator's PyTorch schema, for example `f(Tensor x, float eps) -> Tensor`."""
    words = {"float": "float", "int": "int"}
    arguments = ", ".join(
        f"{'Tensor' if a.shape is not None else words[a.dtype]} {a.name}" for a in plan.arguments
    )
    outputs = ", ".join("Tensor" for _ in plan.outputs)
    result = f"({outputs})" if len(plan.outputs) > 1 else outputs
    return f"{plan.function}({arguments}) -> {result}"


def cpp_binding(plan: Plan, language: Language, namespace: str) -> str:
    """Write each call of the plan as a C++ function, registered as an operator of PyTorch.

    Args:
        plan: the candidate's plan.
        language: of its functions, C++ or its dialect for a GPU.
        namespace: their namespace in `torch.ops`; one a file.
    """
    platform = platform_of(language)
    is_gpu = platform.is_gpu
    # Not <ATen/ATen.h>, which declares every operation there is: that takes longer to compile
    # than all the rest.
    steps = [step for call in plan.calls for step in call.steps]
    made = [tensor for call in plan.calls for tensor in call.made]
    headers = {
        header_of(step.function, len(step.args)) if step.gives else f"ATen/ops/{step.function}.h"
        for step in steps
        if step.kind == "aten"
    }
    if is_gpu:
        headers |= {f"ATen/ops/{'zeros' if tensor.zero else 'empty'}.h" for tensor in made}
    keeps = bool(made) and not is_gpu
    registers = "torch/library.h" if is_gpu else "torch/csrc/stable/library.h"
    lines = [
        "#include <tuple>",
        "#include <algorithm>",
        "#include <limits>",
        "#include <string>",
        *(() if is_gpu else ("#include <cstring>", "#include <memory>")),
        *(f"#include <{name}>" for name in kept_memory.HEADERS if keeps),
        "#include <ATen/Parallel.h>",
        "#include <ATen/core/Tensor.h>",
        *(f"#include <{header}>" for header in sorted(headers) if header),
        f"#include <{registers}>",
    ]
    if any(call.given_outputs for call in plan.calls):
        lines.append("#include <ATen/core/LegacyTypeDispatch.h>")
    if is_gpu:
        lines += ["#include <c10/cuda/CUDAGuard.h>", "#include <c10/cuda/CUDAStream.h>"]
    # C++ source stands in the same file as its binding; CUDA source is compiled on its own.
    declarations = dict.fromkeys(d for call in plan.calls for d in _declarations(call))
    lines += ["", *(declarations if is_gpu else ()), ""]
    lines += [kept_memory.CPP, ""] if keeps else []
    lines += ["namespace {", "", _PREPARED, ""]
    lines += [_CHANNELS_LAST, ""] if has_channels_last(plan) else []
    lines += [_APART, ""] if any(call.given_outputs for call in plan.calls) else []
    for call in plan.calls:
        lines += [*_function(call, is_gpu), ""]
        lines += [] if is_gpu else [*_boxed(call), ""]
    lines += ["}  // namespace", ""]
    macro, prefix = ("TORCH_LIBRARY", "call") if is_gpu else ("STABLE_TORCH_LIBRARY", "boxed")
    defined = " ".join(f'm.def("{schema(call)}");' for call in plan.calls)
    names = [call.function for call in plan.calls]
    implemented = " ".join(f'm.impl("{name}", &{prefix}_{name});' for name in names)
    lines += [
        f"{macro}({namespace}, m) {{ {defined} }}",
        f"{macro}_IMPL({namespace}, {platform.dispatch_key}, m) {{ {implemented} }}",
        "",
    ]
    return "\n".join(lines)


_PREPARED = """\
at::Tensor dense(const at::Tensor& tensor) {
  at::Tensor result = tensor.resolve_neg().contiguous();  // a view may be the negative
  return reinterpret_cast<uintptr_t>(result.data_ptr()) % 16 ? result.clone() : result;
}

// Not by a stream: with some compilers beside another C++ library a number in one is a crash.
std::string in_words(at::IntArrayRef shape) {
  std::string words = "[";
  for (size_t i = 0; i < shape.size(); ++i)
    words += (i ? ", " : "") + std::to_string(shape[i]);
  return words + "]";
}

// What the kernels rely on: the dtype, contiguous, 16-byte aligned, on one device.
at::Tensor prepared(const at::Tensor& tensor, const char* name, int64_t num_dims,
                    const at::Tensor& first, at::ScalarType dtype) {
  TORCH_CHECK(tensor.defined() && first.defined(), name, " is None, expected a tensor");
  TORCH_CHECK(tensor.scalar_type() == dtype && tensor.device() == first.device(), name,
              " is ", tensor.scalar_type(), " on ", tensor.device(), ", expected ", dtype,
              " on ", first.device());
  TORCH_CHECK(tensor.dim() == num_dims, name, " has shape ", in_words(tensor.sizes()),
              ", expected ", std::to_string(num_dims), " dimensions");
  TORCH_CHECK(!tensor._fw_grad(0).defined(), name, " has a tangent: forward-mode derivatives "
              "are not implemented");
  return dense(tensor);
}

void expect(const at::Tensor& tensor, const char* name, at::IntArrayRef shape) {
  TORCH_CHECK(tensor.sizes() == shape, name, " has shape ", in_words(tensor.sizes()),
              ", expected ", in_words(shape));
}

// Converts to whatever pointer a step takes.
struct Pointer {
  void* address;
  template <typename T>
  operator T*() const {
    return static_cast<T*>(address);
  }
};

void finished(const char* step, const char* message) {
  TORCH_CHECK(message == nullptr, step, ": ", message);
}"""


_CHANNELS_LAST = """\
at::Tensor channels_last(const at::Tensor& tensor) {
  const bool is_volume = tensor.dim() == 5;
  return tensor.contiguous(is_volume ? at::MemoryFormat::ChannelsLast3d
                                     : at::MemoryFormat::ChannelsLast);
}"""


# What PyTorch gave may be a view of an argument or of another result: no operator may give that.
_APART = """\
at::Tensor apart(const at::Tensor& made, std::initializer_list<at::Tensor> others) {
  const auto shares = [&](const at::Tensor& other) { return made.is_alias_of(other); };
  return std::any_of(others.begin(), others.end(), shares) ? made.clone() : made;
}"""


def has_channels_last(plan: Plan) -> bool:
    """Whether a step reads an operand with its channels last."""
    steps = [step for call in plan.calls for step in call.steps]
    is_argument = any(arg.endswith(".channels_last") for step in steps for arg in step.args)
    return is_argument or any(step.layout == "channels_last" for step in steps)


def _cpp_number(argument: Argument) -> str:
    return "double" if argument.dtype == "float" else "int64_t"


def _declarations(plan: Plan) -> list[str]:
    """Declare the source's functions; C linkage takes every pointer as void*."""
    numbers = {a.name: _cpp_number(a) for a in plan.arguments if a.shape is None}
    named = tensor_names(plan)
    declared = {}
    for step in plan.steps:
        if step.kind != "call":
            continue
        words = [
            "void*" if a == "null" or a in named else numbers.get(a, "int64_t") for a in step.args
        ]
        arguments = ", ".join([*words, "void*"])
        declared[step.function] = f'extern "C" const char* {step.function}({arguments});'
    return list(declared.values())


def _function(plan: Plan, is_gpu: bool) -> list[str]:
    outputs = ", ".join("at::Tensor" for _ in plan.outputs)
    result = f"std::tuple<{outputs}>" if len(plan.outputs) > 1 else outputs
    arguments = ", ".join(
        f"const at::Tensor& {a.name}_" if a.shape is not None else f"{_cpp_number(a)} {a.name}"
        for a in plan.arguments
    )
    body = [f"  {line}" for line in _body(plan, is_gpu)]
    # A step may bear the plain name.
    return [f"{result} call_{plan.function}({arguments}) {{", *body, "}"]


def _boxed(plan: Plan) -> list[str]:
    """Write a call as PyTorch's stable interface takes it.

    A tensor crosses as the address of one that is the receiver's, a number by its bits. To
    register the call as it is, the compiler reads headers for 5 s.
    """
    lines, words = [], []
    for place, argument in enumerate(plan.arguments):
        name = argument.name
        if argument.shape is not None:
            given = f"reinterpret_cast<at::Tensor*>(stack[{place}])"
            lines.append(f"const std::unique_ptr<at::Tensor> {name}_({given});")
            words.append(f"*{name}_")
        else:
            lines.append(f"{_cpp_number(argument)} {name};")
            lines.append(f"std::memcpy(&{name}, stack + {place}, sizeof {name});")
            words.append(name)
    call = f"call_{plan.function}({', '.join(words)})"
    names = [output.name for output in plan.outputs]
    made = (
        f"auto [{', '.join(names)}] = {call};" if len(names) > 1 else f"auto {names[0]} = {call};"
    )
    lines.append(made)
    for place, name in enumerate(names):
        address = f"new at::Tensor(std::move({name}))"
        lines.append(f"stack[{place}] = reinterpret_cast<StableIValue>({address});")
    head = f"void boxed_{plan.function}(StableIValue* stack, uint64_t, uint64_t) {{"
    return [head, *(f"  {line}" for line in lines), "}"]


def _body(plan: Plan, is_gpu: bool) -> list[str]:
    tensors = [a for a in plan.arguments if a.shape is not None]
    first = f"{tensors[0].name}_"
    lines = [f"const c10::cuda::CUDAGuard guard({first}.device());"] if is_gpu else []
    if plan.given_outputs:  # as no view, which could not be edited
        lines.append("const at::AutoDispatchBelowADInplaceOrView below;")
    sizes: set[str] = set()
    for argument in tensors:
        name, shape = argument.name, argument.shape or ()
        lines.append(
            f'const at::Tensor {name} = prepared({name}_, "{name}", {len(shape)}, {first}, '
            f"{_AT_TYPE[argument.dtype]});"
        )
        for dim, size in enumerate(shape):
            if size not in sizes:
                sizes.add(size)
                lines.append(f"const int64_t {size} = {name}.size({dim});")
        lines.append(f'expect({name}, "{name}", {{{", ".join(shape)}}});')
    for tensor in plan.made:
        dims = ", ".join(to_cpp(Expression.parse(d)) for d in tensor.shape)
        dtype = _AT_TYPE[tensor.dtype]
        if not is_gpu:
            made = f"kept_memory_1::empty({first}, {{{dims}}}, {dtype})"
            lines.append(f"at::Tensor {tensor.name} = {made}{'.zero_()' if tensor.zero else ''};")
            continue
        make = "zeros" if tensor.zero else "empty"
        lines.append(
            f"at::Tensor {tensor.name} = at::{make}({{{dims}}}, "
            f"{first}.options().dtype({dtype}).requires_grad(false));"
        )
    if any("num_threads" in step.args for step in plan.steps):
        lines.append("const int64_t num_threads = at::get_num_threads();")
    if is_gpu:
        lines.append("void* stream = c10::cuda::getCurrentCUDAStream().stream();")
    numbers = {a.name for a in plan.arguments if a.shape is None} | {"num_threads"}
    named = tensor_names(plan)
    lines += [line for step in plan.steps for line in _step(step, plan, named, numbers, is_gpu)]
    names = returned(plan, "apart({}, {{{}}})")
    is_tuple = len(plan.outputs) > 1
    return [*lines, f"return std::make_tuple({names});" if is_tuple else f"return {names};"]


def _step(step: Step, plan: Plan, tensors: set[str], numbers: set[str], is_gpu: bool) -> list[str]:
    if step.gives:
        lines = []
        words = [as_cpp(a, step.function) for a in step.args]
        made = made_by(step.function, words)
        if step.gives in plan.together:
            name = plan.together[step.gives]
            lines = [f"const auto {name} = {made};"] if plan.is_first_of(step) else []
            made = name
        made = made if step.pick is None else f"std::get<{step.pick}>({made})"
        return [*lines, f"const at::Tensor {step.gives} = {given(step, made, plan.dense, '')};"]
    if step.kind == "aten":
        words = [f"{a[:-2]}.t()" if a.endswith(".t") else a for a in step.args]
        return [f"at::{step.function}_out({', '.join([str(step.out), *words])});"]
    words = []
    for argument in step.args:
        if argument == "null":
            words.append("nullptr")
        elif argument in tensors:
            words.append(f"Pointer{{{argument}.data_ptr()}}")
        elif argument in numbers:
            words.append(argument)
        else:
            words.append(f"int64_t({to_cpp(Expression.parse(argument))})")
    words += ["stream"] if is_gpu else []
    return [f'finished("{step.function}", {step.function}({", ".join(words)}));']
