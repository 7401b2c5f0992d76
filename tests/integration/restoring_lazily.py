"""A module that a dataset imports when it gives its first sample: the program itself has not imported it."""

import random

RNG = random.Random(8)
