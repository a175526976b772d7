"""The benchmark of the U-ViT measures how long compiling takes."""

import re
import sys

import torch


def test_prints_the_ratio_of_compile_times(benchmark, monkeypatch, capsys):
    uvit = benchmark("uvit")
    monkeypatch.setattr(uvit, "CHANGES", {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2})
    monkeypatch.setattr(sys, "argv", ["uvit.py", "--only", "compile_time", "--model", "S/2", "--rounds", "6"])
    with torch.compiler.set_stance("force_eager"):  # compiling takes a minute
        uvit.main()
    printed = capsys.readouterr().out
    assert "S/2, compile time, repeated blocks / whole" in printed
    assert re.search(
        r"first +time \d\.\d+ \[\d\.\d+, \d+\.\d+\]  whole_seconds 0\.\d+  repeated blocks_seconds", printed
    )
