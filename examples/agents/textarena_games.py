"""Games of `textarena` for one player, as an environment of turns. Needs: pip install textarena

[task]                                                  [reward]
kind = "function"                                       kind = "environment"
path = "examples/agents/textarena_games.py:rows"        path = "examples/agents/textarena_games.py:Game"
answer = "none"                                         turns = 12
"""

import random
import threading
from contextlib import contextmanager

import textarena as ta

from millrace import Done, Observation

_RANDOM = threading.Lock()


def rows():
    """`game`: an id of textarena. Its form without wrappers shows each message once."""
    prompt = "Play the game.\n"
    return [{"prompt": prompt, "game": "GuessTheNumber-v0-raw", "seed": seed} for seed in range(1000)]


class Game:
    """textarena forgives one invalid move, and says why. The second one in a row breaks the game, which is
    then worth 0. textarena itself gives partial credit, a penalty or, in some games, a sentence."""

    def reset(self, row):
        self.game, self.malformed = ta.make(row["game"]), 0
        self.random_state = random.Random(row["seed"]).getstate()
        with self._own_random():
            self.game.reset(num_players=1, seed=row["seed"])
        return self._messages()

    def step(self, action):
        with self._own_random():
            done, _ = self.game.step(action)
        rewards, players = self.game.close()  # which closes nothing
        self.malformed += players[0]["invalid_move"] or self.game.state.error_count > 0
        metrics = {"malformed": self.malformed}
        if done:
            broken = players[0]["invalid_move"]
            metrics |= {"moves": players[0]["turn_count"], "broken": broken}
            return Done(0.0 if broken else rewards[0], metrics)
        return Observation(self._messages(), metrics=metrics)

    def _messages(self):
        """What the game says. It repeats the player's own words, which the model knows."""
        _, said = self.game.get_observation()
        return "\n".join(str(text) for _, text, kind in said if kind != ta.ObservationType.PLAYER_ACTION)

    @contextmanager
    def _own_random(self):
        """Games draw from the module `random`, which all threads of a worker share."""
        with _RANDOM:
            shared = random.getstate()
            random.setstate(self.random_state)
            try:
                yield
            finally:
                self.random_state = random.getstate()
                random.setstate(shared)
