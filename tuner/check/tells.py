"""What a failure of a probe usually means, in the words of a verdict."""

from __future__ import annotations

__all__ = ["ROUNDING", "TELLS"]

TELLS = {
    "weights": "is a weight ignored, or eps?",
    "offset": "a variance from sums of squares, or right only for the tested distribution?",
    "heavy": "is it right only for the tested distribution?",
    "range": "are operands split or rounded to a format of less range?",
    "tiny": "is eps dropped or changed?",
    "constant": "a variance of 0 must not turn negative or NaN",
    "poison": "a NaN or Inf of the input must reach what the reference lets it reach",
    "batch": "is it right only for the tested shape?",
    "rows": "are rows beyond those of the tested shape wrong?",
    "large": "are large calls in eval mode computed in a way of their own?",
    "full": "memoised, or weights folded and kept, at the full size?",
    "eval": "eval mode must use the stored statistics, and change nothing",
    "frozen": "submodules in eval mode inside a training parent",
    "cumulative": "momentum=None averages over all calls",
    "turns": "eval mode must use the statistics as they are now",
    "thawed": "a submodule in training mode inside a parent in eval mode",
    "many": "is it right only in the first calls, or are outputs used again?",
    "copied": "does a copy, or a module that was moved, go on with the weights of old?",
    "converted": "a converted module must compute in its new type, or refuse",
    "pickled": "does what was pickled go on with other weights or memory?",
    "history": "is something kept of an earlier call, mode, or set of weights?",
    "threads": "do two calls at once share memory?",
    "options": "is an argument of the constructor ignored?",
    "remainders": "is it wrong for what no tile divides?",
    "tiles": "is it wrong where tiles divide the batch?",
    "frozen weight": "is a gradient wrong where a parameter is frozen?",
    "accumulated": "a gradient must have memory of its own, which nothing else writes",
    "edited before": "is something kept of an input or an output that others may edit?",
    "kinks": "another gradient where values are equal, or at a kink",
    "special": "is it right only for values that are usual?",
    "another": "is something kept for all modules, not for each?",
    "team": "is work divided among another number of threads than there are?",
    "incoming values": "the incoming gradient may be of any size, and NaN stays NaN",
    "one output": "is a gradient wrong where one of several outputs is used alone?",
    "incoming": "the incoming gradient may have any strides, and must not be edited",
    "calls": "is it right only on the first call, or replays it?",
    "repeated": "an input seen before",
    "pointer": "memoised by pointer or version counter, or kept from the first call?",
    "content": "memoised by a part of the content?",
    "edited": "are the weights folded once and kept?",
    "gradients": "is the backward wrong, or the output detached?",
    "layout": "are strides ignored?",
    "misaligned": "do vector loads assume 16-byte alignment?",
    "refused": "what the reference refuses must be refused, not computed",
    "memory": "is memory read that was never written?",
    "stream": "does it run on another stream than the current one?",
}

# Said in place of a question about the layout, where the error is too small for that.
ROUNDING = "an error of rounding size: are sums or operands rounded more than PyTorch's?"
