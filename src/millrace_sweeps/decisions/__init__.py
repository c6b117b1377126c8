"""What a sweep decides, on plain data: which trials, which is stopped, which is best, how many at once.

Optuna proposes trials where `[optuna]` asks for it (`proposals`). The rest stays here, because of what
Optuna 5.0 does:

grid      its sampler has an order of its own: a sweep has that of its file
random    its sampler draws a combination again, with more digits than a person types
median    its pruner compares with the values of one step, and Vizier's rule with means up to the step. Of
          300 made-up trials it stops 90, and the rule 20
halving   its pruner stops trials before `factor` of them came to a rung: 67 of 200

A plain install would then have neither a grid nor a rule that stops trials. Both rules are 40 lines of code.
"""
