"""Training over several processes: partitions with halo exchange, as stale as allowed, in four schedules."""

from stretto.dist.exchange import Link
from stretto.dist.part import Part
from stretto.dist.partition import PARTITIONERS, partition
from stretto.dist.run import Run, train
from stretto.dist.schedule import SCHEDULES, Schedule
from stretto.dist.staleness import Age, Reading, Staleness
from stretto.dist.timeline import Event, Timeline
from stretto.dist.traffic import Traffic
from stretto.dist.training import PartitionParallel
from stretto.machine.ranks import launch

__all__ = [
    "PARTITIONERS",
    "SCHEDULES",
    "Age",
    "Event",
    "Link",
    "Part",
    "PartitionParallel",
    "Reading",
    "Run",
    "Schedule",
    "Staleness",
    "Timeline",
    "Traffic",
    "launch",
    "partition",
    "train",
]
