"""One rank: `python -m stretto.dist FOLDER RANKS PARENT RANK`, as launch() starts it."""

import sys
from pathlib import Path

from stretto.dist.launch import run_rank

if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
