"""An environment as TRL's documentation writes it, for `GRPOTrainer(environment_factory=GuessNumber)`.

It needs neither TRL nor Millrace, and both take it as it is:

    [task]                                            [reward]
    kind = "function"                                 kind = "environment"
    path = "examples/agents/trl_guess.py:rows"        path = "examples/agents/trl_guess.py:GuessNumber"
    answer = "none"                                   turns = 12

The reward is the attribute `reward`, which TRL's users read in a function with `environments`.
"""


def rows():
    return [{"prompt": "Guess the number.\n", "secret": secret} for secret in range(1, 101)]


class GuessNumber:
    def __init__(self):
        self.reward = 0.0
        self.done = False

    def reset(self, **row) -> str | None:
        self.reward = 0.0
        self.done = False
        self._secret = row["secret"]
        return "It is between 1 and 100.\n"

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The number that you guess.

        Returns:
            Whether the number is higher or lower.
        """
        if self.done:
            raise ValueError("Game over.")
        if not 1 <= number <= 100:
            raise ValueError("The number is between 1 and 100.")
        self.done = number == self._secret
        self.reward = float(self.done)
        return "Right." if self.done else "Higher." if number < self._secret else "Lower."
