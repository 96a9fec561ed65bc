"""forecast.py: the bytes of a model and its script, without data."""

import os

import forecast
import pack
import pytest
from runs import ROOT, SCRIPT


def test_a_forecast_adds_artifact_and_packed_code(tmp_path, quantized_knobs, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", quantized_knobs | {"DATA_PATH": "none"})

    def sizes_of(script, std: str, code: int = 0) -> list[int]:
        assert forecast.main([str(script), "--std", std]) == code
        lines = capsys.readouterr().out.splitlines()
        return [int(line.split()[1].replace(",", "")) for line in lines]

    num_params, artifact, packed, left = sizes_of(SCRIPT, "0.3")
    assert 0.5 * num_params < artifact == 16_000_000 - packed - left
    assert sizes_of(SCRIPT, "0.3")[1] == artifact  # the weights follow from SEED
    assert packed == len(pack.pack(SCRIPT))
    assert sizes_of(SCRIPT, "0.01")[1] < 0.97 * artifact  # small weights use fewer levels
    script = tmp_path / "train_gpt.py"
    text = SCRIPT.read_text().replace("= 16_000_000", "= 1000")
    script.write_text(text, encoding="utf-8-sig")  # with a byte order mark
    sizes_of(script, "0.3", code=1)


@pytest.mark.baseline
@pytest.mark.records
@pytest.mark.parametrize("preset", ["record1394", "record1855", "record2014", "record2135"])
def test_a_record_fits(preset, monkeypatch):
    monkeypatch.setattr(os, "environ", {"PRESET": preset})
    assert forecast.main([str(ROOT / "tests/records/train_record.py")]) == 0
