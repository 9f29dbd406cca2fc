"""Ranks count, they do not tune: no measuring, a cache folder of their own, one thread here as in every rank."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def no_tuning(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_TUNE", "off")
        patch.setenv("STRETTO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
