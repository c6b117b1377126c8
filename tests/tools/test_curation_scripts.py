"""Near copies in every script, and with every kind of punctuation: they differ in one word, or in no word."""

from __future__ import annotations

import unicodedata

import pytest

from millrace_curation import filters
from millrace_curation.candidate import CandidateRow
from millrace_curation.words import figures_of, normalized, words_of

TEXTS = {
    "Hindi": (
        "एक किसान सुबह बाज़ार जाता है और छोटे शहर के लोगों को सेब बेचता है और फिर वह अपने बच्चों के "
        "लिए रोटी खरीदता है और शाम होने से पहले नदी के किनारे घर लौटता है जब पुरानी चक्की के ऊपर तारे "
        "दिखाई देते हैं"
    ),
    "Tamil": (
        "ஒரு விவசாயி காலையில் சந்தைக்குச் சென்று சிறிய நகரத்தின் மக்களுக்கு ஆப்பிள்களை விற்கிறார் பின்னர் "
        "அவர் தனது குழந்தைகளுக்கு ரொட்டி வாங்குகிறார் மாலை வருவதற்கு முன் ஆற்றின் கரையில் வீடு திரும்புகிறார் "
        "பழைய ஆலையின் மேல் நட்சத்திரங்கள் தோன்றும் போது அவர் மிகவும் மகிழ்ச்சியாக இருக்கிறார்"
    ),
    "Bengali": (
        "একজন কৃষক সকালে বাজারে যায় এবং ছোট শহরের মানুষদের কাছে আপেল বিক্রি করে তারপর সে তার সন্তানদের "
        "জন্য রুটি কেনে এবং সন্ধ্যা হওয়ার আগে নদীর ধার দিয়ে বাড়ি ফেরে যখন পুরনো কলের উপরে তারা দেখা "
        "যায়"
    ),
    "Thai": ("ชาวนาเดินไปตลาดในตอนเช้าและขายแอปเปิลให้กับคนในเมืองเล็กๆแล้วเขาก็ซื้อขนมปังให้ลูกๆและกลับบ้านตามแม่น้ำก่อนค่ำ"),
    "Khmer": ("កសិករម្នាក់ដើរទៅផ្សារនៅពេលព្រឹកហើយលក់ផ្លែប៉ោមឱ្យប្រជាជននៃទីក្រុងតូចបន្ទាប់មកគាត់ទិញនំប៉័ងសម្រាប់កូនៗរបស់គាត់"),
    "Chinese": (
        "一个农夫早上走到市场把苹果卖给小镇上的人们然后他给孩子们买面包在傍晚到来之前沿着河边走回家"
        "那时星星出现在老磨坊的上空"
    ),
    "Japanese": (
        "農夫は朝に市場へ歩いて行き小さな町の人々にリンゴを売りそれから子供たちのためにパンを買い夕"
        "方になる前に川に沿って家に帰る"
    ),
    "Arabic": (
        "يمشي الفلاح إلى السوق في الصباح ويبيع التفاح لأهل البلدة الصغيرة ثم يشتري الخبز لأطفاله ويعود "
        "إلى البيت على طول النهر قبل أن يأتي المساء وتظهر النجوم فوق الطاحونة القديمة"
    ),
    "Hebrew": (
        "האיכר הולך בבוקר אל השוק ומוכר תפוחים לאנשי העיירה הקטנה ואחר כך הוא קונה לחם לילדיו וחוזר "
        "הביתה לאורך הנהר לפני שהערב יורד והכוכבים מופיעים מעל הטחנה הישנה"
    ),
    "Greek": (
        "Ένας αγρότης πηγαίνει στην αγορά το πρωί και πουλά μήλα στους ανθρώπους της μικρής πόλης και "
        "μετά αγοράζει ψωμί για τα παιδιά του και γυρίζει σπίτι δίπλα στο ποτάμι πριν έρθει το βράδυ"
    ),
    "Vietnamese": (
        "Một người nông dân đi bộ đến chợ vào buổi sáng và bán táo cho người dân của thị trấn nhỏ rồi "
        "anh ấy mua bánh mì cho các con và trở về nhà dọc theo dòng sông trước khi trời tối"
    ),
    "English": (
        "A farmer walks to the market in the morning and sells apples to the people of the small town "
        "and then he buys bread for his children and goes home along the river before the evening comes"
    ),
}
STOPS = "。、！？；：「」『』（）।॥؟،؛۔׃׀։‥…·•‣◦●■▶★✓※〜—―‹›«»„“”"


def near(*texts: str) -> bool:
    rows = [CandidateRow(i, f"rows:{i}", {}, text, text, [1], None) for i, text in enumerate(texts)]
    return bool(filters.duplicates(rows) or filters.near_duplicates(rows, 0.8))


