"""Runs whose batches tests/golden/data_run.txt holds: what the program is configured as, and what
tests/oracle/data_run.py computes without it."""
from token_files import corpus

SEQ_LEN, GLOBAL_BATCH = 32, 4

PLAIN = {"weights": [0, 0], "max_repetition": [1, 1], "stages": [], "tokens": 0, "seed": 3, "shuffle_documents": True,
         "shuffle_samples": False, "skip": [], "boundary": "predict", "bos": True, "eos": True, "validation_fraction": 0.15, "updates": 60}

CASES = {
    "pool": {**PLAIN},
    "mixed": {**PLAIN, "weights": [0.82, 0.18], "updates": 50},
    "repeated": {**PLAIN, "weights": [3, 1], "max_repetition": [1.5, 2.25], "seed": 2**62 + 9, "updates": 70},
    "staged": {**PLAIN, "stages": [(0, [0.9, 0.1]), (2000, [0.1, 0.9]), (3000, [1, 0])], "max_repetition": [2, 3], "tokens": 6000, "updates": 70},
    "masked": {**PLAIN, "boundary": "mask", "shuffle_samples": True, "seed": 11, "updates": 70},
    "unshuffled": {**PLAIN, "shuffle_documents": False, "weights": [1, 1], "bos": False, "skip": [(4, 9), (30, 30)], "updates": 40},
}


def sources():
    """Documents of two sources; some stand twice, in one source, in both, or in other letters."""
    alpha, beta = corpus(1, 30), corpus(2, 12)
    return [alpha + [alpha[3], alpha[5].upper()], [alpha[7]] + beta + [beta[0].replace(b" ", b"\n  ")]]
