"""The text by which a step asks the reference itself for gradients: those of gradients, say."""

from __future__ import annotations

__all__ = ["BY_REFERENCE"]

# What stands in braces is given by `step_text`.
BY_REFERENCE = """\
def is_kept():
    # Whether the graph of a backward is used once more; where PyTorch does not tell, it may be.
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return asked is None or asked()


def is_batched(grad):
    # Whether it is several gradients at once, which no kernel takes.
    asked = getattr(torch._C._functorch, "is_legacy_batchedtensor", None)
    return asked is not None and asked(grad)


def is_packed():
    # Whether what is saved for a backward goes through hooks; PyTorch 2.6 does not tell.
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


def tensors_in(made):
    # What a call of the reference returned, without its containers and without None in these.
    import dataclasses

    if made is None or isinstance(made, torch.Tensor):
        return [] if made is None else [made]
    if dataclasses.is_dataclass(made):
        held = [getattr(made, field.name) for field in dataclasses.fields(made) if field.init]
    else:
        held = made.values() if isinstance(made, dict) else made
    return [tensor for part in held for tensor in tensors_in(part)]


class AsReference(nn.Module):
    # Calls the reference's own forward of a module.
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return Model.forward(self.module, *inputs)


_BETWEEN = {between}  # results that are not returned: places among what functions make


{seen_in}


def lone_module(module, seen):
    # A module like another, whose parameters, buffers and parts may be lent without the other's
    # being others meanwhile; the same where that has no shell.
    if id(module) not in seen:
        made = seen[id(module)] = shell_of(module)
        if made is not module:
            for name in ("_parameters", "_buffers", "_modules"):
                vars(made)[name] = dict(vars(module)[name])
            for name, part in vars(module)["_modules"].items():
                made._modules[name] = None if part is None else lone_module(part, seen)
    return seen[id(module)]


{ending_at}


def by_reference(ctx, given, others, grad):
    # Gradients that are themselves differentiated, through the reference's own operations. Of what
    # is given it takes others of the same values: hooks are for what autograd itself gives.
    is_differentiated = torch.is_grad_enabled()
    kind = torch.device(fused_device).type
    for place, (name, x, version) in enumerate(zip({inputs_and_state}, given, ctx.versions)):
        if name in {updated} or (place < {num_inputs} and not ctx.has_inputs):  # which were packed
            continue
        if x._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {{name}} is at version {{x._version}}; expected version "
                f"{{version}} instead. Gradients of gradients, and those of a backward under "
                "autocast, are computed from the values of the call"
            )
    now = [(part, part.training) for part in ctx.module.modules()]
    places, sources = _LEAVES_OF[ctx.number], _SOURCES[ctx.number]
    needs = ctx.needs_input_grad[{first}:]
    others = [reference() for reference in others]
    # Gradients of gradients go on to the results that this one is computed from, where somebody
    # still has them; else to what these are computed from, through all of it.
    is_known = is_differentiated and bool(sources) and all(x is not None for x in others)
    is_viewed = is_differentiated and not is_known
    wants = {{i for i, is_wanted in zip(places, needs) if is_wanted}}
    if sources:
        wants |= {{i for i, x in enumerate(given) if x.requires_grad}}
    with torch.enable_grad():
        alone = [
            x.view_as(x) if is_viewed and i in wants else x.detach() for i, x in enumerate(given)
        ]
        alone = [x.requires_grad_() if i in wants else x for i, x in enumerate(alone)]
    coming = grad.detach().requires_grad_() if is_known else grad
    inputs, state = alone[:{num_inputs}], alone[{num_inputs}:]
    lent = {{f"module.{{name}}": x for name, x in zip({state}, state)}}
    lent |= {{f"module.{{name}}": lent[f"module.{{name}}"].clone() for name in {updated}}}
    try:
        for part, is_training in ctx.modes.items():
            part.training = is_training
        module = AsReference(lone_module(ctx.module, {{}}))
        with torch.enable_grad():
            with torch.autocast(kind, enabled=False):  # as the forward was
                call = functools.partial(
                    torch.func.functional_call, module, lent, tuple(inputs)
                )
                made, seen = seen_in(call) if _BETWEEN else (call(), [])
            made = [*tensors_in(made), *(seen[i] for i in _BETWEEN)]
            result = made[_RESULT_AT[ctx.number]]
            by = [*(alone[i] for i in places), *(made[i] for i in sources)]
            wanted = [i for i, x in enumerate(by) if needs[i] and x.requires_grad]
            # What goes through it may be returned as it is: not in memory of somebody else's.
            whole = coming
            if coming.shape != result.shape:
                whole = coming.reshape(result.shape).clone()
            with ending_at(by[len(places) :]):  # what goes through them is their own
                found = torch.autograd.grad(
                    result, [by[i] for i in wanted], whole,
                    create_graph=is_differentiated, allow_unused=True,
                ) if wanted else ()
    finally:
        for part, is_training in now:
            part.training = is_training
    if is_known:
        actual = [*(given[i] for i in places), *others]
        by, actual = [by[i] for i in wanted], [actual[i] for i in wanted]
        known = [x for x in found if x is not None]
        known = iter(Again.apply(known, [*by, coming], *actual, grad)) if known else iter(())
        found = [None if x is None else next(known) for x in found]
    found = dict(zip(wanted, found))
    return [found.get(i) for i in range(len(needs))]


class Again(torch.autograd.Function):
    # Gradients that were computed by tensors of their own, as functions of others of the same
    # values: by these they are differentiated once.
    @staticmethod
    def forward(ctx, found, by, *actual):
        ctx.found, ctx.by = found, by
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        pairs = [(x, g) for x, g in zip(ctx.found, grads) if g is not None and x.requires_grad]
        if not pairs:
            return (None,) * (2 + len(ctx.by))
        with ending_at(ctx.by):
            found = torch.autograd.grad(
                [x for x, _ in pairs], ctx.by, [g for _, g in pairs],
                retain_graph=True, allow_unused=True,
            )
        return (None, None, *found)
"""