def changed(text: str) -> str:
    """With one word, or one character, in the middle that is another of the text."""
    if " " in text:
        words = text.split(" ")
        words[len(words) // 2] = words[0]
        return " ".join(words)
    middle = len(text) // 2
    return text[:middle] + text[:2] + text[middle + 2 :]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_with_one_other_word_is_near_in_every_script(text: str) -> None:
    assert changed(text) != text and near(text, changed(text))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_other_words_are_another_row_in_every_script(text: str) -> None:
    middle = len(text) // 2
    assert not near(text[:middle], text[middle:])


@pytest.mark.parametrize("stop", STOPS)
def test_punctuation_and_bullets_of_every_script_do_not_count(stop: str) -> None:
    for text in (TEXTS["English"], TEXTS["Chinese"], TEXTS["Hindi"]):
        assert near(text, f"{stop} {text}{stop}")
    assert words_of(f"a{stop} b") == ["a", "b"] and not figures_of(words_of(stop))


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_normal_form_of_a_text_makes_no_other_row(form: str, text: str) -> None:
    assert normalized(unicodedata.normalize(form, text)) == normalized(text)
    assert words_of(unicodedata.normalize(form, text.upper())) == words_of(text.upper())


def test_a_word_has_its_vowel_signs() -> None:
    assert words_of("रोटी है।") == ["रोटी", "है"]
    assert words_of("नहीं नहा") == ["नहीं", "नहा"]
    assert words_of("தமிழ் நூல்") == ["தமிழ்", "நூல்"]
    assert words_of("ผู้กิน") == ["ผู้", "กิ", "น"]  # no spaces: a letter with its signs each
    assert words_of("한국어") == list("한국어")


def test_points_that_texts_may_leave_out_are_left_out() -> None:
    assert words_of("كِتَابٌ كـتاب") == ["كتاب", "كتاب"]
    assert words_of("שָׁלוֹם") == ["שלום"]


def test_joiners_direction_marks_and_variants_are_nothing() -> None:
    assert words_of("a\u200db \u200fc \ufeffd\u00ade \u2764\ufe0f") == ["ab", "c", "de"]


def test_digits_of_every_script_and_width_are_numbers() -> None:
    assert words_of("१२ ١٬٢٥٠٫٥ ４８ ๓") == ["12", "1250.5", "48", "3"]
    assert not near(f"{TEXTS['Hindi']} १२", f"{TEXTS['Hindi']} १३")
    assert near(f"{TEXTS['Hindi']} १२", f"{TEXTS['Hindi']} 12")


@pytest.mark.parametrize(
    "other",
    [
        "<p>{}</p><br/>",
        '<div class="q"><b>{}</b></div>',
        "1. {}",
        "  12) {}",
        "[{}](https://example.org/a_1)",
        "&quot;{}&nbsp;&quot;",
    ],
)
def test_markup_and_numbers_of_lists_make_no_other_row(other: str) -> None:
    assert near(TEXTS["English"], other.format(TEXTS["English"]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("12 - 7", "7 - 12"),
        ("-5", "5"),
        ("2 * -5", "2 * 5"),
        (r"\frac{1}{2}", r"\frac{2}{1}"),
        ("a < 5", "a > 5"),
        ("f[1](2)", "f[1](3)"),
        ("if 1<b and c>2", "if 1<b and c>3"),
    ],
)
def test_other_arithmetic_is_another_row(one: str, other: str) -> None:
    assert not near(f"{one} {TEXTS['English']}", f"{other} {TEXTS['English']}")


def test_a_hyphen_is_no_sign() -> None:
    assert words_of("pages 10-12, a 5-year-old, x -3 and (-4)") == [
        *("pages", "10", "12", "a", "5", "year", "old", "x", "-3", "and", "-4")
    ]


def test_bullets_and_emphasis_are_no_arithmetic_and_arithmetic_is() -> None:
    assert words_of("* one\n  + two\n- three\n→ four\n> five") == ["one", "two", "three", "four", "five"]
    assert words_of("**bold**: *it* __x__") == ["bold", "it", "x"]
    assert words_of("2**3 a*b 5 * 3 (a)*(b)") == [*"2**3a*b5*3a*b"]
    assert words_of("12\n+ 34\n* 5") == ["12", "+", "34", "*", "5"]
    assert figures_of(words_of("5 % ≤ 6 € ÷ 7°")) == tuple("5%≤6€÷7°")
    assert not near(f"{TEXTS['English']} a × b", f"{TEXTS['English']} a ÷ b")
