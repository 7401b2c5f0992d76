"""Who sees what a worker of torch's loader writes, after "spawn" has pickled the dataset; prints three epochs.

python script_aliases.py
"""

import json
import sys
from pathlib import Path

from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1]))

from aliases import Aliases, as_is

if __name__ == "__main__":
    loader = DataLoader(
        Aliases(), None, num_workers=1, collate_fn=as_is, multiprocessing_context="spawn", persistent_workers=True
    )
    print(json.dumps([list(loader) for _ in range(3)]))
