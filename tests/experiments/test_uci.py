"""Tables of the UCI repository, read from small files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hcurv.experiments.uci import split_uci, uci


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "uci").mkdir()
    values = np.random.default_rng(0).normal(3.0, 2.0, (20, 3))
    np.savetxt(tmp_path / "uci" / "glass-X.txt", values)
    np.savetxt(tmp_path / "uci" / "glass-Y.txt", np.arange(20) % 4, fmt="%d")
    np.savetxt(tmp_path / "uci" / "concrete.data", values)
    lines = ["1,0.5,g", "0,-0.5,b", "1,0.25,g", "", "1,1,b"]
    (tmp_path / "uci" / "ionosphere.data").write_text("\n".join(lines))
    return tmp_path


def test_features_and_targets_are_read(folder: Path) -> None:
    features, labels = uci("glass", folder)
    assert features.shape == (20, 3)
    assert labels.tolist()[:5] == [0, 1, 2, 3, 0]
    features, values = uci("concrete", folder)
    assert (features.shape, values.shape) == ((20, 2), (20, 1))
    features, labels = uci("ionosphere", folder)
    assert (features.shape, labels.tolist()) == ((4, 2), [1, 0, 1, 0])


def test_splits_are_standardised_by_their_training_points(folder: Path) -> None:
    split = split_uci("concrete", folder, seed=1)
    assert (len(split.inputs), len(split.test_inputs)) == (16, 4)
    for values in (split.inputs, split.targets):
        torch.testing.assert_close(values.mean(0), torch.zeros_like(values[0]))
        torch.testing.assert_close(values.std(0), torch.ones_like(values[0]))
    again, other = split_uci("concrete", folder, seed=1), split_uci("concrete", folder, seed=2)
    assert torch.equal(split.inputs, again.inputs)
    assert not torch.equal(split.inputs, other.inputs)
    assert split_uci("glass", folder).num_outputs == 4


def test_missing_files_and_names_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCURV_DATA", raising=False)
    with pytest.raises(ValueError, match="no data set 'iris'"):
        uci("iris", folder)
    with pytest.raises(FileNotFoundError, match="vehicle"):
        uci("vehicle", folder)
    with pytest.raises(FileNotFoundError, match="--data"):
        uci("glass")
