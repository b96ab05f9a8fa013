"""Worlds of a test program, for the drivers of what ranks exchange."""
from fp4d import COMMUNICATION, ROOT, SOON, Job, check


class Worlds:
    """Of `program`; a world of one is launched without mpirun where `alone`.  The environment's words are every world's."""

    def __init__(self, program, alone=False, **environment):
        self.program, self.alone, self.environment = program, alone, environment

    def run(self, np, *words, **more):
        launcher = [] if self.alone and np == 1 else ["mpirun", "--oversubscribe", "-np", str(np)]
        return Job(launcher + [self.program, *map(str, words)], ROOT, **self.environment, **more).end()

    def exchanges(self, np, **more):
        code, text, _ = self.run(np, "exchange", **more)
        check(code == 0 and "not ok" not in text, f"exit code {code}", text)
        check(text.count("ok ") == 3 * np, "three groups from each rank", text)

    def ended(self, np, *words, code=COMMUNICATION, **more):
        """What a world that must end of itself with this code has said."""
        ended, text, seconds = self.run(np, *words, **more)
        check(ended == code, f"exit code {ended}", text)
        check(seconds < SOON, f"{seconds:.1f} s", text)
        return text
