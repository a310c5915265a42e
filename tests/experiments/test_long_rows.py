"""The table of long rows: what is measured of a process, and a row in full."""

import json
import sys

import numpy as np

from experiments import benchmark_model, long_rows


def test_peak_memory_sees_what_was_held_and_given_back():
    before = long_rows.peak_memory(reset=True)
    held = np.ones(25_000_000)  # .2 GB
    del held
    assert 0.15 < long_rows.peak_memory() - before < 0.5
    if sys.platform == "linux":
        assert long_rows.peak_memory(reset=True) < before + 0.1


def test_micro_batches_hold_so_many_tokens():
    config = benchmark_model.Config()
    sizes = {"64x1": (1, 64), "64x192": (8, 8), "8x2048": (8, 1)}
    for shape, (count, rows) in sizes.items():
        parts = benchmark_model.batches(config, shape, 100)
        assert len(parts) == count and {len(part) for part in parts} == {rows}


def test_the_table_leaves_out_what_was_not_run():
    ours = {"temporaries_gb": 0.5, "s": 2.0, "peak_gb": 1.5}
    theirs = {"s": 3.0, "peak_gb": 2.5}
    lines = long_rows.table(
        [
            {"tokens": 1024, "jax": ours, "torch": theirs, "reference_gb": 4.0},
            {"tokens": 65_536, "jax": {"temporaries_gb": 7.0}},
        ]
    )
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[2] == ["1,024", "0.50", "4.00", "1.50", "2.0", "2.50", "3.0", "1.50"]
    assert cells[3] == ["65,536", "7.00"] + [""] * 6


def test_the_script(capsys, monkeypatch):
    real = long_rows.peer_half

    def without_torch(library, *arguments, **others):
        return real(library, *arguments, **others) if library == "jax" else None

    monkeypatch.setattr(long_rows, "peer_half", without_torch)
    config = benchmark_model.Config(
        models=("tiny-moe",), tables=("long-rows",), lengths=(48, 64), run=48
    )
    benchmark_model.main(config)
    printed = capsys.readouterr().out
    assert "| 48 |" in printed and "| 64 |" in printed
    assert json.loads(printed.splitlines()[-1])["long_rows"][0]["jax"]["s"] > 0
