"""What every test shares."""

import os

# Set before torch or a tokenizer is imported: several tests may run beside each other on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
