"""Which attributes the code of a file may read."""

from __future__ import annotations

import pytest

from tuner.capture.graph.named import named_in_code

FILE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x * self.weight
        if getattr(self, "scale", None):
            y = y * 2
        {more}
        return y
"""


def test_names_are_those_of_attributes_words_and_functions():
    found = named_in_code(FILE.format(more="y = helper(y, dim=-1)"))
    assert found is not None
    assert {"weight", "scale", "forward", "width", "helper", "dim"} <= found
    assert "layer_idx" not in found


@pytest.mark.parametrize(
    "more",
    [
        "y = y * getattr(self, name)",
        "y = y * vars(self)[0]",
        "y = y * self.__dict__[0]",
        "y = elsewhere(self, y)",
        "y = elsewhere(y, module=self)",
        "y = y * operator.attrgetter(name)(self)",
        "y = eval('self.a')",
    ],
)
def test_where_any_attribute_may_be_read_no_name_is_a_note(more):
    assert named_in_code(FILE.format(more=more)) is None


@pytest.mark.parametrize(
    ("head", "is_any"),
    [
        ("class Other(Block):\n    x = 1\n", False),
        ("class Other(elsewhere.Base):\n    x = 1\n", True),
        ("class Other(Block, metaclass=M):\n    x = 1\n", True),
        ("class Other(Block):\n    def __getattr__(self, name):\n        return 1\n", True),
        ("from math import *\n", True),
        ("from elsewhere import helper\n", True),
        ("import elsewhere.more as more\n", True),
        ("from .beside import helper\n", True),
        ("import math\nfrom torch.nn import functional\nimport numpy as np\n", False),
    ],
)
def test_classes_of_other_files_and_of_their_own_look_up_read_any(head, is_any):
    assert (named_in_code(FILE.format(more="y = y") + head) is None) is is_any
