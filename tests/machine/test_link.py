"""The link between two processes: what is hidden of an exchange, and what work costs beside the other's."""

import pytest

from stretto.machine import link


@pytest.mark.parametrize(
    ("work", "exchange", "share"), [(2.0, 30.0, 1.0), (30.0, 2.0, 1.0), (2.0, 30.0, 0.5), (30.0, 2.0, 0.0)]
)
def test_the_shorter_of_work_and_exchange_can_be_hidden(work, exchange, share):
    meanwhile = work + exchange - share * min(work, exchange)
    taken = {"short": 1e-4, "long": exchange, "alone": work / 1.5, "both": work, "meanwhile": meanwhile}
    fields = link.fields_of(taken)
    assert fields["hidden"] == pytest.approx(share)
    assert fields["beside"] == pytest.approx(1.5)


def test_two_processes_are_measured():
    fields = link.link()
    assert fields["link_latency"] > 0
    assert fields["link_bandwidth"] > 0
    assert 0 <= fields["hidden"] <= 1 <= fields["beside"]
