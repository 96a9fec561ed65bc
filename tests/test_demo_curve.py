"""demo_curve.py: the demo's compressors belong to the demo's text."""

import demo_curve
import pytest
from logs import read_run


def test_another_text_is_not_drawn_against_the_demos_compressors(tmp_path):
    for dataset in ("demo_sp1024_mine", "my_text"):
        log = tmp_path / "log"
        log.write_text(f"logs/a.txt\ntrain_loader:dataset:{dataset} train_shards:3\n")
        with pytest.raises(SystemExit, match="not one of the demo"):
            demo_curve.draw(read_run(log))
