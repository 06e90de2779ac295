_FUSED_ROWS = None  # fewest, most, gaps, where PyTorch was measured to be faster elsewhere


class ModelNew(nn.Module):
    # Drop-in replacement of Model: the same constructor, attributes and state_dict. Float32 calls
    # go through one fused operator; every other call (other dtypes, autocast, empty tensors, a
    # replaced self.ln) runs the reference's own module, so it gives its answer or its error.

    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape=normalized_shape)

    def forward(self, x):
        if _FUSED_ROWS and not self._takes_rows(x):
            return self.ln(x)
        kind = x.device.type
        is_cast = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
        if not is_cast:
            self._refuse_mixed(x)
        if is_cast or not self._can_fuse(x):
            return self.ln(x)
        ln = self.ln
        flat = x.reshape(-1, *ln.normalized_shape).flatten(1)  # [rows, cols]
        ones_zeros = (torch.ones_like, torch.zeros_like)
        weight, bias = (
            make(flat[0]) if tensor is None else tensor.reshape(-1)
            for make, tensor in zip(ones_zeros, (ln.weight, ln.bias))
        )
        y, mean, rstd = fused_op(flat, weight, bias, float(ln.eps))
        return y.view(x.shape)

    def _takes_rows(self, x):
        # Whether the operator was measured to be as fast as PyTorch at such a batch.
        shape = x.shape
        if not shape:
            return True
        is_step = torch.is_grad_enabled() and (
            x.requires_grad or getattr(getattr(self.ln, "weight", None), "requires_grad", False)
        )
        fewest, most, *gaps = _FUSED_ROWS["step" if is_step else "call"]
        for low, high in gaps:
            if low <= shape[0] <= high:
                return False
        return not (shape[0] < fewest or shape[0] > most)

    def _can_fuse(self, x):
        ln = self.ln
        num_dims = len(ln.normalized_shape)
        return (
            torch.autograd.forward_ad._current_level < 0  # else the tangents would be lost
            and type(ln) is nn.LayerNorm
            and x.dtype == torch.float32
            and (ln.weight is None or ln.weight.dtype == torch.float32)
            and x.numel() > 0
            and x.dim() >= num_dims >= 1
            and tuple(x.shape[x.dim() - num_dims :]) == tuple(ln.normalized_shape)
        )

    def _refuse_mixed(self, x):
        # 16-bit inputs with float32 weights are PyTorch's to judge: some devices allow them.
        weight = getattr(self.ln, "weight", None)
        if weight is None:
            return
        if x.dtype != weight.dtype and x.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError(
                f"x is {x.dtype} but ln.weight is {weight.dtype}: they must have the same dtype"
            )
        if x.device != weight.device:
            raise RuntimeError(
                f"x is on {x.device} but ln.weight is on {weight.device}: "
                "they must be on the same device"
            )


def setup_context(ctx, inputs, output):
    x, weight, bias, eps = inputs
    y, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)


def backward(ctx, grad_y, grad_mean, grad_rstd):
    x, weight, bias, mean, rstd = ctx.saved_tensors
    needed = [bool(needs) for needs in ctx.needs_input_grad[:3]]
    grads = torch.ops.aten.native_layer_norm_backward(
        grad_y, x, [x.shape[1]], mean.unsqueeze(1), rstd.unsqueeze(1), weight, bias, needed
    )
    return (*grads, None)
