"""The whole path on a GPU: from YAML to an exported file that was verified by itself."""

from __future__ import annotations

import pytest

from tuner import load_config, tune
from tuner.trial import Status

CONFIG = """
problem:
  op: {op}
  sizes: {sizes}
device: cuda
accuracy: float32
space:
  template: [{template}]
search: {{trials: 2, timeout: 60s}}
measure: {{screen: 20ms, finalists: 50ms, num_finalists: 1, num_processes: 2}}
"""
GEMM = "{batch: 512, in_features: 256, out_features: 384}"
NORM = "{rows: 512, cols: 1024}"


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("op", "sizes", "template"),
    [
        ("gemm_scale_batchnorm", GEMM, "library"),
        ("gemm_scale_batchnorm", GEMM, "mma"),
        ("gemm_scale_batchnorm", GEMM, "triton"),
        ("layer_norm", NORM, "cuda"),
        ("layer_norm", NORM, "triton"),
    ],
)
def test_a_config_becomes_a_verified_file(tmp_path, op, sizes, template):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(op=op, sizes=sizes, template=template))
    run = tune(load_config(config), runs_dir=tmp_path / "runs")
    statuses = {trial.outcome.status for trial in run.trials()}
    assert statuses == {Status.CORRECT}, [trial.outcome.reason for trial in run.trials()]
    result = run.result()
    assert result is not None and result.exported is not None
    assert result.exported.check.is_accepted, result.exported.check.reason
    assert result.exported.check.is_thorough and len(result.exported.check.probes) > 30
    assert result.exported.interval is not None and result.exported.interval.speedup > 0
    print(op, template, result.exported.interval)
