"""The kinds of device: each record is whole."""

from __future__ import annotations

import pytest
import torch

from tuner.machine.platforms import FILE_ENDINGS, PLATFORMS, SOURCE_NAMES, is_gpu, platform_of


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("cpu", "cpu"),
        (torch.device("cpu"), "cpu"),
        ("cpp", "cpu"),
        ("cuda", "cuda"),
        ("cuda:1", "cuda"),
        (torch.device("cuda", 0), "cuda"),
        ("triton", "cuda"),
    ],
)
def test_a_device_or_a_language_has_a_platform(what, kind):
    assert platform_of(what) is PLATFORMS[kind]
    assert is_gpu(what) == (kind != "cpu")


def test_each_language_has_names_of_its_own():
    assert FILE_ENDINGS.keys() == SOURCE_NAMES.keys() == {"cpp", "cuda", "triton"}
    for names in (FILE_ENDINGS, SOURCE_NAMES):
        assert len(set(names.values())) == len(names)


def test_on_a_cpu_there_is_nothing_to_wait_for_and_no_memory_of_its_own():
    cpu = platform_of("cpu")
    with cpu.chosen("cpu"):
        cpu.synchronize("cpu")
    assert cpu.free_bytes("cpu") is None
