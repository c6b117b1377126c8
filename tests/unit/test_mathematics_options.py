"""What the reward of mathematics pays for letters of options, truth values, and answers said in words."""

from __future__ import annotations

import pytest

from millrace.rewards.mathematics.math_reward import MathReward

REWARD = MathReward()
RIGHT = [
    # the letter of an option, and its text
    (r"\boxed{C. 24}", "C"),
    (r"\boxed{\textbf{(D) } 14}", "D"),
    ("The correct answer is C) 24", "C"),
    ("The answer is (B) salt and pepper.", "B"),
    ("The correct answer is **C. Paris**.", "C"),
    ("The answer is (E). Such payments are not income, and do not count.", "E"),
    ("the answer is (D): it was less than the other, but not by much", "D"),
    ("<answer>🙏</answer>", "🙏"),
    (r"\boxed{㋄}", "㋄"),
    ("The answer is C, happiness.", "C"),
    ("Among A through E, the answer is D, 5%.", "D"),
    ("The answer is option (C).", "C"),
    ("The correct answer is option C: Paris", "C"),
    ("The answer is choice B.", "B"),
    ("The answer is **(C)**: Paris", "C"),
    ("Answer: C - Paris", "C"),
    ("Answer: C – 5 cm", "C"),
    ("Therefore the answer is C (Paris).", "C"),
    # other verbs
    ("The closest answer would be (G), which is a correct explanation.", "G"),
    ("The answer must be 5.", "5"),
    ("The answer should be Paris.", "Paris"),
    ("The correct answer is therefore (C).", "C"),
    # what the question asked for, in brackets
    ("It was not aired until 1959.\nTherefore, the answer (Yes or No) is No.", "no"),
    ("The answer (arabic numerals) is 29.\n\n12 large planks and 17 small ones.", "29"),
    ("The answer (in dollars): 5\nThat is 3 + 2.", "5"),
    # a truth value before its reason
    ("The answer is yes, because 3 is odd.", "yes"),
    ("The answer is: Yes - it is. ", "yes"),
    ("Answer: No. There is no reason to.", "no"),
    ("The answer is False; it is larger.", "false"),
    # what a formula says in words
    ("\\[\n\\text{The answer is (C)}\n\\]", "C"),
    (r"\[ \text{The answer is } (J) \]", "J"),
    (r"\[ \textbf{Thus, the answer is: } 42 \]", "42"),
    (r"$$\text{Answer: }\frac{1}{2}$$", "0.5"),
    (r"\[ \text{The final answer is } x^2+1 \]", "x^2 + 1"),
    (r"\[ \mbox{Answer: Paris} \]", "Paris"),
    # several options
    (r"\boxed{\text{A},\text{C}}", "A,C"),
    (r"\boxed{A, C}", "AC"),
    (r"\boxed{AC}", "A, C"),
    (r"\boxed{C, A}", "A,C"),
    ("Answer: (A), (B) and (D)", "A, B, D"),
    (r"\boxed{\text{A and C}}", "AC"),
    ("So the answer is B because 3 is odd.", "B"),
]  # fmt: skip
WRONG = [
    # several options
    ("A. 12, B. 24", "A"),
    ("(A) or (B)", "A"),
    ("(A) (B) (C) (D)", "A"),
    ("(A) is wrong. (B)", "A"),
    ("A. and C.", "A"),
    ("The answer is (A). Or (B).", "A"),
    ("The answer is A, C.", "A"),
    (r"\boxed{A - B}", "A"),
    ("The answer is A (or B).", "A"),
    ("The answer is option A or option B.", "A"),
    ("The answer is option (A) - or (B).", "A"),
    ("The answer would not be A.", "A"),
    ("The answer should be A or B", "A"),
    ("The answer is optional: A B", "A"),
    ("The answer is A, B, C, D, or E.", "A"),
    ("The answer is C, D, or E.", "C"),
    ("The answer is yes, but it may be no.", "yes"),
    ("The answer is: No, yes.", "no"),
    ("The answer (Yes or No) is not known.", "no"),
    ("The answer is yes. It is the same for no.", "yes"),
    ("The answer is nothing, yes.", "no"),
    ("The answer is (A). (B) is right, too.", "A"),
    (r"\[ \text{The answer is not (A)} \]", "A"),
    (r"\[ \text{The answer is (A) or (B)} \]", "A"),
    (r"\boxed{A, B}", "A,C"),
    (r"\boxed{A}", "A,C"),
    (r"\boxed{A, B, C}", "A,C"),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "reference"), RIGHT)
def test_the_option_of_the_reference_earns_1_with_its_text_and_without(completion, reference):
    assert REWARD(completion, reference, {}) == 1.0


@pytest.mark.parametrize(("completion", "reference"), WRONG)
def test_another_option_or_several_earn_0(completion, reference):
    assert REWARD(completion, reference, {}) == 0.0
