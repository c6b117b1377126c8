"""What the reward of mathematics pays: completions beside references, as data sets and models write them."""

from __future__ import annotations

import pytest

from millrace.core.errors import DataError
from millrace.rewards.mathematics.final_answer import final_answer
from millrace.rewards.mathematics.math_reward import MathReward
from millrace.rewards.mathematics.plain_numbers import read_number

REWARD = MathReward()
MATRIX = r"B^{-1}=\left[\begin{array}{rr}3 & 7 \\ 5 & 12\end{array}\right]"

RIGHT = [
    # where the answer is
    (r"First \boxed{1}. No: \boxed{2}.", "2"),
    (r"So \boxed{42}, which I box: \boxed{}", "42"),
    (r"It is \boxed{42}. Put it within \boxed{ }.", "42"),
    (r"\boxed{\boxed{42}}", "42"),
    (r"\fbox{42}", "42"),
    (r"\boxed{42} and then \boxed{43", "42"),
    ("<answer>42</answer>", "42"),
    ("<answer>1</answer> no, <ANSWER> 42 </ANSWER>", "42"),
    ("<answer>The answer is 42.</answer>", "42"),
    (r"<answer>\boxed{42}</answer>", "42"),
    ("Answer: 42", "42"),
    ("Answer:42", "42"),
    ("**Answer:** 42", "42"),
    ("**Final answer**: $42$", "42"),
    ("The answer is 42.", "42"),
    ("The final answer is: 42\nI hope that 7 people read it.", "42"),
    ("Answer:\n42", "42"),
    ("The answer is $42$. I hope it is correct.", "42"),
    ("#### 42", "42"),
    ("(42)", "42"),
    ("42", "42"),
    ("**42**", "42"),
    ("We have 7 and 5.\nSo there are 12 apples.", "12"),
    ("12\nThat was easy!", "12"),
    ("<think>It is \\boxed{7}.</think>\\boxed{42}", "42"),
    ("<think>It is \\boxed{42}.</think>", "42"),
    ("7 + 5 = 12", "12"),
    ("So 3 * 4 = 12 dollars.", "12"),
    ("$7 + 5 = 12$", "12"),
    (r"\boxed{7 + 5 = 12}", "12"),
    (r"\boxed{12 = 7 + 5}", "12"),
    (r"\boxed{x = 42}", "42"),
    (r"\boxed{f(3) = 42}", "42"),
    (r"$x = 5$ and so $y = 42$", "42"),
    # what stands behind a number in prose
    ("Her salary is $57,500/year.", "57500"),
    ("So he pays $720 a year.", "720"),
    ("He runs 60*12=720 miles a week.", "720"),
    ("They drink 3 a day.", "3"),
    ("Mary got 762 M&Ms.", "762"),
    ("The answer is 7:30 p.m.", "7:30 PM"),
    (r"\boxed{4:30 \text{ pm}}", r"\text{4:30 p.m.}"),
    ("故选 B", "B"),
    # several answers
    ("The answer is $x=0$ or $x=2$.", "$x=0$ or $x=2$"),
    ("The solutions are $2$, $0$.", "0, 2"),
    (r"The solutions are $1$, $\sqrt{2}$, and $4$.", r"1, \sqrt{2}, 4"),
    (r"The answer is \(5\); \(10\).", "$5$;$10$"),
    ("The answer is $B$ and $C$.", "BC"),
    (r"The answer is $\frac{1}{2}$ or $0.5$.", "1/2"),
    (r"\boxed{\frac{1}{2} \text{ or } 50\%}", "0.5"),
    ("For $n=4$, $f(n)=16$.", "16"),
    ("The answer is not $A$ but $D$.", "D"),
    ("The answer is $B$ because $x = 3$.", "B"),
    (r"\boxed{P(A, B) = 0.5}", "1/2"),
    # matrices and sets without a box
    (r"<answer>\begin{pmatrix}3 & 7 \\ 5 & 12\end{pmatrix}</answer>", MATRIX),
    (r"<answer>\left[\begin{array}{cc}3 & 7 \\ 5 & 12\end{array}\right]</answer>", MATRIX),
    (r"Final answer: \begin{bmatrix}3 & 7 \\ 5 & 12\end{bmatrix}", MATRIX),
    (r"\boxed{x \ge 0}", r"$\{x \mid x \geq 0\}$"),
    (r"\boxed{[-2,1)}", r"$\{x|-2\leq x < 1\}$"),
    (r"\boxed{1-i}", r"1-\mathrm{i}"),
    (r"\boxed{3i+4}", r"4+3\mathrm{i}"),
    (r"\boxed{62+5i}", r"62+5 i"),
    (r"\boxed{\pi i}", r"\pi\mathrm{i}"),
    (r"\boxed{3i + 4j}", r"3\mathbf{i} + 4\mathbf{j}"),
    (r"\boxed{3 \sqrt{5}}", r"3 \sqrt{5} \mathrm{ft} / \mathrm{s}"),
    (r"\boxed{x^2\mathrm{e}^{x}}", "x^2e^x"),
    (r"\boxed{x \ne 5}", r"x \neq 5"),
    (r"\boxed{5 \neq x}", r"x \neq 5"),
    # how a number is written
    ("The answer is 9.", "9 (apples)"),
    ("The answer is 9 apples.", "9 (apples)"),
    ("The answer is 3 (lemon heads).", "3"),
    ("It is 61.", "61 (pieces of gum)"),
    (r"\boxed{42.}", "42"),
    (r"\boxed{42.0}", "42"),
    (r"\boxed{042}", "42"),
    ("42", "042"),
    (r"\boxed{+42}", "42"),
    (r"\boxed{- 3}", "-3"),
    ("- 3", "-3"),
    ("\u22123", "-3"),
    (r"\boxed{1e6}", "1000000"),
    (r"\boxed{1.5e-3}", "0.0015"),
    (r"\boxed{1.5 \times 10^{6}}", "1500000"),
    ("1000000", "1e6"),
    (r"\boxed{3 1/2}", "7/2"),
    (r"\boxed{3\frac{1}{2}}", "3.5"),
    ("3½", "3.5"),
    (r"\boxed{-3 1/2}", "-3.5"),
    (r"\boxed{\frac12}", "0.5"),
    (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{-\tfrac{1}{2}}", "-1/2"),
    (r"\boxed{\frac{-1}{2}}", "-0.5"),
    (r"\boxed{2/4}", "1/2"),
    (r"\boxed{1,234}", "1234"),
    ("#### 1,234", "1,234"),
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{10,\!080}", "10080"),
    (r"\boxed{1\,234\,567}", "1,234,567"),
    ("1 234 567", "1234567"),
    (r"\boxed{0.333333}", "1/3"),
    (r"\boxed{.5}", "0.5"),
    (r"\boxed{\text{42}}", "42"),
    (r"\boxed{\mathbf{42}}", "42"),
    (r"\boxed{\{42\}}", "42"),
    # what stands beside a number
    (r"\boxed{\$18}", "18"),
    ("She pays $18.", "18"),
    ("18", r"\$18"),
    ("\\boxed{18 \\text{ dollars}}", "18"),
    (r"\boxed{-\$18}", "-18"),
    ("€ 18.50", "18.5"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{50\%}", "0.5"),
    ("50", r"50\%"),
    (r"\boxed{1/2}", "50%"),
    ("It is 12.5 percent.", "12.5%"),
    (r"\boxed{5 \text{ cm}}", "5"),
    (r"\boxed{5\,\mathrm{m/s}}", "5"),
    (r"\boxed{5 cm^2}", "5"),
    (r"\boxed{5cm}", "5 cm"),
    (r"\boxed{90^\circ}", "90"),
    ("90", r"90^{\circ}"),
    (r"\boxed{90°}", "90"),
    (r"\boxed{42 square feet}", "42"),
    ("She has 42 apples left.", "42"),
    (r"\boxed{3 \text{ million}}", "3000000"),
    ("The answer is 42!", "42"),
    # words
    (r"\boxed{Paris}", "Paris"),
    (r"\boxed{\text{Paris}}", "paris"),
    ("The answer is Paris.", "Paris"),
    ("Paris", r"\text{Paris}"),
    (r"\boxed{B}", "B"),
    (r"\boxed{(B)}", "B"),
    (r"\boxed{\textbf{(B)}}", r"\text{(B)}"),
    ("The correct option is B.", "B"),
    (r"\boxed{\text{Yes}}", "yes"),
    (r"\boxed{New York}", "New  York"),
    (r"\boxed{2024-05-01}", "2024-05-01"),
    (r"\boxed{3 : 4}", "3:4"),
    (r"\boxed{北京}", "北京"),
    # formulas
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}"),
    (r"\boxed{2\pi}", r"2 \pi"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    ("The answer is $(x+1)^2$.", "x^2+2x+1"),
    ("So it is x^2 + 2x + 1.", "x^2+2x+1"),
    (r"\boxed{y = 2x + 1}", "y=2x+1"),
    (r"\boxed{(1, 2)}", "(1,2)"),
    (r"\boxed{[1, \infty)}", r"[1,\infty)"),
    (r"\boxed{(-\infty, 0) \cup (1, 2]}", r"(-\infty,0)\cup(1,2]"),
    (r"\boxed{\{2, 1\}}", r"\{1, 2\}"),
    (r"\boxed{1, 2}", "2, 1"),
    (r"\boxed{1 \text{ or } 2}", "1, 2"),
    (r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}}", r"\begin{pmatrix} 1&2\\3&4 \end{pmatrix}"),
    (r"\boxed{3 + 4i}", "3+4i"),
    (r"\boxed{x \ge 3}", r"x \geq 3"),
    (r"\boxed{1024}", "2^{10}"),
    (r"\boxed{2}", "4/2"),
    (r"\boxed{\infty}", r"\infty"),
    (r"\boxed{\frac{\pi}{4}}", "pi/4"),
    (r"\boxed{sqrt(2)}", r"\sqrt{2}"),
    (r"\boxed{4210_{5}}", "4210_5"),
    (r"\boxed{[-2,7]}", r"x \in [-2,7]"),
    (r"\boxed{11\sqrt2}", r"11\sqrt{2}"),
    (r"\boxed{1 \pm \sqrt{19}}", r"1 \pm \sqrt{19}"),
    (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"(3,\pi/2)"),
    # a quantity before the number
    (r"\boxed{m+n=113}", "113"),
    (r"\boxed{100m + n = 10300}", "10300"),
    (r"\boxed{AB = 12}", "12"),
    (r"\boxed{Area = 24}", "24"),
    (r"\boxed{= 42}", "42"),
    (r"\boxed{\approx 3.14}", "3.14"),
    # other languages
    ("所以一共有42个苹果。", "42"),
    (r"\boxed{42元}", "42"),
    (r"\boxed{42\text{ 元}}", "42"),
    ("答えは42円です。", "42"),
    ("정답: 42개", "42"),
    ("Ответ: 42 рубля.", "42"),
    (r"\boxed{42км}", "42"),
    (r"\boxed{42 \text{ años}}", "42"),
    ("उत्तर: 42 रुपये", "42"),
    (r"\boxed{3万元}", "30000"),
    (r"\boxed{3 Millionen}", "3000000"),
    ("答案是：A", "A"),
    ("正确答案是B。", "B"),
    ("答案：是", "是"),
    ("La respuesta correcta es C.", "C"),
    ("Ответ: B", "B"),
    # layout of formulas
    (r"\boxed{\varnothing}", r"\emptyset"),
    (r"\boxed{2, 3, \text{ and } 5}", "2,3,5"),
    (r"\boxed{24\pi}", r"24\pi \text{ square units}"),
    (r"\boxed{\frac{25\pi}{2} \text{ cm}^2}", r"\frac{25\pi}{2} \text{ square inches}"),
    (r"\boxed{n!}", "n!"),
    (r"\boxed{(n-1)!}", "(n-1)!"),
    (r"\boxed{\color{red}{5}}", "5"),
    (r"\boxed{\textcolor{blue}{5}}", "5"),
    (r"\boxed{\underline{5}}", "5"),
    (r"\boxed{\large 5}", "5"),
    (r"\boxed{\phantom{x}5}", "5"),
    (r"\boxed{\boldsymbol{5}}", "5"),
    (r"\boxed{\color{red} x + 1}", "x + 1"),
    ("Answer:\n```\n5\n```", "5"),
    ("The answer is:\n\n$$\n5\n$$", "5"),
    ("The answer is:\n\\[\n\\frac{1}{2}\n\\]\nas 3 shows", "1/2"),
    (r"\boxed{0.\overline{3}}", r"\frac13"),
    (r"\boxed{\frac{1}{6}}", r"0.1\overline{6}"),
    (r"\boxed{0.\bar{3}}", "1/3"),
    (r"\boxed{2.\overline{45}}", r"\frac{27}{11}"),
    # what is not the answer stands beside it
    ("The answer is 5, not 6.", "5"),
    ("It is 5 (not 4, as one may think).", "5"),
    ("The answer is 3.5, not 3.7.", "3.5"),
    ("The answer is 5 rather than 6.", "5"),
    ("The answer is Paris, not London.", "Paris"),
    ("The answer is $x+1$, not $x-1$", "x+1"),
    ("<answer>5, not 6</answer>", "5"),
    ("It is not 4 but 5.", "5"),
    ("The answer is not 4. It is 5.", "5"),
    ("She had 10 and not 5", "10"),
    ("I first thought 5, but it is 6.", "6"),
    ("So x = 12.\nCheck: 2+3=5", "12"),
    ("x = 12\n\n**Verification:**\n12 - 7 = 5", "12"),
    ("x is 12. Let me check: 12 - 7 = 5", "12"),
    ("x = 12 (check: 12 - 7 = 5)", "12"),
    ("x = 12\nTo verify: 12 - 7 = 5", "12"),
    ("The answer is 12 (2 + 3 = 5)", "12"),
    ("Check: 2 + 3 = 5", "5"),
    ("We double-check: 12-7=5\nTherefore 12.", "12"),
    # a "not" that denies something else
    ("So 5 students do not like either.", "5"),
    ("The 5 students are not wearing a hat.", "5"),
    ("So 5 answers are wrong.", "5"),
    ("So it costs $5, not including tax.", "5"),
    ("There are not enough, so 5 more are needed.", "5"),
    ("If it does not rain, there are 5 days.", "5"),
    ("She needs at least 5 boxes.", "5"),
    ("<strong>5</strong>", "5"),
    ("x => 5", "5"),
    # references that hold a solution
    (r"\boxed{42}", r"We add, and it is $\boxed{42}$."),
    ("72", "48 + 24 = <<48+24=72>>72\n#### 72"),
]  # fmt: skip

WRONG = [
    ("", "42"),
    ("no idea", "42"),
    (r"\boxed{}", "42"),
    (r"\boxed{43}", "42"),
    (r"\boxed{42} no, \boxed{43}", "42"),
    ("42 or 43", "43"),
    (r"\boxed{42 \text{ or } 43}", "43"),
    (r"\boxed{42, 43}", "43"),
    (r"\boxed{41} \boxed{42} \boxed{43}", "42"),
    # a question that nobody has answered
    ("7 + 5", "12"),
    (r"\boxed{7 + 5}", "12"),
    ("$7+5$", "12"),
    ("0 + 5", "5"),
    ("10 - 5", "-5"),
    ("24/2", "12"),
    (r"\boxed{\frac{24}{2}}", "12"),
    (r"\boxed{\sqrt{144}}", "12"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{3!}", "6"),
    ("3 * 4 =", "12"),
    # what is not true
    ("$3=4$", "4"),
    (r"\boxed{3=4}", "4"),
    ("7 + 5 = 13", "13"),
    (r"\boxed{7 + 5 = 13}", "13"),
    (r"\boxed{1 = 2 = 42}", "42"),
    (r"\boxed{2x = 42}", "42"),
    (r"\boxed{x^2 = 4}", "4"),
    (r"\boxed{x=1 or x=42}", "42"),
    (r"\boxed{x=1, y=42}", "42"),
    (r"\boxed{m+n=3=4}", "4"),
    (r"\boxed{0.\overline{3}}", "0.3"),
    (r"\boxed{\color{red}{4}}", "5"),
    (r"\boxed{\color{5}}", "5"),
    # other languages
    (r"\boxed{3万}", "3"),
    ("共有3万人。", "3"),
    (r"\boxed{42以上}", "42"),
    ("42或43", "43"),
    (r"\boxed{42 или 43}", "42"),
    (r"\boxed{42π}", "42"),
    ("答案是：A", "B"),
    # what is denied
    *((text, "5") for text in (
        "The answer is not 5.", "It cannot be 5.", "The answer isn’t 5.", "So it isn't 5",
        "It is never 5.", "I first thought 5, but that is wrong.",
        "Initially I got 5, which is not correct.", "I got 5 at first. That is wrong.",
        "5 is not the answer.", "5 does not work.", "The number 5 is incorrect", "it is neither 4 nor 5",
        "The answer is 6, not 5.", "The answer is 6 instead of 5.", "We rule out 5", "#### not 5",
        "<answer>not 5</answer>", "The answer is not $5$.", r"It cannot be \(5\)", "It is not **5**",
        "答案不是5", "La respuesta no es 5", "Die Antwort ist nicht 5", "La réponse n'est pas 5",
        "答えは5ではない", r"x \ne 5", r"$x \neq 5$", "x != 5", "x ≠ 5", "x < 5", r"$x \le 5$",
        "It is more than 5.", "It might be 4 or maybe 5.", "Either 4 or 5", "So x = 12.\nCheck: 2+3=5",
        "We get 12. Let me check: 12-7=5.",
    )),
    ("The answer is not $x+1$", "x+1"),
    ("The answer is not $B$", "B"),
    ("The answer is Paris, not London.", "London"),
    # several answers
    *((text, one) for one in ("5", "6") for text in (
        "The answer is $5$ or $6$.", "The answer is $6$ or maybe $5$.", "Answer: $5$, $6$", "$5$ and $6$",
        r"\(5\) or \(6\)", "Either 5 apples or 6 apples", "It is 5 apples or 6.", "$5$ or 6", "5 or $6$",
        r"\boxed{5 \text{ or } x=6}", r"\boxed{6 \text{ or } y=5}", r"\boxed{x=5, x=6}",
        "<answer>5 or x = 6</answer>", "The answer is $x=5$ or $x=6$.", "The answers are $5$, $7$, and $6$.",
    )),
    (r"The answer is $\sqrt{3}$ or $\sqrt{2}$.", r"\sqrt{2}"),
    (r"The answer is $\sqrt{2}$ or $\sqrt{3}$.", r"\sqrt{2}"),
    (r"\boxed{\frac{1}{3} a + b \text{ or } 0.2}", r"\frac{1}{3} a + b"),
    ("The answer is $x=2$.", "$x=0$ or $x=2$"),
    *(("The answer is $A$ or $D$.", one) for one in "AD"),
    *(("It is $A$. Or is it $D$?", one) for one in "AD"),
    ("The answer is not $A$ but $D$.", "A"),
    (r"Final answer: \begin{bmatrix}3 & 7 \\ 5 & 13\end{bmatrix}", MATRIX),
    (r"\boxed{(-2,1)}", r"$\{x|-2\leq x < 1\}$"),
    *((text, r"x \neq 5") for text in (r"\boxed{x = 5}", r"\boxed{x \neq 6}", r"\boxed{x > 5}", "5")),
    (r"\boxed{x \neq 5}", r"x > 5"),
    ("The answer is 8 (apples).", "9 (apples)"),
    (r"\boxed{7}", r"4+3\mathrm{i}"),
    (r"\boxed{7}", r"3\mathbf{i} + 4\mathbf{j}"),
    (r"\boxed{\pi}", r"\pi\mathrm{i}"),
    ("$2$", r"2\mathrm{e}"),
    (r"\boxed{x^2}", r"x^2\mathrm{e}^{x}"),
    # numbers that look alike
    *((text, "42") for text in ("It is 42a and b.", "It is 42 a.", "It is 42/7.", "It is 42/x.")),
    ("The answer is 7:30 a.m.", "7:30 PM"),
    ("42 (mod 7)", "42"),
    (r"\boxed{42(m)}", "42"),
    (r"\boxed{42x}", "42"),
    (r"\boxed{42^2}", "42"),
    (r"\boxed{42i}", "42"),
    (r"\boxed{42\pi}", "42"),
    (r"\boxed{42 million}", "42"),
    (r"\boxed{1e6}", "1"),
    (r"\boxed{- 3}", "3"),
    (r"\boxed{3 1/2}", "1"),
    (r"\boxed{3 1/2}", "3"),
    (r"\boxed{1,23}", "123"),
    (r"\boxed{(1,234)}", "1234"),
    (r"\boxed{0.33}", "1/3"),
    (r"\boxed{0.3333331}", "0.3333339"),
    (r"\boxed{1000001}", "1000000"),
    (r"\boxed{0.42}", "42"),
    (r"\boxed{4200\%}", "4200.5"),
    (r"\boxed{forty-two}", "42"),
    # words
    (r"\boxed{Pairs}", "Paris"),
    (r"\boxed{b}", "B"),
    ("$b$", "$B$"),
    (r"\boxed{BA}", "AB"),
    (r"\boxed{A}", "B"),
    ("Paris or London", "Paris"),
    (r"\boxed{2024-05-02}", "2024-05-01"),
    (r"\boxed{2018}", "2024-05-01"),
    (r"\boxed{6:8}", "3:4"),
    # formulas
    (r"\boxed{n}", "n!"),
    (r"\boxed{n-1}", "(n-1)!"),
    (r"\boxed{5}", r"5\sqrt{3}\text{ cm}"),
    (r"\boxed{\frac{n}{2}}", r"\frac{n}{2} \text{ if even}"),
    (r"\boxed{x + 1}", "x + 2"),
    (r"\boxed{(1, 2)}", "(2, 1)"),
    (r"\boxed{(1, 2)}", "[1, 2]"),
    (r"\boxed{\{1, 2, 3\}}", r"\{1, 2\}"),
    (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{\sqrt{3}}{2}"),
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
    (r"\boxed{y = 2x}", "y = 3x"),
    (r"\boxed{4210}", "4210_5"),
    (r"\boxed{x<3}", "x > 3"),
    (r"\boxed{Paris}", "x^2 + 1"),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "reference"), RIGHT)
def test_a_right_answer_earns_1(completion, reference):
    assert REWARD(completion, reference, {}) == 1.0


@pytest.mark.parametrize(("completion", "reference"), WRONG)
def test_a_wrong_answer_earns_0(completion, reference):
    assert REWARD(completion, reference, {}) == 0.0


def test_every_reference_of_the_tables_earns_1_in_a_box():
    references = {
        reference.rpartition("####")[2] for _, reference in RIGHT + WRONG if "boxed" not in reference
    }
    assert [one for one in references if REWARD(f"\\boxed{{{one}}}", one, {}) != 1.0] == []


@pytest.mark.parametrize(
    "reference", ["", " ", "?", r"\frac{1}{", r"\begin{tabular}", "}{", "...", r"\boxed{}"]
)
def test_a_reference_that_cannot_be_read_is_an_error_and_never_a_zero(reference):
    with pytest.raises(DataError):
        REWARD("42", reference, {})


def test_a_reference_may_be_a_number_of_the_row_and_each_of_several_answers():
    assert REWARD("18", 18.0, {}) == REWARD("18", 18, {}) == 1.0
    several = MathReward(answer_is="any")
    assert several("0.5", ["1/2", "x"], {}) == several("x", ["1/2", "x"], {}) == 1.0
    with pytest.raises(DataError, match="a list"):
        REWARD("1", ["1", "2"], {})


def test_only_the_final_answer_is_compared():
    assert final_answer("First 1.\nThen 2 apples.").text == "Then 2 apples."
    assert final_answer(" \n") is None


@pytest.mark.parametrize("text", ["9" * 5000, "1e99999", "1/0", r"\frac{1}{0}", "", "e6", "-", "1.2.3"])
def test_what_is_no_number_is_none(text):
    assert read_number(text) is None


LONG = [
    *("\\boxed{" * 20_000, "{" * 20_000 + "}" * 20_000, "$" * 20_001, "\\(" * 9_999, "a" * 50_000),
    *("1 " * 20_000, "<answer>" * 5_000, "answer is " * 5_000, "-" * 20_000 + "1", "1" + "a." * 300),
    " " * 50_000 + "1",
]


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[:8])
def test_long_texts_of_any_kind_are_read_in_a_moment(text):
    assert REWARD(text, "42", {}) == 0.0
    assert REWARD(f"\\boxed{{{text}", "42", {}) in (0.0, 1.0)
